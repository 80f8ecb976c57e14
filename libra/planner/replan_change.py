"""Whether a short series changed its level, and where.

Every cut of the series into two parts is tried; the difference of their means is compared with its
own standard error. The spread inside the parts is estimated from few points, so some are added of
`_PRIOR_DEVIATION`: without them two alike neighbours would make anything a change.
"""

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import fmean
from typing import Final

import msgspec

_FEWEST = 6
_FEWEST_BESIDE = 2
"""Points on either side of a cut: one alone is an outlier."""

_DEVIATIONS = 5.0
"""The best of all cuts has to differ by so many standard errors. A false alarm costs a shorter
window and a look at the plan, not a change of it."""

_SMALLEST: Final = log(1.1)
"""Less than a tenth changes no plan."""

_PRIOR_DEVIATION = 0.1
_NUM_PRIOR = 8


class ChangePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The first value of the new level, and how many times the old one it is."""

    index: int
    ratio: float


def change_point(logarithms: Sequence[float]) -> ChangePoint | None:
    """The clearest change of level in a series of logarithms; None without one."""
    best: tuple[float, ChangePoint] | None = None
    if len(logarithms) < _FEWEST:
        return None
    for index in range(_FEWEST_BESIDE, len(logarithms) - _FEWEST_BESIDE + 1):
        shift, error = _difference(logarithms[:index], logarithms[index:])
        deviations = abs(shift) / error
        if abs(shift) < _SMALLEST or deviations < _DEVIATIONS:
            continue
        if best is None or deviations > best[0]:
            best = deviations, ChangePoint(index=index, ratio=exp(shift))
    return None if best is None else best[1]


def _difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Of the means, and its standard error."""
    means = fmean(before), fmean(after)
    squares = sum((value - means[0]) ** 2 for value in before)
    squares += sum((value - means[1]) ** 2 for value in after)
    degrees = len(before) + len(after) - 2 + _NUM_PRIOR
    variance = (squares + _NUM_PRIOR * _PRIOR_DEVIATION**2) / degrees
    return means[1] - means[0], sqrt(variance * (1 / len(before) + 1 / len(after)))
