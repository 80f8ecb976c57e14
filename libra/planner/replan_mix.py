"""Steps of one window that have little in common, told apart.

A plan's mean step time over short and long responses is not that of responses in between, nor of
all together in one batch: each sort is priced by itself.
"""

from collections.abc import Sequence
from math import log
from typing import Final, TypeVar

_Item = TypeVar("_Item")

_ALIKE: Final = log(2.0)
"""Between the shortest and the longest mean response of steps of one sort."""


def sorts_of(items: Sequence[_Item], logarithms: Sequence[float]) -> list[list[_Item]]:
    """`items` in one or two groups, by the logarithm of their mean response; order is kept."""
    low, high = min(logarithms), max(logarithms)
    if high - low < _ALIKE:
        return [list(items)]
    middle = (low + high) / 2
    both = list(zip(items, logarithms, strict=True))
    return [
        [item for item, value in both if value < middle],
        [item for item, value in both if value >= middle],
    ]
