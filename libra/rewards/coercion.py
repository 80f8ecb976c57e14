"""What counts as a reward.

Booleans count as 1 and 0; numbers of any library (numpy scalars, one-element tensors) and strings
that spell a number count as that number. None, NaN, infinities and everything else are failures:
the sample is dropped and counted, and never reaches the optimizer.
"""

from math import isfinite
from typing import Any

import msgspec


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
        case bool() | int() | float() | str():
            return _number(value)
        case None:
            return RewardFailed("returned None")
        case _:
            return RewardFailed(f"returned a {type(value).__name__}, not a number")


def _number(value: bool | float | str) -> float | RewardFailed:
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return RewardFailed(f"returned {value!r:.40}, not a number")
    return number if isfinite(number) else RewardFailed(f"returned {number}")
