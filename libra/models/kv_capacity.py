"""How many tokens of KV cache one rollout instance holds, before its server has measured it."""

import msgspec

from libra.models.architecture import Architecture, num_parameters

GIB = 2**30


class RolloutMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine may use of each of its devices."""

    device_bytes: int
    """Memory of one device."""

    utilization_fraction: float
    """`gpu_memory_utilization`."""

    activation_reserve_bytes: int
    """`kv_activation_reserve_gib` in bytes."""

    kv_cache_bytes: int = 0
    """`rollout_kv_cache_bytes`; above 0 it is the cache's size and nothing is estimated."""


def kv_bytes_per_token(arch: Architecture, *, tp: int, kv_dtype_bytes: int) -> int:
    """Bytes that one token occupies on each device of an instance of degree `tp`.

    2 (K and V) x layers x KV heads per device x head size x element size. With grouped-query
    attention a device keeps at least one KV head, so beyond `num_kv_heads` heads are replicated
    and a higher degree saves nothing. Latent attention keeps its whole vector on each device.
    """
    if arch.kv_latent_size:
        return arch.num_layers * arch.kv_latent_size * kv_dtype_bytes
    heads_per_device = max(1, -(-arch.num_kv_heads // tp))
    return 2 * arch.num_layers * heads_per_device * arch.head_dim * kv_dtype_bytes


def kv_cache_bytes_per_device(
    arch: Architecture, memory: RolloutMemory, *, tp: int, weight_dtype_bytes: int
) -> int:
    """What is left for KV on one device: the share vLLM may use, less weights and reserve."""
    if memory.kv_cache_bytes:
        return memory.kv_cache_bytes
    weights = num_parameters(arch) * weight_dtype_bytes // tp
    usable = int(memory.device_bytes * memory.utilization_fraction)
    return max(0, usable - weights - memory.activation_reserve_bytes)


def kv_capacity_tokens(
    arch: Architecture,
    memory: RolloutMemory,
    *,
    tp: int,
    weight_dtype_bytes: int = 2,
    kv_dtype_bytes: int = 2,
) -> int:
    """Tokens that fit into the KV cache of one instance; 0 when the model leaves no room.

    Every device holds its part of every token, so one device's share decides.
    """
    available = kv_cache_bytes_per_device(
        arch, memory, tp=tp, weight_dtype_bytes=weight_dtype_bytes
    )
    return available // kv_bytes_per_token(arch, tp=tp, kv_dtype_bytes=kv_dtype_bytes)


def measured_kv_capacity_tokens(
    *, kv_cache_size_tokens: int | None, num_gpu_blocks: int | None, block_size: int | None
) -> int | None:
    """Read a server's own figures: tokens when it tells them, else blocks x block size.

    None when it told neither. Newer vLLM exposes kv_cache_size_tokens, 0.22 only the blocks.
    """
    if kv_cache_size_tokens:
        return kv_cache_size_tokens
    if num_gpu_blocks and block_size:
        return num_gpu_blocks * block_size
    return None
