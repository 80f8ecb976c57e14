"""What one worker says about its part of a transfer. Crosses vLLM's RPC as builtins."""

from collections.abc import Sequence
from typing import Any

import msgspec

from libra.errors import PeerError


class TransferAbortedError(PeerError):
    """The transfer was broken off, not by the member that raises this."""


class TransferOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """An empty `error` is success."""

    checksum: str = ""
    error: str = ""
    was_aborted: bool = False
    """By another member."""

    def as_builtins(self) -> dict[str, Any]:
        builtins: dict[str, Any] = msgspec.to_builtins(self)
        return builtins


def outcome_of(error: Exception) -> TransferOutcome:
    return TransferOutcome(
        error=str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}",
        was_aborted=isinstance(error, TransferAbortedError),
    )


def joint_checksum(answers: Sequence[dict[str, Any]]) -> str:
    """What all workers of a server received.

    Raises PeerError with the first worker's own error, or TransferAbortedError when there is none.
    """
    outcomes = [msgspec.convert(answer, TransferOutcome) for answer in answers]
    for outcome in sorted(outcomes, key=lambda it: it.was_aborted):
        if outcome.was_aborted:
            raise TransferAbortedError(outcome.error)
        if outcome.error:
            raise PeerError(outcome.error)
    checksums = {outcome.checksum for outcome in outcomes}
    if len(checksums) != 1:
        raise PeerError(f"the workers received different weights: {sorted(checksums)}")
    return checksums.pop()
