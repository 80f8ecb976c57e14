"""Groups -> what each data-parallel rank trains on."""

from collections.abc import Sequence

import msgspec
import numpy as np

from libra.errors import InvariantError
from libra.rollouts.group import CompleteGroup
from libra.rollouts.trajectory import Trajectory
from libra.wire.rank import MiniBatch, Sample


class BatchShape(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch is cut."""

    dp_size: int
    mini_batch_size: int
    """Trajectories per optimizer step over all data-parallel ranks; a multiple of dp_size."""

    num_hybrid_shards: int = 0
    """Shards behind those of the core, for the data-parallel ranks of hybrid replicas."""

    mask_truncated: bool = False
    """Loss mask 0 on trajectories that ran into the token limit. They keep their place in the
    group's baseline."""


def shard(
    groups: Sequence[CompleteGroup], advantages: Sequence[float], shape: BatchShape
) -> tuple[tuple[MiniBatch, ...], ...]:
    """Entry r: the mini-batches of data-parallel rank r, in order of training.

    `advantages` is parallel to the trajectories of `groups` in order. Within a mini-batch every
    rank gets the same number of samples, or one more than another where hybrid replicas make the
    shards uneven, and about the same number of tokens. Token and sequence counts are those of the
    whole mini-batch, the same for every rank: of what is there, also where the batch is not full.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    size = shape.mini_batch_size
    # A batch that could not be filled ends with a mini-batch of what is left.
    rest = len(trajectories) % size
    if size % shape.dp_size or rest % shape.dp_size:
        raise InvariantError(
            f"{len(trajectories)} trajectories do not divide into mini-batches of {size} "
            f"over {shape.dp_size} data-parallel ranks"
        )
    samples = [
        _sample(trajectory, advantage, mask_truncated=shape.mask_truncated)
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
    ]
    per_mini_batch = [
        _split(samples[start : start + size], shape.dp_size + shape.num_hybrid_shards)
        for start in range(0, len(samples), size)
    ]
    return tuple(zip(*per_mini_batch, strict=True))


def trained_mini_batches(groups: Sequence[CompleteGroup], shape: BatchShape) -> tuple[int, ...]:
    """Indices of the mini-batches that have a token to train; the others are skipped by all."""
    trajectories = [t for group in groups for t in group.trajectories]
    size = shape.mini_batch_size
    return tuple(
        index
        for index, start in enumerate(range(0, len(trajectories), size))
        if any(_has_tokens(it, shape) for it in trajectories[start : start + size])
    )


def _has_tokens(trajectory: Trajectory, shape: BatchShape) -> bool:
    is_masked = shape.mask_truncated and trajectory.finish_reason == "length"
    return not is_masked and any(trajectory.loss_mask)


def _split(samples: Sequence[Sample], dp_size: int) -> tuple[MiniBatch, ...]:
    tokens_per_sample = [int(np.frombuffer(s.loss_mask, np.uint8).sum()) for s in samples]
    return tuple(
        MiniBatch(
            samples=tuple(samples[i] for i in indices),
            global_num_tokens=sum(tokens_per_sample),
            global_num_sequences=sum(1 for tokens in tokens_per_sample if tokens),
        )
        for indices in balanced_shares([len(s.loss_mask) for s in samples], dp_size)
    )


def balanced_shares(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """Indices of `lengths` in `num_shares` shares of nearly equal total length.

    Counts are equal, or one less in the last shares when they cannot be.

    The longest goes first, each to the share with the fewest tokens among those with room; within a
    share the indices ascend, so equal input gives equal output on every machine.
    """
    room, more = divmod(len(lengths), num_shares)
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    totals = [0] * num_shares
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        share = min(
            (s for s in range(num_shares) if len(shares[s]) < room + (s < more)),
            key=lambda s: (totals[s], s),
        )
        shares[share].append(index)
        totals[share] += lengths[index]
    return [sorted(share) for share in shares]


def _sample(trajectory: Trajectory, advantage: float, *, mask_truncated: bool) -> Sample:
    mask = np.array(trajectory.loss_mask, np.uint8)
    if mask_truncated and trajectory.finish_reason == "length":
        mask[:] = 0
    return Sample(
        trajectory_id=trajectory.trajectory_id,
        token_ids=np.array(trajectory.token_ids, "<i4").tobytes(),
        loss_mask=mask.tobytes(),
        rollout_logprobs=np.array(trajectory.rollout_logprobs, "<f4").tobytes(),
        advantage=advantage,
    )
