"""Atomic writes, hashes, safetensors and manifest files."""
