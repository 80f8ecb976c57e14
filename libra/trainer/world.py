"""The process group of a gang of ranks: joining it, and small agreements inside it."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from libra.errors import ConfigError
from libra.trainer.layout import Coordinates, ParallelSizes

LONGEST_WRITE = timedelta(days=1)


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Where this rank stands, its device, and the groups around it."""

    at: Coordinates
    sizes: ParallelSizes
    device: Any
    """torch.device of this rank's tensors."""

    tensor_group: Any
    """The ranks that hold slices of the same layers and the same samples; None under FSDP."""

    context_group: Any
    """The ranks that hold pieces of the same sequences; None under FSDP."""

    files_group: Any
    """All ranks, for agreements about files between threads behind the training; on gloo."""

    @property
    def size(self) -> int:
        return self.sizes.tensor * self.sizes.pipeline * self.sizes.context * self.sizes.data

    @property
    def is_first_stage(self) -> bool:
        return self.at.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at.pipeline == self.sizes.pipeline - 1

    @property
    def has_results(self) -> bool:
        """Whether this rank's scores count: over all such ranks, every token is scored once."""
        return self.is_last_stage and self.at.tensor == 0


def choose_device(wanted: Literal["auto", "cpu", "cuda"], *, local_rank: int) -> torch.device:
    """Choose the device of this rank. Raises ConfigError when CUDA is wanted and not there."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device: cuda, but torch finds no CUDA device; set device: cpu or auto")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_world(
    sizes: ParallelSizes,
    at: Coordinates,
    device: torch.device,
    *,
    timeout_s: float,
    has_megatron: bool,
) -> World:
    """Meet the other ranks and build the groups; blocks until all are there.

    A collective that takes longer than `timeout_s` raises on every rank. `has_megatron`: build
    Megatron-Core's groups, which nobody else needs.
    """
    on_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=device if on_cuda else None,
    )
    tensor_group, context_group = _megatron_groups(sizes) if has_megatron else (None, None)
    return World(
        at=at,
        sizes=sizes,
        device=device,
        tensor_group=tensor_group,
        context_group=context_group,
        # One rank may write for long while another has nothing to write.
        files_group=dist.new_group(backend="gloo", timeout=LONGEST_WRITE),
    )


def _megatron_groups(sizes: ParallelSizes) -> tuple[Any, Any]:
    from megatron.core import parallel_state  # noqa: PLC0415 - needs cpu_path.enable() first

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
    )
    return (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
    )


def leave_world() -> None:
    """Take down the groups; safe to call when they were never built."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_world(world: World, values: Sequence[float]) -> list[float]:
    """Element-wise sum over all ranks, in double precision, the same on every rank."""
    total = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]


def max_over_world(world: World, values: Sequence[float]) -> list[float]:
    """Element-wise maximum over all ranks, the same on every rank."""
    largest = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [float(value) for value in largest.tolist()]


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no value is NaN or infinite; waits for the device once."""
    verdicts = [tensor.isfinite().all() for tensor in tensors]
    return not verdicts or bool(torch.stack(verdicts).all())


def barrier(world: World) -> None:
    """Wait for all ranks."""
    # An all-reduce: dist.barrier guesses a device under NCCL and warns about it.
    sum_over_world(world, [0.0])
