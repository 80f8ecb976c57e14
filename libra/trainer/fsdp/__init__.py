"""The FSDP backend: any causal language model of transformers, sharded by torch's `fully_shard`."""
