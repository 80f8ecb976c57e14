"""What the ranks of a node are told of its lease."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Never

from libra import clock
from libra.errors import SiteError
from libra.storage.lease_file import LeaseFile
from libra_supervisor.nodes.allegiance import Allegiance

_PERIOD_S: Final = 0.2


class LeaseNote:
    """Writes the lease's end while `run` is alive."""

    def __init__(self, side: Allegiance, path: Path, file: LeaseFile) -> None:
        self._side = side
        self.path = path
        self._file = file
        self._offset_s = inf

    def write(self) -> None:
        """Call it before a rank is started: what it reads first has to be of the present lease."""
        # The loop's clock stands still within a turn, so it is behind at times, never ahead.
        self._offset_s = min(self._offset_s, clock.monotonic() - clock.now())
        self._file.write(self._side.lease.until + self._offset_s)

    async def run(self) -> Never:
        while True:
            self.write()
            await clock.sleep(_PERIOD_S)


@contextmanager
def lease_note(side: Allegiance) -> Iterator[LeaseNote]:
    """On this machine, since shared disks are slow and come and go. Raises SiteError."""
    with TemporaryDirectory(prefix="libra-") as directory:
        path = Path(directory, "lease")
        try:
            file = LeaseFile(path)
        except OSError as error:
            raise SiteError(f"{path} cannot be written: {error.strerror}") from error
        note = LeaseNote(side, path, file)
        try:
            note.write()
            yield note
        finally:
            file.close()
