"""What a step told, and the window of steps whose demand counts."""

from collections import deque
from collections.abc import Sequence
from math import log
from statistics import fmean, stdev

import msgspec

from libra.planner.replan_change import change_point

_FEWEST_TIMES = 2


class StepObserved(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, as deciding sees it. Fractions are None where they are unknown."""

    step: int
    lengths: Sequence[tuple[int, int]]
    """(prompt tokens, response tokens) of the trajectories that ended in it."""

    step_s: float
    """From the end of the step before to its own."""

    trainer_idle_fraction: float
    """Of the step, the trainer waited for rollouts."""

    rollout_idle_fraction: float
    """Of the step, no sample was in flight."""

    staleness_fraction: float | None = None
    """Mean staleness of what was trained over `max_head_offpolicyness`."""

    queued_fraction: float | None = None
    """Requests that wait inside engines over those in flight."""

    kv_use_fraction: float | None = None
    """Mean over the engines."""


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long steps took under the plan in force."""

    num_steps: int
    mean_s: float
    deviation_s: float
    """Between steps; 0.0 for one."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    seen: StepObserved
    mean_log_response: float
    is_timed: bool
    """Its step time is one of the plan in force, undisturbed by a change."""


class ObservationWindow:
    """The newest steps, at most `max_steps`; older than a change point none.

    The first `num_warm_up` steps are left out: while the pipeline fills, short responses end first.
    """

    def __init__(self, *, max_steps: int, num_warm_up: int) -> None:
        self._entries: deque[_Entry] = deque(maxlen=max_steps)
        self._num_left_out = num_warm_up

    @property
    def num_steps(self) -> int:
        return len(self._entries)

    @property
    def steps(self) -> tuple[StepObserved, ...]:
        """Oldest first."""
        return tuple(entry.seen for entry in self._entries)

    def add(self, seen: StepObserved, *, is_timed: bool) -> str:
        """Take in a step. What changed is said in words, and steps before that are forgotten."""
        if not seen.lengths:
            return ""
        if self._num_left_out > 0:
            self._num_left_out -= 1
            return ""
        self._entries.append(
            _Entry(
                seen=seen,
                mean_log_response=fmean(log(1 + response) for _, response in seen.lengths),
                is_timed=is_timed and seen.step_s > 0,
            )
        )
        return self._changed_lengths() or self._changed_times()

    def forget_times(self) -> None:
        """Step times so far are those of a plan that is gone; lengths still count."""
        for index, entry in enumerate(self._entries):
            self._entries[index] = msgspec.structs.replace(entry, is_timed=False)

    def times(self) -> StepTimes | None:
        """None before a step was timed."""
        times = [entry.seen.step_s for entry in self._timed()]
        if not times:
            return None
        spread = stdev(times) if len(times) >= _FEWEST_TIMES else 0.0
        return StepTimes(num_steps=len(times), mean_s=fmean(times), deviation_s=spread)

    def _timed(self) -> list[_Entry]:
        return [entry for entry in self._entries if entry.is_timed]

    def _changed_lengths(self) -> str:
        found = change_point([entry.mean_log_response for entry in self._entries])
        if found is None:
            return ""
        self._forget_before(self._entries[found.index].seen.step)
        return f"responses are {found.ratio:.2f} times as long since step {self._first_step}"

    def _changed_times(self) -> str:
        timed = self._timed()
        found = change_point([log(entry.seen.step_s) for entry in timed])
        if found is None:
            return ""
        self._forget_before(timed[found.index].seen.step)
        return f"steps take {found.ratio:.2f} times as long since step {self._first_step}"

    def _forget_before(self, step: int) -> None:
        while self._entries[0].seen.step < step:
            self._entries.popleft()

    @property
    def _first_step(self) -> int:
        return self._entries[0].seen.step
