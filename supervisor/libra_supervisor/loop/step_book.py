"""Times and numbers of the step in progress, until they become a line of metrics.jsonl. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from libra.errors import InvariantError
from libra.ids import PolicyVersion
from libra.rollouts.group import CompleteGroup
from libra.rollouts.summary import BatchSummary, summarize
from libra.wire.rank import TrainMetrics
from libra_supervisor.loop.commands import Say, WriteStep
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.rollout_use import RolloutClock
from libra_supervisor.records.step import StepContext, StepRecord, StepTimes, step_record

FLAT_STEPS: Final = 3
"""Steps in a row without a single advantage after which it is said that nothing is learned."""


class Draft(msgspec.Struct, kw_only=True):
    """What is known so far about a step."""

    step: int
    groups: tuple[CompleteGroup, ...]
    batch: BatchSummary
    rollout_wait_s: float
    begun_at: float
    metrics: TrainMetrics | None = None
    export_s: float = 0.0
    publish_wait_s: float = 0.0


class StepBook:
    """One draft at a time; `close` turns it into the commands that write it down."""

    def __init__(self) -> None:
        self._draft: Draft | None = None
        self._collecting_since: float | None = None
        self._reload_begun_at: float | None = None
        self.rollouts = RolloutClock()
        self._reload_s = 0.0
        self._settling_since: float | None = None
        self.last: StepRecord | None = None
        """The newest closed step."""

        self.num_closed = 0
        self._num_flat_in_a_row = 0
        self.trained_s = 0.0
        """Wall time of the steps closed since the process began."""

    def on_collect(self, at: Moment) -> None:
        self._collecting_since = at.now

    def on_batch_taken(
        self, step: int, groups: Sequence[CompleteGroup], version: PolicyVersion, at: Moment
    ) -> None:
        """The batch of `step` goes to a trainer at `version`."""
        since = at.now if self._collecting_since is None else self._collecting_since
        self._draft = Draft(
            step=step,
            groups=tuple(groups),
            batch=summarize(groups, version=version),
            rollout_wait_s=at.now - since,
            begun_at=since,
        )

    def on_trained(self, metrics: TrainMetrics) -> None:
        self._open_draft().metrics = metrics

    def on_exported(self, export_s: float) -> None:
        if self._draft is not None:
            self._draft.export_s = export_s

    def on_reload_begun(self, at: Moment) -> None:
        self._reload_begun_at = at.now
        self.rollouts.on_paused(is_paused=True, now=at.now)

    def on_reloaded(self, at: Moment, *, is_held: bool = False) -> None:
        """Belongs to whatever step is in progress: it was made by an earlier one.

        `is_held`: the trainer stood still for it, though not longer than it was sending.
        """
        self.rollouts.on_paused(is_paused=False, now=at.now)
        if self._reload_begun_at is not None:
            self._reload_s = at.now - self._reload_begun_at
        if is_held and self._draft is not None:
            self._draft.publish_wait_s += max(0.0, self._reload_s - self._draft.export_s)

    def on_phase(self, *, is_settling: bool, at: Moment) -> None:
        """Measure how long the trainer does nothing but wait for a publication."""
        if is_settling and self._settling_since is None:
            self._settling_since = at.now
        elif not is_settling and self._settling_since is not None:
            if self._draft is not None:
                self._draft.publish_wait_s += at.now - self._settling_since
            self._settling_since = None

    def close(
        self, *, attempt: int, num_dropped: dict[str, int], at: Moment
    ) -> tuple[WriteStep | Say, ...]:
        """The line of a trained step, and what has to be said of it; nothing when none is open."""
        draft, self._draft = self._draft, None
        if draft is None or draft.metrics is None:
            return ()
        step_s = at.now - draft.begun_at
        use = self.rollouts.take(now=at.now)
        record = step_record(
            context=StepContext(
                step=draft.step,
                attempt=attempt,
                wall_time_ns=at.wall_ns,
                num_dropped=num_dropped,
            ),
            batch=draft.batch,
            metrics=draft.metrics,
            times=StepTimes(
                rollout_wait_s=draft.rollout_wait_s,
                export_s=draft.export_s,
                reload_s=self._reload_s,
                publish_wait_s=draft.publish_wait_s,
                step_s=step_s,
                rollout_s=use.busy_s,
            ),
        )
        self._reload_s = 0.0
        self.last = record
        self.num_closed += 1
        self.trained_s += step_s
        return (
            WriteStep(record, draft.groups, use.finished),
            *_skipped(record, draft.metrics),
            *self._flat(record),
        )

    def _flat(self, record: StepRecord) -> tuple[Say, ...]:
        """A warning when step after step has taught nothing; once, until one does."""
        self._num_flat_in_a_row = self._num_flat_in_a_row + 1 if record.frac_zero_std == 1.0 else 0
        if self._num_flat_in_a_row != FLAT_STEPS:
            return ()
        why = (
            f"in {FLAT_STEPS} steps in a row all answers to each prompt got the same reward (mean "
            f"{record.reward_mean:.3g}): no answer is better than another, so nothing is learned"
        )
        return (Say("nothing_to_learn", {"step": record.step, "why": why}, is_warning=True),)

    def discard(self) -> None:
        """Forget a step whose gang was lost."""
        self._draft = None
        self._collecting_since = self._reload_begun_at = self._settling_since = None
        self._reload_s = 0.0
        # What was in flight is cancelled with the gang.
        self.rollouts = RolloutClock()

    def _open_draft(self) -> Draft:
        if self._draft is None:
            raise InvariantError("a step was trained whose batch nobody took")
        return self._draft


def _skipped(record: StepRecord, metrics: TrainMetrics) -> tuple[Say, ...]:
    """A warning when optimizer steps were left out: their weights are those of before."""
    if not record.num_skipped_steps:
        return ()
    why = "a loss or gradient norm was not finite, or a mini-batch had no token to train on"
    if metrics.num_tokens == 0:
        why = "there is no token to train on: every answer was cut off and is masked"
    fields = {"step": record.step, "num_skipped": record.num_skipped_steps, "why": why}
    return (Say("optimizer_steps_skipped", fields, is_warning=True),)
