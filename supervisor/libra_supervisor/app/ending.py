"""How a run ends: one outcome, the first cause of an error, and the exit code that goes with it."""

import msgspec

from libra.errors import LibraError

BUG = 70
INTERRUPTED = 130


class Outcome(msgspec.Struct, frozen=True):
    exit_code: int
    reason: str


def outcome_of(error: BaseException) -> Outcome:
    """The outcome that an escaped error means: its first LibraError, else a bug."""
    leaves = list(_leaves(error))
    for leaf in leaves:
        if isinstance(leaf, LibraError):
            return Outcome(leaf.exit_code, str(leaf))
    if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return Outcome(INTERRUPTED, "interrupted")
    first = leaves[0]
    return Outcome(BUG, f"a bug in Libra: {type(first).__name__}: {first}")


def _leaves(error: BaseException) -> "list[BaseException]":
    """Errors in the order in which their tasks failed."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
