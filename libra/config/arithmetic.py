"""Sizes that follow from the configuration: parallelism, the batch equation, buckets, staleness."""

from math import ceil, gcd, inf, isqrt

import msgspec

from libra.config.rollout import TpBucket
from libra.config.run import RunConfig

VLLM_VOCABULARY_MULTIPLE = 64
"""vLLM pads the embedding's rows to a multiple of this before it splits them."""

MAX_TRIED_DIVISOR = 10**6


class BatchEquation(msgspec.Struct, frozen=True, kw_only=True):
    """One training step in prompts, samples (trajectories) and optimizer steps."""

    prompts: int
    samples_per_prompt: int
    samples: int
    """prompts x samples_per_prompt"""

    optimizer_steps: int
    samples_per_optimizer_step: int
    data_parallel_size: int | None
    """None while the planner is to choose it."""

    samples_per_rank: int | None
    """In one optimizer step on one data-parallel rank."""

    micro_batches_per_rank: int | None
    """In one optimizer step on one data-parallel rank."""


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """What may be on the way at once."""

    max_policy_versions: float
    """Distinct versions that produce trajectories which can still be trained on; may be inf."""

    max_trajectories: int
    """In flight or waiting, by the staleness capacity and max_concurrent_rollouts."""


def model_parallel_size(config: RunConfig) -> int:
    """Ranks that hold one copy of the model: TP x PP x CP."""
    training = config.training
    return training.train_tp_size * training.train_pp_size * training.train_cp_size


def data_parallel_size(config: RunConfig) -> int | None:
    """Count the copies of the model; None when the ranks do not divide or the planner decides."""
    if planner_decides(config):
        return None
    copies, rest = divmod(config.training.train_gpus, model_parallel_size(config))
    return copies if rest == 0 else None


def planner_decides(config: RunConfig) -> bool:
    """Whether train_gpus + rollout_gpus is a budget and the parallel degrees are candidates."""
    return config.global_resource_planner.initial_allocation_strategy == "grp"


def samples_per_optimizer_step(config: RunConfig) -> int:
    return config.training.mini_batch_size or config.training.batch_size


def optimizer_steps(config: RunConfig) -> int:
    """Whole mini-batches of one training step."""
    return config.training.batch_size // samples_per_optimizer_step(config)


def batch_equation(config: RunConfig) -> BatchEquation:
    """Equation of a configuration that passed the batch rules. Raises ValueError for another."""
    training, samples_per_prompt = config.training, config.algorithm.n_samples
    mini = samples_per_optimizer_step(config)
    dp = data_parallel_size(config)
    one_pass = (dp or 1) * training.micro_batch_size
    is_whole_pass = planner_decides(config) or mini % one_pass == 0
    if training.batch_size % samples_per_prompt or training.batch_size % mini or not is_whole_pass:
        raise ValueError("the batch does not divide into whole parts")
    return BatchEquation(
        prompts=training.batch_size // samples_per_prompt,
        samples_per_prompt=samples_per_prompt,
        samples=training.batch_size,
        optimizer_steps=optimizer_steps(config),
        samples_per_optimizer_step=mini,
        data_parallel_size=dp,
        samples_per_rank=mini // dp if dp else None,
        micro_batches_per_rank=mini // one_pass if dp else None,
    )


def steps_per_epoch(config: RunConfig, *, rows: int) -> float:
    """Training steps that use every one of `rows` prompts once; need not be whole."""
    return rows * config.algorithm.n_samples / config.training.batch_size


def staleness(config: RunConfig) -> Staleness:
    """Bounds from max_head_offpolicyness S: batch v+1 may hold versions v-S .. v.

    Engines change version every sync_interval steps, so of S + 1 consecutive versions they served
    at most every sync_interval-th, rounded up. Capacity as in AReaL: (S + 1) batches.
    """
    bound = config.rollout.max_head_offpolicyness
    concurrent = config.rollout.max_concurrent_rollouts
    if bound == inf:
        return Staleness(max_policy_versions=inf, max_trajectories=concurrent)
    return Staleness(
        max_policy_versions=ceil((int(bound) + 1) / config.weights.sync_interval),
        max_trajectories=min(concurrent, (int(bound) + 1) * config.training.batch_size),
    )


def rollout_buckets(config: RunConfig) -> tuple[TpBucket, ...]:
    """Instances by TP degree as configured; one TP 1 instance per GPU when none are named."""
    if config.heterogeneous_rollout.instances:
        return tuple(config.heterogeneous_rollout.instances)
    gpus = config.rollout.rollout_gpus
    return (TpBucket(tp=1, count=gpus),) if gpus else ()


def num_rollout_instances(config: RunConfig) -> int:
    return sum(bucket.count for bucket in rollout_buckets(config))


def padded(size: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def nearest_multiples(value: int, of: int) -> tuple[int, ...]:
    """Positive multiples of `of` around `value`, ascending; one when `value` is a multiple."""
    below = value // of * of
    above = padded(value, of)
    return tuple(sorted({multiple for multiple in (below, above) if multiple > 0}))


def nearest_divisors(value: int, of: int) -> tuple[int, ...]:
    """Divisors of `of` next to `value`, ascending; one when `value` divides it.

    Beyond MAX_TRIED_DIVISOR squared a nearer one may be missed: no search may take minutes.
    """
    tried = range(1, min(isqrt(of), MAX_TRIED_DIVISOR) + 1)
    small = [divisor for divisor in tried if of % divisor == 0]
    divisors = sorted({*small, *(of // divisor for divisor in small)})
    below = [divisor for divisor in divisors if divisor <= value][-1:]
    above = [divisor for divisor in divisors if divisor >= value][:1]
    return tuple(sorted({*below, *above}))


def common_multiple(first: int, second: int) -> int:
    return first * second // gcd(first, second)
