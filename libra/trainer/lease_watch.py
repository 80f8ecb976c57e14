"""A rank's end with the lease of its node, whatever its supervisor and its main thread do."""

import os
import time
from pathlib import Path
from threading import Thread
from typing import Final

from libra import clock
from libra.errors import SiteError
from libra.storage.lease_file import LeaseReader
from libra.trainer.link import EXIT_SUPERVISOR_GONE

SLACK_S: Final = 0.5
"""Beyond the lease, for the supervisor to end this process itself; its leader waits for longer."""

_PERIOD_S: Final = 0.1


def watch_lease(path: Path) -> None:
    """Have a thread end this process when the lease is over. Raises SiteError without a file."""
    try:
        reader = LeaseReader(path)
    except OSError as error:
        raise SiteError(f"the lease of this node, {path}, cannot be read: {error}") from error
    Thread(target=_watch, args=(reader,), name="lease", daemon=True).start()


def _watch(reader: LeaseReader) -> None:
    while clock.monotonic() < reader.until() + SLACK_S:
        time.sleep(_PERIOD_S)
    # Without a word: who reads it may stand still.
    os._exit(EXIT_SUPERVISOR_GONE)
