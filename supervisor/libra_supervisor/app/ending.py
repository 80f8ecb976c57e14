"""How a run ends: one outcome, the first cause of an error, and the exit code that goes with it."""

import msgspec

from libra.errors import LibraError, first_cause, leaves

BUG = 70
INTERRUPTED = 130


class Outcome(msgspec.Struct, frozen=True):
    exit_code: int
    reason: str


def outcome_of(error: BaseException) -> Outcome:
    """The outcome that an escaped error means: its first LibraError, else a bug."""
    cause = first_cause(error)
    if isinstance(cause, LibraError):
        return Outcome(cause.exit_code, str(cause))
    if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error)):
        return Outcome(INTERRUPTED, "interrupted")
    return Outcome(BUG, f"a bug in Libra: {type(cause).__name__}: {cause}")
