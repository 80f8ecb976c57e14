"""The whole error tree. Each class says how the process ends when nobody handles it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class LibraError(Exception):
    """Base of every error Libra raises on purpose; the message says who, what and what to do."""

    exit_code: ClassVar[int] = 70
    retryable: ClassVar[bool] = False


class ConfigError(LibraError):
    """The configuration cannot be used. Carries every problem found, not only the first."""

    exit_code = 2


class DataError(LibraError):
    """A dataset, tokenizer or model file cannot be used; the message holds path:line:column."""

    exit_code = 2


class TokenizerError(DataError):
    """The tokenizer's own files cannot be used."""


class InfeasiblePlanError(LibraError):
    """No split of the devices satisfies the constraints."""

    exit_code = 3


class ChildError(LibraError):
    """A child process failed beyond its restart budget."""

    exit_code = 4


class SiteError(LibraError):
    """The machine lacks something: a free port, memory, disk, a package, the run directory."""

    exit_code = 5


class LearningStoppedError(LibraError):
    """Going on would train on nonsense: non-finite loss, or engine and trainer disagree."""

    exit_code = 6


class RefusedError(LibraError):
    """A request was turned away on purpose; the peer may try later."""

    retryable = True


class OverloadedError(RefusedError):
    """The waiting queue is full or the deadline passed."""


class DrainingError(RefusedError):
    """New work is not accepted because the run is stopping."""


class PeerError(LibraError):
    """Another process answered wrongly or not at all."""

    retryable = True


class NodeAwayError(PeerError):
    """The machine that was asked is gone, with everything that was there."""


class RejectedError(LibraError):
    """A peer understood a request and called it wrong; sending it elsewhere gives the same."""


class InvariantError(LibraError):
    """A bug in Libra: a state that must not exist was reached."""


def first_cause(error: BaseException) -> BaseException:
    """The first LibraError in a group of errors, else the first error; any other error itself."""
    found = leaves(error)
    return next((leaf for leaf in found if isinstance(leaf, LibraError)), found[0])


def leaves(error: BaseException) -> list[BaseException]:
    """Errors in the order in which their tasks failed."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def came_from(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether the error, or one that it was raised from, is of the kind."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__
    return cause is not None


@contextmanager
def ungrouped() -> Iterator[None]:
    """Raise the first cause of a group of errors in its place; the others become its notes."""
    cause = None
    try:
        yield
    except BaseExceptionGroup as group:
        cause = first_cause(group)
        for other in leaves(group):
            if other is not cause:
                cause.add_note(f"and besides: {type(other).__name__}: {other}")
    # Outside of the handler, so that the group does not become the context of its own part.
    if cause is not None:
        raise cause
