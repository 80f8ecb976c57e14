"""What a step told, and the window of steps whose demand counts."""

from collections import deque
from collections.abc import Sequence
from math import inf, log, sqrt
from statistics import fmean

import msgspec

from libra.planner.replan_change import ChangePoint, change_point
from libra.planner.replan_levels import Levels
from libra.planner.replan_mix import sorts_of


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
    """Between steps of the same sort; 0.0 where there is one of each."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    seen: StepObserved
    mean_log_response: float
    is_timed: bool
    """Its step time is one of the plan in force, undisturbed by a change."""


class ObservationWindow:
    """The newest steps, at most `max_steps`; older than a change point none.

    Unless levels last less than half of `max_steps`: a plan that followed them would always be
    late, so all steps count, which have several levels in them.
    The first `num_warm_up` steps are left out: while the pipeline fills, short responses end first.
    """

    def __init__(self, *, max_steps: int, num_warm_up: int) -> None:
        self._entries: deque[_Entry] = deque(maxlen=max_steps)
        self._num_left_out = num_warm_up
        self._shortest_followed = max_steps / 2
        self._level_from = 0
        self._age = 0
        self._lengths, self._times = Levels(), Levels()

    @property
    def num_steps(self) -> int:
        return len(self._counted())

    @property
    def steps(self) -> tuple[StepObserved, ...]:
        """Oldest first."""
        return tuple(entry.seen for entry in self._counted())

    @property
    def is_followed(self) -> bool:
        """Whether levels last long enough for a plan of their own."""
        return all(
            levels.lasted_steps >= self._shortest_followed
            for levels in (self._lengths, self._times)
        )

    @property
    def left_steps(self) -> float:
        """How much longer the load is taken to be as these steps say."""
        if not self.is_followed:
            return inf
        return min(levels.left_steps(self._age) for levels in (self._lengths, self._times))

    def add(self, seen: StepObserved, *, is_timed: bool) -> str:
        """Take in a step. What changed is said in words, and steps before that do not count."""
        if not seen.lengths:
            return ""
        if self._num_left_out > 0:
            self._num_left_out -= 1
            return ""
        was_followed = self.is_followed
        self._entries.append(
            _Entry(
                seen=seen,
                mean_log_response=fmean(log(1 + response) for _, response in seen.lengths),
                is_timed=is_timed and seen.step_s > 0,
            )
        )
        self._age += 1
        for levels in (self._lengths, self._times):
            levels.on_step()
        said = self._changed_lengths() or self._changed_times()
        if self.is_followed == was_followed:
            return said if was_followed else ""
        if was_followed:
            return f"{said}, and levels last less than {self._shortest_followed:.0f} steps"
        return f"the level has lasted since step {self._level_from}"

    def forget_times(self) -> None:
        """Step times so far are those of a plan that is gone; lengths still count."""
        for index, entry in enumerate(self._entries):
            self._entries[index] = msgspec.structs.replace(entry, is_timed=False)

    def times(self) -> StepTimes | None:
        """None before a step of each sort was timed; each sort counts as often as it occurs."""
        counted = self._counted()
        if not counted:
            return None
        sorts = self._sorts(counted)
        timed = [[it.seen.step_s for it in sort if it.is_timed] for sort in sorts]
        if not all(timed):
            return None
        means = [fmean(times) for times in timed]
        squares = sum((t - mean) ** 2 for mean, of in zip(means, timed, strict=True) for t in of)
        num = sum(map(len, timed))
        return StepTimes(
            num_steps=num,
            mean_s=fmean(means, [len(sort) for sort in sorts]),
            deviation_s=sqrt(squares / (num - len(sorts))) if num > len(sorts) else 0.0,
        )

    def sorts(self) -> tuple[tuple[StepObserved, ...], ...]:
        """`steps`, those that have little in common apart; empty without any."""
        counted = self._counted()
        found = self._sorts(counted) if counted else []
        return tuple(tuple(entry.seen for entry in sort) for sort in found)

    def _sorts(self, counted: list[_Entry]) -> list[list[_Entry]]:
        return sorts_of(counted, [entry.mean_log_response for entry in counted])

    def _counted(self) -> list[_Entry]:
        return self._level() if self.is_followed else list(self._entries)

    def _level(self) -> list[_Entry]:
        """Steps since the newest change point."""
        return [entry for entry in self._entries if entry.seen.step >= self._level_from]

    def _changed_lengths(self) -> str:
        level = self._level()
        found = change_point([entry.mean_log_response for entry in level])
        if found is None:
            return ""
        self._begin_level(level, found, self._lengths)
        return f"responses are {found.ratio:.2f} times as long since step {self._level_from}"

    def _changed_times(self) -> str:
        timed = [entry for entry in self._level() if entry.is_timed]
        found = change_point([log(entry.seen.step_s) for entry in timed])
        if found is None:
            return ""
        self._begin_level(timed, found, self._times)
        return f"steps take {found.ratio:.2f} times as long since step {self._level_from}"

    def _begin_level(self, entries: list[_Entry], found: ChangePoint, levels: Levels) -> None:
        self._level_from = entries[found.index].seen.step
        self._age = len(self._level())
        levels.on_change(self._age, is_upwards=found.ratio > 1)
