"""The OpenAI-compatible gateway, and the one place where tasks wait for the scheduler."""
