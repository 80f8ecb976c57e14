"""One line of metrics.jsonl, and how it comes from a batch and the trainer's numbers. Pure."""

import msgspec

from libra.rollouts.summary import BatchSummary
from libra.wire.rank import TrainMetrics


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step's wall time went, in seconds."""

    rollout_wait_s: float
    """From the end of the step before until the batch was complete."""

    export_s: float
    reload_s: float
    """Of the publication that was settled during the step, from the check to the commit. It runs
    beside the trainer, except for `publish_wait_s` of it, and what rollouts waited for it."""

    publish_wait_s: float
    """How long the trainer stood still because the publication before was not settled."""

    step_s: float
    """The whole step: waits, training and export."""

    rollout_s: float = 0.0
    """Of the step, with a sample in flight; reloads not counted."""


class StepContext(msgspec.Struct, frozen=True, kw_only=True):
    """Which step of which life of the run a line is about."""

    step: int
    attempt: int
    wall_time_ns: int
    num_dropped: dict[str, int]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One object of metrics.jsonl."""

    step: int
    policy_version: int
    """The version this step made."""

    attempt: int
    """Gang attempt; a step trained again after a restart appears again with a higher one."""

    wall_time_ns: int
    reward_mean: float
    reward_std: float
    frac_zero_std: float
    num_trajectories: int
    response_tokens_mean: float
    response_tokens_max: int
    truncated_fraction: float
    num_turns_mean: float
    staleness_mean: float
    staleness_max: int
    loss: float
    grad_norm: float
    entropy: float
    clip_fraction: float
    ratio_mean: float
    kl_mismatch: float
    """Mean k3 of trainer against engine over the sampled tokens, before the first update."""

    learning_rate: float
    num_optimizer_steps: int
    num_skipped_steps: int
    tokens_per_s: float
    """Response tokens of the batch over the whole step's wall time."""

    rollout_wait_s: float
    recompute_s: float
    train_s: float
    export_s: float
    reload_s: float
    publish_wait_s: float
    step_s: float
    trainer_peak_memory_bytes: int
    num_dropped: dict[str, int]
    """Trajectories dropped since the run began, by reason."""

    rollout_s: float = 0.0
    """Wall time with a sample in flight; reloads not counted."""

    train_predicted_s: float | None = None
    """What the cost model expected of recompute_s + train_s for these lengths. This and the
    following are None where hardware or model are not described, or there is nothing to predict."""

    train_error_fraction: float | None = None
    """Measured / predicted - 1."""

    rollout_predicted_s: float | None = None
    rollout_error_fraction: float | None = None
    memory_predicted_bytes: int | None = None
    """Of the fullest rank since the ranks started; beside trainer_peak_memory_bytes."""

    memory_error_fraction: float | None = None


def step_record(
    *, context: StepContext, batch: BatchSummary, metrics: TrainMetrics, times: StepTimes
) -> StepRecord:
    num_response_tokens = batch.response_tokens_mean * batch.num_trajectories
    return StepRecord(
        step=context.step,
        policy_version=context.step,
        attempt=context.attempt,
        wall_time_ns=context.wall_time_ns,
        reward_mean=batch.reward_mean,
        reward_std=batch.reward_std,
        frac_zero_std=batch.frac_zero_std,
        num_trajectories=batch.num_trajectories,
        response_tokens_mean=batch.response_tokens_mean,
        response_tokens_max=batch.response_tokens_max,
        truncated_fraction=batch.truncated_fraction,
        num_turns_mean=batch.num_turns_mean,
        staleness_mean=batch.staleness_mean,
        staleness_max=batch.staleness_max,
        loss=metrics.loss,
        grad_norm=metrics.grad_norm,
        entropy=metrics.entropy,
        clip_fraction=metrics.clip_fraction,
        ratio_mean=metrics.ratio_mean,
        kl_mismatch=metrics.kl_mismatch,
        learning_rate=metrics.learning_rate,
        num_optimizer_steps=metrics.num_optimizer_steps,
        num_skipped_steps=metrics.num_skipped_steps,
        tokens_per_s=num_response_tokens / times.step_s if times.step_s > 0 else 0.0,
        rollout_wait_s=times.rollout_wait_s,
        recompute_s=metrics.recompute_s,
        train_s=metrics.train_s,
        export_s=times.export_s,
        reload_s=times.reload_s,
        publish_wait_s=times.publish_wait_s,
        step_s=times.step_s,
        trainer_peak_memory_bytes=metrics.peak_memory_bytes,
        num_dropped=context.num_dropped,
        rollout_s=times.rollout_s,
    )
