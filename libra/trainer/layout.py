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
