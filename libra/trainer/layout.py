"""Where a rank stands in the parallel layout. Pure: known before any process group exists."""

import msgspec

from libra.config.training import TrainingConfig
from libra.errors import ConfigError


class ParallelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the parallel dimensions; their product with `data` is the world size."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int


class Coordinates(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's index in every dimension. `data` leaves context parallelism out."""

    rank: int
    local_rank: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int


def parallel_sizes(config: TrainingConfig, *, world_size: int) -> ParallelSizes:
    """Sizes of `config` on `world_size` ranks. Raises ConfigError when they do not fit."""
    replica = config.train_tp_size * config.train_pp_size * config.train_cp_size
    if world_size % replica:
        raise ConfigError(
            f"{world_size} trainer ranks cannot be split into replicas of {replica}: "
            f"train_tp_size {config.train_tp_size} x train_pp_size {config.train_pp_size} x "
            f"train_cp_size {config.train_cp_size} must divide train_gpus"
        )
    data = world_size // replica
    if (data * config.train_cp_size) % config.train_ep_size:
        raise ConfigError(
            f"train_ep_size {config.train_ep_size} must divide the {data * config.train_cp_size} "
            "ranks that data and context parallelism make together"
        )
    return ParallelSizes(
        tensor=config.train_tp_size,
        pipeline=config.train_pp_size,
        context=config.train_cp_size,
        expert=config.train_ep_size,
        data=data,
    )


def lane_of(sizes: ParallelSizes, at: Coordinates, *, replica_size: int) -> int | None:
    """Which rank of a hybrid replica a core rank is the head of; None when it is of none.

    A replica has the core's sizes but for data parallelism, of which it has the least that holds
    every expert. Raises ConfigError when `replica_size` ranks are not a whole replica of this core.
    """
    grid = sizes.tensor * sizes.pipeline * sizes.context
    data, rest = divmod(replica_size, grid)
    has_experts = (data * sizes.context) % sizes.expert == 0
    if rest or not 1 <= data <= sizes.data or not has_experts:
        raise ConfigError(
            f"hybrid replicas of {replica_size} ranks do not fit a core of TP {sizes.tensor}, "
            f"PP {sizes.pipeline}, CP {sizes.context}, EP {sizes.expert} and DP {sizes.data}"
        )
    if at.data >= data:
        return None
    outer = at.pipeline * data + at.data
    return (outer * sizes.context + at.context) * sizes.tensor + at.tensor


def coordinates(sizes: ParallelSizes, *, rank: int, local_rank: int) -> Coordinates:
    """Split `rank` in Megatron's order tp-cp-ep-dp-pp, the fastest dimension first."""
    rest, tensor = divmod(rank, sizes.tensor)
    expert = rest % sizes.expert
    rest, context = divmod(rest, sizes.context)
    pipeline, data = divmod(rest, sizes.data)
    return Coordinates(
        rank=rank,
        local_rank=local_rank,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        data=data,
    )
