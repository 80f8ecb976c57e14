"""What counts as a reward.

Booleans count as 1 and 0; numbers of any library (numpy scalars, one-element tensors, fractions)
and strings that spell a number count as that number. None, NaN, infinities, numbers as good as
infinite and everything else are failures: the sample is dropped and counted, and never reaches the
optimizer.
"""

from decimal import Decimal
from math import isfinite
from numbers import Real
from typing import Any, Final

import msgspec

LARGEST: Final = 1e30
"""Beyond it nothing is a reward: squares have to be finite in advantages, and advantages in the
trainer's single precision."""


class RewardFailed(msgspec.Struct, frozen=True, tag=True):
    """A response without a reward, and why."""

    reason: str


def coerced(value: Any) -> float | RewardFailed:
    """The finite number that a reward function's result stands for."""
    if hasattr(value, "item"):
        # numpy, torch and jax: .item() raises unless there is exactly one element.
        try:
            value = value.item()
        except Exception as error:  # noqa: BLE001 - any library's own error
            return RewardFailed(f"returned a {type(value).__name__}: {error}")
    match value:
        case Real() | Decimal() | str():
            return _number(value)
        case None:
            return RewardFailed("returned None")
        case _:
            return RewardFailed(f"returned a {type(value).__name__}, not a number")


def _number(value: Real | Decimal | str) -> float | RewardFailed:
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return RewardFailed(f"returned {value!r:.40}, not a number")
    if isfinite(number) and abs(number) > LARGEST:
        return RewardFailed(f"returned {number}; rewards go up to {LARGEST}")
    return number if isfinite(number) else RewardFailed(f"returned {number}")
