"""The leader's term: one more than any that the run directory has seen, written down first.

Whoever takes a term holds the run directory, so of two leaders on one file system the later has the
higher term, and followers obey no lower one.
"""

from pathlib import Path
from typing import Final

import msgspec

from libra.errors import SiteError
from libra.storage.atomic import atomic_write

TERM_NAME: Final = "term.json"


class TermRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file."""

    term: int
    leader: str


def take_term(directory: Path, leader: str) -> int:
    """Begin the next term; only its holder may call this. Durable before it returns."""
    found = read_term(directory)
    term = 1 if found is None else found.term + 1
    atomic_write(directory / TERM_NAME, msgspec.json.encode(TermRecord(term, leader)))
    return term


def obey_term(directory: Path, term: int, leader: str) -> None:
    """Write down on a follower which term it obeys, before it does."""
    atomic_write(directory / TERM_NAME, msgspec.json.encode(TermRecord(term, leader)))


def read_term(directory: Path) -> TermRecord | None:
    """The newest term; None when there was none. Raises SiteError for a file that is damaged."""
    path = directory / TERM_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=TermRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise SiteError(
            f"{path} cannot be read ({error}); a term that is taken twice would give two leaders. "
            "Write a number above every term in the logs, or start a new run directory"
        ) from error
