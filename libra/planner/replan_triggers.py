"""What asks for a look at the plan: time, drift, and pressure that has just arisen."""

from typing import Final

import msgspec

from libra.planner.replan_observed import StepObserved


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that says something when it rises above `high`; again after it was below `low`."""

    name: str
    field: str
    high: float
    low: float


LEVELS: Final = (
    Level(name="the trainer waits for rollouts", field="trainer_idle_fraction", high=0.4, low=0.25),
    Level(name="rollouts stand still", field="rollout_idle_fraction", high=0.4, low=0.25),
    Level(name="staleness of its bound", field="staleness_fraction", high=0.9, low=0.7),
    Level(name="requests queue in engines", field="queued_fraction", high=0.5, low=0.3),
    Level(name="KV use", field="kv_use_fraction", high=0.95, low=0.8),
)

_SMOOTHING = 0.3
"""Weight of the newest step: one step alone is no pressure."""


class Triggers:
    """Collects reasons until they are taken."""

    def __init__(self, *, interval_steps: int) -> None:
        self._interval_steps = interval_steps
        self._num_steps = 0
        self._smoothed_of: dict[str, float] = {}
        self._is_high: set[str] = set()
        self._reasons: list[str] = []
        self._young = ""
        self._num_since_change: int | None = None

    def on_step(self, seen: StepObserved, *, changed: str) -> None:
        """`changed` is the drift that the step showed, in words."""
        self._num_steps += 1
        self._on_change(changed)
        self._reasons += [said for level in LEVELS if (said := self._on_level(level, seen))]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Each once; the newest of those that only count steps."""
        said = [self._young] if self._young else []
        if self._num_steps >= self._interval_steps:
            said.append(f"{self._num_steps} steps since the last look")
        return (*dict.fromkeys(self._reasons), *said)

    def take(self) -> tuple[str, ...]:
        """The reasons so far; the interval begins anew."""
        reasons = self.reasons
        self._reasons, self._young, self._num_steps = [], "", 0
        return reasons

    def _on_change(self, changed: str) -> None:
        """At once, and after twice as many steps each time: a young window says little."""
        if changed:
            self._num_since_change, self._young = 0, ""
            self._reasons.append(changed)
            return
        if self._num_since_change is None:
            return
        self._num_since_change += 1
        num = self._num_since_change
        if num >= self._interval_steps:
            self._num_since_change = None
        elif num & (num - 1) == 0:
            self._young = f"{num} steps more since that change"

    def _on_level(self, level: Level, seen: StepObserved) -> str:
        value: float | None = getattr(seen, level.field)
        if value is None:
            return ""
        before = self._smoothed_of.get(level.name, value)
        now = self._smoothed_of[level.name] = before + _SMOOTHING * (value - before)
        if now < level.low:
            self._is_high.discard(level.name)
        if now <= level.high or level.name in self._is_high:
            return ""
        self._is_high.add(level.name)
        return f"{level.name}: {now:.0%}"
