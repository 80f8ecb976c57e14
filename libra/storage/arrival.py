"""Waiting, for a bounded time, until a shared disk shows what was announced.

On NFS a host may hear of a directory, and even see its manifest, before it sees the files in it:
clients keep what they know of a directory for a while. Nothing is used before it is whole, and
what is wrong in any other way than by lacking is wrong at once.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import TypeVar

import anyio.to_thread

from libra import clock
from libra.storage.manifests import NOT_SEEN, NotVisibleYetError

T = TypeVar("T")

VISIBLE_WITHIN_S = 30.0
"""NFS clients look at a directory again after 30 s by default (acdirmin)."""

LOOK_AGAIN_S = 0.5


async def when_visible(
    check: Callable[[], T], *, on_wait: Callable[[str], None] | None = None
) -> T:
    """Run `check` in a thread, again while it raises NotVisibleYetError, and return its result.

    After VISIBLE_WITHIN_S the error goes to the caller and says so; any other one does at once.
    `on_wait` is told once what lacks, when the first look did not find everything.
    """
    deadline = clock.now() + VISIBLE_WITHIN_S
    while True:
        try:
            return await anyio.to_thread.run_sync(check)
        except NotVisibleYetError as error:
            if clock.now() >= deadline:
                raise _never_seen(error) from error
            if on_wait is not None:
                on_wait(str(error))
                on_wait = None
        await clock.sleep(LOOK_AGAIN_S)


def until_visible(check: Callable[[], T]) -> T:
    """The same for a thread that may wait."""
    deadline = clock.monotonic() + VISIBLE_WITHIN_S
    while True:
        try:
            return check()
        except NotVisibleYetError as error:
            if clock.monotonic() >= deadline:
                raise _never_seen(error) from error
        Event().wait(LOOK_AGAIN_S)


def check_written(directory: Path, bytes_of: Mapping[str, int]) -> None:
    """Check that the files which other hosts have written are here, at least so long.

    With no files, that the directory is. Raises NotVisibleYetError, or OSError for what is wrong in
    another way.
    """
    for name, num_bytes in {"": 0, **bytes_of}.items():
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            if error.errno not in NOT_SEEN:
                raise
            raise NotVisibleYetError(f"{directory / name}: {error.strerror}") from error
        if found < num_bytes:
            raise NotVisibleYetError(f"{directory / name} has {found} bytes instead of {num_bytes}")


def _never_seen(error: NotVisibleYetError) -> NotVisibleYetError:
    return NotVisibleYetError(f"{error}; still so after {VISIBLE_WITHIN_S:g} s")
