"""What a check found, and the arithmetic of memory and disk. Pure."""

from collections.abc import Sequence

import msgspec

GIB = 2**30

# Resident size of one idle process of each kind before any model, measured on Linux x86-64 with
# vLLM 0.32 (CPU) and torch 2.13: API server + EngineCore + Worker, and one Megatron-Core rank.
ENGINE_BASE_BYTES = int(1.3 * GIB)
ENGINE_WORKER_BYTES = int(0.5 * GIB)
RANK_BASE_BYTES = int(0.45 * GIB)
SUPERVISOR_BYTES = int(0.25 * GIB)

TRAIN_BYTES_PER_PARAMETER = 16
"""fp32 weights, gradients and two Adam moments; activations come on top, small on CPU runs."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check's outcome."""

    check: str
    ok: bool
    detail: str
    advice: str = ""
    """What to do; empty when ok."""

    is_in_use_by_a_run: bool = False
    """Not ok only for as long as another run of this user goes on."""


class HostDemand(msgspec.Struct, frozen=True, kw_only=True):
    """What a run puts on one CPU-only host."""

    num_parameters: int
    num_ranks: int
    model_parallel_size: int
    """TP x PP: ranks that share one copy of the parameters."""

    num_instances: int
    num_workers: int
    engine_bytes_per_parameter: int
    kv_cache_bytes_per_worker: int


def host_memory_bytes(demand: HostDemand) -> int:
    """Bytes of host memory that a CPU run needs, an estimate meant to be slightly high."""
    num_copies = demand.num_ranks / demand.model_parallel_size
    training = demand.num_ranks * RANK_BASE_BYTES
    training += int(num_copies * demand.num_parameters * TRAIN_BYTES_PER_PARAMETER)
    engines = demand.num_instances * ENGINE_BASE_BYTES
    engines += (demand.num_workers - demand.num_instances) * ENGINE_WORKER_BYTES
    # During a reload the checkpoint is mapped beside the weights in use.
    weights = demand.num_parameters * demand.engine_bytes_per_parameter
    engines += demand.num_instances * 2 * weights
    engines += demand.num_workers * demand.kv_cache_bytes_per_worker
    return SUPERVISOR_BYTES + training + engines


def memory_finding(*, needed_bytes: int, available_bytes: int) -> Finding:
    ok = needed_bytes <= available_bytes
    return Finding(
        check="memory",
        ok=ok,
        detail=f"about {needed_bytes / GIB:.1f} GiB needed, {available_bytes / GIB:.1f} available",
        advice=""
        if ok
        else "free memory, use a smaller model, or lower rollout_gpus, train_gpus or "
        "rollout_kv_cache_bytes",
    )


def disk_finding(*, directory: str, needed_bytes: int, free_bytes: int) -> Finding:
    ok = needed_bytes <= free_bytes
    return Finding(
        check="disk",
        ok=ok,
        detail=f"about {_size(needed_bytes)} needed in {directory}, {_size(free_bytes)} free",
        advice="" if ok else "free space, lower keep_last, or choose another --run-dir",
    )


def devices_finding(*, num_slots: int, devices: tuple[str, ...]) -> Finding:
    ok = num_slots <= len(devices)
    return Finding(
        check="CUDA devices",
        ok=ok,
        detail=f"the plan uses {num_slots} GPUs here, and {len(devices)} are visible "
        f"({', '.join(devices) or 'none'})",
        advice="" if ok else "see CUDA_VISIBLE_DEVICES and hardware.gpus_per_node",
    )


def runs_in_the_way(findings: Sequence[Finding]) -> tuple[str, ...]:
    """What runs of this user have that a run would need; it is free when they have ended."""
    return tuple(it.detail for it in findings if it.is_in_use_by_a_run)


def refusals(findings: Sequence[Finding]) -> tuple[str, ...]:
    """What stands in the way, and what to do about each."""
    return tuple(f"{it.check}: {it.detail}; {it.advice}" for it in findings if not it.ok)


def _size(num_bytes: int) -> str:
    """Three figures or so in the unit that fits."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"
