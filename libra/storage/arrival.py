"""Waiting, for a bounded time, until a shared disk shows what was announced.

On NFS a host may hear of a directory, and even see its manifest, before it sees the files in it:
clients keep what they know of a directory for a while. Nothing is used before it is whole, and
what is wrong in any other way than by lacking is wrong at once.
"""

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

from libra import clock
from libra.storage.manifests import NotVisibleYetError

T = TypeVar("T")

VISIBLE_WITHIN_S = 30.0
"""NFS clients look at a directory again after 30 s by default (acdirmin)."""

LOOK_AGAIN_S = 0.5


async def when_visible(check: Callable[[], T]) -> T:
    """Run `check` in a thread, again while it raises NotVisibleYetError, and return its result.

    After VISIBLE_WITHIN_S the error goes to the caller; any other one does at once.
    """
    deadline = clock.now() + VISIBLE_WITHIN_S
    while True:
        try:
            return await anyio.to_thread.run_sync(check)
        except NotVisibleYetError:
            if clock.now() >= deadline:
                raise
        await clock.sleep(LOOK_AGAIN_S)
