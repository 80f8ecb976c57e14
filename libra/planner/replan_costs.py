"""What a change of the plan costs in step time, by kind: measured on our own changes.

Before the first of a kind the configured prior counts, and is taken to be half wrong. Of that doubt
less is left the more are measured, by the square of their number: one lucky change does not make
all others free. Failed ones count too: they cost what they took, and a change may fail.
"""

from collections import deque
from statistics import fmean, stdev
from typing import Literal, TypeAlias

import msgspec

SwitchKind: TypeAlias = Literal["rollout", "to_training", "to_rollout", "reshape"]
"""`rollout`: only instances differ. `to_training`, `to_rollout`: hybrid replicas come or go.
`reshape`: the core has another layout."""

_NUM_KEPT = 8
_RESHAPES = 2.0
"""Times the prior: a checkpoint is written and a new gang reads it."""

_FEWEST_FOR_SPREAD = 2
_UNKNOWN_SPREAD = 0.5
"""Of the mean, while one measurement or none says nothing about it."""

_LEAST_SPREAD = 0.1

_STEPS_AFTER = 2
"""Steps after a change that still have some of it in them."""


class SwitchCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of step time that one change takes away."""

    mean_s: float
    deviation_s: float
    num_measured: int


def both(there: SwitchCost, back: SwitchCost) -> SwitchCost:
    """Of two changes, of which the second follows from the first."""
    return SwitchCost(
        mean_s=there.mean_s + back.mean_s,
        deviation_s=there.deviation_s + back.deviation_s,
        num_measured=min(there.num_measured, back.num_measured),
    )


class SwitchCosts:
    """The newest measurements of each kind."""

    def __init__(self, *, prior_s: float) -> None:
        self._prior_s = prior_s
        self._measured_of: dict[SwitchKind, deque[float]] = {}

    def add(self, kind: SwitchKind, cost_s: float) -> None:
        self._measured_of.setdefault(kind, deque(maxlen=_NUM_KEPT)).append(max(0.0, cost_s))

    def of(self, kind: SwitchKind) -> SwitchCost:
        measured = self._measured_of.get(kind, ())
        prior_s = self._prior_s * (_RESHAPES if kind == "reshape" else 1.0)
        mean_s = fmean(measured) if measured else prior_s
        spread = _UNKNOWN_SPREAD * mean_s
        if len(measured) >= _FEWEST_FOR_SPREAD:
            spread = max(stdev(measured), _LEAST_SPREAD * mean_s)
        spread = max(spread, _UNKNOWN_SPREAD * prior_s / max(1, len(measured)) ** 2)
        return SwitchCost(mean_s=mean_s, deviation_s=spread, num_measured=len(measured))


class SwitchAccount(msgspec.Struct, kw_only=True):
    """What a change has cost so far: time of the steps with the change in them, beyond the usual.

    Stalls of rollout count as well: batches that are late are waited for a step or two later.
    """

    kind: SwitchKind
    usual_s: float | None
    """A step under the plan before; None when none was timed."""

    expected_s: float | None
    """A step under the new plan; None when nothing could be expected."""

    has_ended: bool = False
    stalled_s: float = 0.0
    beyond_s: float = 0.0
    num_steps_after: int = 0

    @property
    def is_complete(self) -> bool:
        return self.num_steps_after >= _STEPS_AFTER

    @property
    def cost_s(self) -> float:
        return max(self.stalled_s, self.beyond_s)

    def on_step(self, step_s: float) -> None:
        self.num_steps_after += self.has_ended
        if self.usual_s is not None:
            self.beyond_s += step_s - self.usual_s

    def on_ended(self, stalled_s: float, *, ok: bool) -> None:
        self.has_ended, self.stalled_s = True, stalled_s
        if ok and self.usual_s is not None and self.expected_s is not None:
            self.usual_s = min(self.usual_s, self.expected_s)
