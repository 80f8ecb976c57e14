"""How long samples were in flight in a step, and what ended in it. Pure."""

from typing import TypeAlias

import msgspec

from libra.ids import GroupId
from libra.rollouts.trajectory import Trajectory

Sample: TypeAlias = tuple[GroupId, int]
"""A group and the index of a sample in it."""


class RolloutUse(msgspec.Struct, frozen=True):
    """One step's share."""

    busy_s: float
    """Wall time with at least one sample in flight, reloads not counted."""

    finished: tuple[tuple[int, int], ...]
    """(tokens that were given, tokens that were sampled) of every trajectory that ended."""


class RolloutClock:
    """Follows samples from start to end; `take` closes an interval."""

    def __init__(self) -> None:
        self._num_left: dict[GroupId, int] = {}
        """Samples of open groups that have not ended; what is heard of other groups is late."""

        self._in_flight: set[Sample] = set()
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._is_paused = False
        self._finished: list[tuple[int, int]] = []

    def on_opened(self, group_id: GroupId, num_samples: int) -> None:
        self._num_left[group_id] = num_samples

    def on_started(self, sample: Sample, *, now: float) -> None:
        if sample[0] in self._num_left:
            self._in_flight.add(sample)
            self._look(now)

    def on_finished(self, trajectory: Trajectory, *, now: float) -> None:
        num_sampled = trajectory.num_response_tokens
        self._finished.append((len(trajectory.token_ids) - num_sampled, num_sampled))
        self.on_ended((trajectory.group_id, trajectory.sample_index), now=now)

    def on_ended(self, sample: Sample, *, now: float) -> None:
        self._in_flight.discard(sample)
        num_left = self._num_left.pop(sample[0], 0) - 1
        if num_left > 0:
            self._num_left[sample[0]] = num_left
        self._look(now)

    def on_cancelled(self, group_id: GroupId, *, now: float) -> None:
        self._num_left.pop(group_id, None)
        self._in_flight = {sample for sample in self._in_flight if sample[0] != group_id}
        self._look(now)

    def on_paused(self, *, is_paused: bool, now: float) -> None:
        """Engines stand still while they load weights."""
        self._is_paused = is_paused
        self._look(now)

    def take(self, *, now: float) -> RolloutUse:
        """What there was since the last call."""
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = now
        use = RolloutUse(self._busy_s, tuple(self._finished))
        self._busy_s, self._finished = 0.0, []
        return use

    def _look(self, now: float) -> None:
        is_busy = bool(self._in_flight) and not self._is_paused
        if is_busy and self._busy_since is None:
            self._busy_since = now
        elif not is_busy and self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = None
