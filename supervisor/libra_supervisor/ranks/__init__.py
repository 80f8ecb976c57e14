"""The torchrun gang and the links to its ranks."""
