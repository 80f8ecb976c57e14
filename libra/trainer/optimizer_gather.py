"""The state of Megatron's distributed optimizer on its way into a checkpoint, piece by piece.

Megatron 0.19.2 takes each rank's shard to the host, back to the device to gather it, and to the
host again, whole, and fills every buffer with zeros before; with a billion parameters training
stands still for a minute. Here a bounded piece is gathered on the device and copied once, to where
it is written from.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from libra.trainer.parameter_tensors import ParameterTensors, host_tensor

PIECE_ELEMENTS: Final = 32 << 20
"""Of each rank: 128 MiB of device memory, times the ranks on the one that writes."""


def install(
    *,
    piece_elements: int = PIECE_ELEMENTS,
    empty: Callable[[int], torch.Tensor] = host_tensor,
) -> None:
    """Let Megatron gather like this when only the first data-parallel rank wants the state."""
    original = DistributedOptimizer.get_parameter_state_dp_zero
    if hasattr(original, "replaced"):
        original = original.replaced

    def gathered(
        self: Any,
        use_gloo_comm: bool = True,
        empty_data: bool = False,
        return_on_all_ranks: bool = False,
    ) -> Any:
        if empty_data or return_on_all_ranks:
            return original(self, use_gloo_comm, empty_data, return_on_all_ranks)
        return gather_state(self, piece_elements=piece_elements, empty=empty)

    gathered.replaced = original  # type: ignore[attr-defined]
    DistributedOptimizer.get_parameter_state_dp_zero = gathered


def gather_state(
    optimizer: Any,
    *,
    piece_elements: int,
    empty: Callable[[int], torch.Tensor] = host_tensor,
) -> dict[Any, Any] | None:
    """What `get_parameter_state_dp_zero` returns; None but on the first data-parallel rank.

    By buffer index and dtype: main parameters and each optimizer state, ParameterTensors in float32
    where Megatron has flat tensors.
    """
    group = optimizer.data_parallel_group
    is_first = group.rank() == 0
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, (buffer, ranges) in enumerate(
        zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)
    ):
        ((dtype, bucket_ranges),) = ranges.items()
        keys = ("param", *optimizer.optimizer_state_keys)
        parameters = [(begin, end) for begin, end, _ in buffer.param_index_map.values()]
        whole: dict[str, Any] = {
            key: ParameterTensors(parameters, empty) if is_first else None for key in keys
        }
        offset = 0
        for bucket, in_bucket in zip(buffer.buckets, bucket_ranges, strict=True):
            shards = _shards(optimizer, in_bucket)
            for key in keys:
                for start, pieces in _pieces(bucket, shards, key, group, piece_elements):
                    if whole[key] is not None:
                        for rank, piece in enumerate(pieces):
                            begin = start + rank * _shard_size(bucket, group)
                            # The rest is padding.
                            kept = piece[: max(0, bucket.numel_unpadded - begin)]
                            whole[key].write(offset + begin, kept)
            offset += bucket.numel_unpadded
        state[index] = {dtype: whole | {"numel_unpadded": buffer.numel_unpadded}}
    return state if is_first else None


def _shard_size(bucket: Any, group: Any) -> int:
    return int(bucket.grad_data.numel()) // int(group.size())


def _shards(optimizer: Any, in_bucket: Any) -> list[tuple[int, int, dict[str, torch.Tensor]]]:
    """Where each parameter's part lies in this rank's shard, and its tensors."""
    return [
        (
            where["gbuf_local"].start,
            where["gbuf_local"].end,
            optimizer._get_main_param_and_optimizer_states(parameter),  # noqa: SLF001
        )
        for parameter, where in in_bucket["param_map"].items()
    ]


def _pieces(
    bucket: Any,
    shards: list[tuple[int, int, dict[str, torch.Tensor]]],
    key: str,
    group: Any,
    piece_elements: int,
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Every rank's piece from `start` of its shard on; the list is empty but on the first rank."""
    is_first, size = group.rank() == 0, _shard_size(bucket, group)
    for start in range(0, size, piece_elements):
        end = min(start + piece_elements, size)
        own = torch.zeros(end - start, dtype=torch.float32, device=bucket.grad_data.device)
        for first, last, tensors in shards:
            begins, ends = max(first, start), min(last, end)
            if begins < ends:
                part = tensors[key].detach().flatten()[begins - first : ends - first]
                own[begins - start : ends - start].copy_(part)
        if group.size() == 1:
            yield start, [own]
            continue
        pieces = [torch.empty_like(own) for _ in range(group.size())] if is_first else []
        dist.gather(own, pieces or None, dist.get_global_rank(group, 0), group)
        yield start, pieces
