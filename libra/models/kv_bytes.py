"""Bytes of the key-value cache that one token takes on one rollout GPU."""

from libra.config.model_arch import ModelArchConfig


def kv_bytes_per_token(arch: ModelArchConfig, *, tp: int, dtype_bytes: int) -> int:
    """Keys and values of every block on one rank of a TP group.

    A rank holds at least one KV head: with more ranks than heads the heads are copied, so cache
    per GPU stops shrinking at TP = num_key_value_heads.
    """
    heads = max(1, -(-arch.num_key_value_heads // tp))
    return 2 * arch.num_layers * heads * arch.head_dim * dtype_bytes
