"""Why a contribution does not count, and the vote that makes all core ranks say the same. Pure."""

from collections.abc import Sequence
from enum import IntEnum
from math import inf, isfinite
from typing import Final

import msgspec

from libra.hybrid.header import Fence


class Fault(IntEnum):
    """In order of precedence: of several, the smallest is told."""

    NONE = 0
    GONE = 1
    LATE = 2
    FENCE = 3
    CHECKSUM = 4
    DIGEST = 5
    NOT_FINITE = 6
    NORM = 7

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS: Final = {
    Fault.NONE: "counts",
    Fault.GONE: "its lane is closed or broke",
    Fault.LATE: "its gradients did not come within elastic_hybrid_contribution_timeout_s",
    Fault.FENCE: "its gradients are of another epoch, step or version",
    Fault.CHECKSUM: "its gradients were damaged on their way",
    Fault.DIGEST: "its weights are not the core's",
    Fault.NOT_FINITE: "its gradients or its loss are not finite, or too large to be added",
    Fault.NORM: "the norm of its gradients is beyond elastic_hybrid_norm_limit times the core's",
}
_LARGEST: Final = 1e30
"""Of any sum over a mini-batch; so many of these that float32 cannot hold them never come."""

_COUNTED: Final = tuple(fault for fault in Fault if fault is not Fault.NONE)
_PER_MEMBER: Final = len(_COUNTED) + 1


class Ballot(msgspec.Struct, frozen=True):
    """What one head says of one member's contribution on its lane."""

    fault: Fault
    square_sum: float = 0.0


def fence_fault(found: Fence, wanted: Fence) -> Fault:
    return Fault.NONE if found == wanted else Fault.FENCE


def value_fault(*, is_sum_right: bool, square_sum: float, numbers: Sequence[float]) -> Fault:
    """Judge what came by itself; the norm is compared when all lanes are known.

    `numbers` are added to the core's loss: one that is not finite would spoil the step as well, and
    so would several that are as large as a number can be.
    """
    if not is_sum_right:
        return Fault.CHECKSUM
    is_sound = isfinite(square_sum) and all(abs(number) <= _LARGEST for number in numbers)
    return Fault.NONE if is_sound else Fault.NOT_FINITE


def votes(ballots: Sequence[Ballot], *, own_square_sum: float) -> list[float]:
    """One rank's numbers, to be summed over all ranks; a rank without a lane has empty ballots."""
    numbers: list[float] = []
    for ballot in ballots:
        numbers += [float(ballot.fault is fault) for fault in _COUNTED]
        numbers.append(ballot.square_sum if isfinite(ballot.square_sum) else 0.0)
    # A core whose own gradients are broken is no measure for others.
    return [*numbers, own_square_sum if isfinite(own_square_sum) else inf]


def verdicts(
    totals: Sequence[float], *, reference_square_sum: float, norm_limit: float
) -> tuple[Fault, ...]:
    """One fault for each member from the summed votes: a pure function, the same on every rank.

    A member whose square sum exceeds `norm_limit` squared times the reference does not count.
    """
    return tuple(
        _verdict(totals[start : start + _PER_MEMBER], reference_square_sum, norm_limit)
        for start in range(0, len(totals) - 1, _PER_MEMBER)
    )


def _verdict(numbers: Sequence[float], reference: float, norm_limit: float) -> Fault:
    for fault, count in zip(_COUNTED, numbers, strict=False):
        if count:
            return fault
    # Without the core's gradient there is nothing to compare with, and zeros are no harm.
    return Fault.NORM if numbers[-1] > norm_limit**2 * reference else Fault.NONE
