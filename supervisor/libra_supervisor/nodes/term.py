"""The leader's term: one more than any that the run directory has seen, written down first.

Whoever takes a term holds the run directory, so of two leaders on one file system the later has the
higher term, and followers obey no lower one. In the end the leader adds how the run ended, for
followers that it cannot reach.
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from libra.errors import SiteError
from libra.storage.atomic import write_record

TERM_NAME: Final = "term.json"
NODES_NAME: Final = "nodes"
_HIGHEST: Final = 10**9
"""The last one: calls are numbered from the term in 64 bits."""

_ADVICE: Final = (
    "A term that is taken twice would give two leaders, so: end every node of the run and write "
    '{"term": N, "leader": ""} into it, N '
)
_OF_RUN: Final = (
    'being higher than the term of any line "leads" in logs/control.jsonl; or start a new run '
    "directory"
)
_OF_NODE: Final = "being the term in the run directory's own term.json"


class RunEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the leader of the term ended the run."""

    exit_code: int
    reason: str


class TermRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Content of the file."""

    term: Annotated[int, Meta(ge=1, le=_HIGHEST)]
    leader: str
    end: RunEnd | None = None


def take_term(directory: Path, leader: str) -> int:
    """Begin the next term; only its holder may call this. Durable before it returns.

    Raises SiteError, as `read_term` does, when a node has obeyed a term that is missing here, and
    when the disk refuses.
    """
    found = read_term(directory)
    term = 1 if found is None else found.term + 1
    _check_obeyed(directory, term)
    if term > _HIGHEST:
        path = directory / TERM_NAME
        raise SiteError(f"{path}: no term comes after {_HIGHEST}; start a new run directory")
    _write(directory, TermRecord(term, leader))
    return term


def end_term(directory: Path, term: int, leader: str, end: RunEnd) -> None:
    """Write down the end of the run; only the holder of the term may call this."""
    _write(directory, TermRecord(term, leader, end))


def obey_term(directory: Path, term: int, leader: str) -> None:
    """Write down on a follower which term it obeys, before it does."""
    _write(directory, TermRecord(term, leader))


def read_term(directory: Path) -> TermRecord | None:
    """The run's newest term; None when there was none. Raises SiteError for a damaged file."""
    return _read(directory, _OF_RUN)


def obeyed_term(directory: Path) -> TermRecord | None:
    """The newest term that a node has obeyed, in its own directory; as `read_term`."""
    return _read(directory, _OF_NODE)


class KnownEnd:
    """Which end of a run concerns a follower that nobody tells."""

    def __init__(self) -> None:
        self._has_looked = False
        self._before: TermRecord | None = None
        """What the first look found: the end of an earlier life of the run sends nobody home."""

    def end_in(self, found: TermRecord | None, *, term: int, leader: str) -> RunEnd | None:
        """`term` is the highest that was obeyed; `leader` is empty when this process has none."""
        if not self._has_looked:
            self._has_looked, self._before = True, found
        if found is None or found.end is None or found.term < term:
            return None
        if leader:
            return found.end if found.term > term or found.leader == leader else None
        return found.end if found != self._before else None


def _check_obeyed(directory: Path, term: int) -> None:
    """Nodes that have obeyed a term would refuse a leader of a lower one for ever."""
    for own in sorted(directory.glob(f"{NODES_NAME}/*/{TERM_NAME}")):
        try:
            obeyed = obeyed_term(own.parent)
        except SiteError:
            continue  # the node itself says so
        if obeyed is not None and obeyed.term >= term:
            raise SiteError(
                f"{directory / TERM_NAME} is gone or out of date: {own} says that the node has "
                f"obeyed term {obeyed.term}. {_ADVICE}being {obeyed.term} at least, and {_OF_RUN}"
            )


def _read(directory: Path, advice: str) -> TermRecord | None:
    path = directory / TERM_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=TermRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise SiteError(f"{path} cannot be read ({error}). {_ADVICE}{advice}") from error


def _write(directory: Path, record: TermRecord) -> None:
    write_record(directory / TERM_NAME, msgspec.json.encode(record))
