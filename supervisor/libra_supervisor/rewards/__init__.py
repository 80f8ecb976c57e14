"""The pool of reward workers: processes that may be killed at any moment without loss."""
