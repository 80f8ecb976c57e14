"""How long a level of the load is likely to last, from how long those before it did.

A drift that goes on in one direction is one level, however many change points it shows: what was
changed for its beginning is right for its end too. Only where it turns round has a level ended.
"""

from collections import deque
from math import inf
from statistics import fmean

_NUM_KEPT = 4
_TIMES_ITS_AGE = 10.0
"""A level that nothing is known of is taken to last so many times as long as it has."""

_UNNOTICED_STEPS = 2
"""At the end of a level, before it can be told from an outlier."""


class Levels:
    """Of one figure. Every step is told, and every change of level."""

    def __init__(self) -> None:
        self._lasted: deque[int] = deque(maxlen=_NUM_KEPT)
        self._was_upwards: bool | None = None
        self._num_since_turn = 0

    def on_step(self) -> None:
        """One more step of this level."""
        self._num_since_turn += 1

    def on_change(self, age: int, *, is_upwards: bool) -> None:
        """A level began `age` steps ago."""
        if self._was_upwards != is_upwards:
            if self._was_upwards is not None:
                self._lasted.append(self._num_since_turn - age)
            self._num_since_turn = age
        self._was_upwards = is_upwards

    @property
    def lasted_steps(self) -> float:
        """Of the newest levels, the mean; this one counts when it has lasted longer than that."""
        if not self._lasted:
            return inf
        return max(fmean(self._lasted), float(self._num_since_turn))

    def left_steps(self, age: int) -> float:
        """How much longer a level that was seen for `age` steps is worth a change."""
        left = _TIMES_ITS_AGE * age
        if self._lasted and self._num_since_turn < fmean(self._lasted):
            left = min(left, self.lasted_steps - self._num_since_turn - _UNNOTICED_STEPS)
        return max(0.0, left)
