"""What the ranks of a node are told of its lease."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import Final, Never

from libra import clock
from libra.errors import SiteError
from libra.ids import RunId
from libra.storage.lease_file import LeaseFile
from libra.tracing.log import get_log
from libra_supervisor.nodes.allegiance import Allegiance

_PERIOD_S: Final = 0.2

_log = get_log()


class LeaseNote:
    """Writes the lease's end while `run` is alive."""

    def __init__(self, side: Allegiance, prefix: str) -> None:
        """Raises SiteError when nothing can be written on this machine."""
        self._side = side
        self._prefix = prefix
        self._offset_s = inf
        self._files: list[LeaseFile] = []
        """The last one is at `path`; ranks that run may have one of before, under no name."""

        self._folders: list[Path] = []
        self.path = self._made()
        self.write()

    def for_start(self) -> Path:
        """Where a rank that is started now reads it, of the present lease. Raises SiteError."""
        if not self._files[-1].is_at(self.path):
            # Whatever tidies temporary folders has been here.
            _log.warning("lease_file_gone", path=str(self.path))
            self.path = self._made()
        self.write()
        return self.path

    def write(self) -> None:
        # The loop's clock stands still within a turn, so it is behind at times, never ahead.
        self._offset_s = min(self._offset_s, clock.monotonic() - clock.now())
        for file in self._files:
            file.write(self._side.lease.until + self._offset_s)

    async def run(self) -> Never:
        while True:
            self.write()
            await clock.sleep(_PERIOD_S)

    def close(self) -> None:
        for file in self._files:
            file.close()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _made(self) -> Path:
        try:
            folder = Path(mkdtemp(prefix=self._prefix))
            self._folders.append(folder)
            self._files.append(LeaseFile(folder / "lease"))
        except OSError as error:
            raise SiteError(
                f"{error.filename} cannot be written for the ranks of this node: {error.strerror}"
            ) from error
        return folder / "lease"


@contextmanager
def lease_note(side: Allegiance, run_id: RunId, node: int) -> Iterator[LeaseNote]:
    """On this machine, since shared disks are slow and come and go. Raises SiteError.

    What a process of this node left that could not tidy up is removed: one at a time speaks for it.
    """
    prefix = f"libra-{run_id}-{node}-"
    for left in Path(gettempdir()).glob(f"{prefix}????????"):
        if left.stat(follow_symlinks=False).st_uid == os.geteuid():
            shutil.rmtree(left, ignore_errors=True)
    note = LeaseNote(side, prefix)
    try:
        yield note
    finally:
        note.close()
