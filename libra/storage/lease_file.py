"""Until when ranks of a node may act: a file of that machine, which their supervisor keeps up.

So ranks end with the lease even where their supervisor stands still and can end nobody. Times are
of CLOCK_MONOTONIC, which all processes of a machine share.
"""

import os
from pathlib import Path
from struct import Struct
from typing import Final

LEASE_VARIABLE: Final = "LIBRA_LEASE"
"""Where ranks find the path."""

_CONTENT: Final = Struct("<d")


class LeaseFile:
    """The supervisor's end."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, until: float) -> None:
        os.pwrite(self._descriptor, _CONTENT.pack(until), 0)

    def is_at(self, path: Path) -> bool:
        """Whether who opens `path` gets this file."""
        try:
            found = path.stat()
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._descriptor))

    def close(self) -> None:
        os.close(self._descriptor)


class LeaseReader:
    """A rank's end; it goes on reading when the file has no name any more."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def until(self) -> float:
        data: bytes = os.pread(self._descriptor, _CONTENT.size, 0)
        until: float
        (until,) = _CONTENT.unpack(data)
        return until
