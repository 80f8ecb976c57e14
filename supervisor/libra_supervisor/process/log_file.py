"""A child's log on disk: its bytes as written, an index beside them, rotation by size.

`NAME.log` holds the raw bytes of both streams in the order they were read. `NAME.log.index`
holds one record per chunk: offset, length, stream, rank and time, so that `logs` can tell these
apart and find a moment. A reader must bear a torn last record and chunks without one (the disk
was full). On rotation both files move to `.1`, `.2`, ... and the oldest goes.
"""

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from libra_supervisor.process.streams import Stream

INDEX_SUFFIX: Final = ".index"
RECORD: Final = struct.Struct("<QIHHq")
"""offset u64, length u32, stream u16, rank + 1 or 0 u16, wall time in ns since the epoch i64."""


class LogFile:
    """Writes one child's log. Every method may raise OSError; the file stays usable after one."""

    def __init__(self, path: str, *, max_bytes: int, num_kept: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_kept = num_kept
        self._log_fd: int | None = None
        self._index_fd: int | None = None
        self._size_bytes = 0

    def write(
        self, stream: Stream, chunk: bytes | memoryview, *, wall_ns: int, rank: int | None = None
    ) -> int:
        """Append the chunk and return how many of its bytes are in the file.

        Fewer than all when the disk filled up half way. Raises OSError when none are.
        """
        self._open()
        if self._size_bytes and self._size_bytes + len(chunk) > self._max_bytes:
            self._rotate()
        offset = self._size_bytes
        written = 0
        try:
            while written < len(chunk):
                written += os.write(self._fd(), memoryview(chunk)[written:])
        except OSError:
            if written == 0:
                raise
            # The disk filled up inside the chunk: what is in the file stays and is indexed.
        self._size_bytes += written
        with suppress(OSError):  # a reader bears a chunk that no record describes
            self._write_index(
                RECORD.pack(offset, written, stream, 0 if rank is None else rank + 1, wall_ns)
            )
        return written

    def close(self) -> None:
        for fd in (self._log_fd, self._index_fd):
            if fd is not None:
                os.close(fd)
        self._log_fd = self._index_fd = None

    def reopen(self) -> None:
        """Forget the open files, which may be broken; the next write opens them anew."""
        try:
            self.close()
        except OSError:
            # The descriptor is gone either way.
            self._log_fd = self._index_fd = None

    def _fd(self) -> int:
        if self._log_fd is None:
            raise OSError(f"{self._path} is not open")
        return self._log_fd

    def _open(self) -> None:
        if self._log_fd is not None:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._log_fd = os.open(self._path, flags, 0o640)
        self._size_bytes = os.fstat(self._log_fd).st_size
        self._index_fd = os.open(self._path + INDEX_SUFFIX, flags, 0o640)
        # A record torn by a crash would shift all that follow.
        size = os.fstat(self._index_fd).st_size
        if size % RECORD.size:
            os.ftruncate(self._index_fd, size - size % RECORD.size)

    def _write_index(self, record: bytes) -> None:
        if self._index_fd is None:
            return
        written = os.write(self._index_fd, record)
        if written != len(record):
            os.ftruncate(self._index_fd, os.fstat(self._index_fd).st_size - written)

    def _rotate(self) -> None:
        self.close()
        # The index first: a log without its index can be read, an index beside the wrong log not.
        for suffix in (INDEX_SUFFIX, ""):
            _shift(self._path, suffix, self._num_kept)
        self._open()


def rotated_name(path: str, age: int, suffix: str = "") -> str:
    """Name the file after `age` rotations; age 0 is the current one."""
    return f"{path}.{age}{suffix}" if age else f"{path}{suffix}"


def _shift(path: str, suffix: str, num_kept: int) -> None:
    for age in range(num_kept, 0, -1):
        try:
            Path(rotated_name(path, age - 1, suffix)).replace(rotated_name(path, age, suffix))
        except FileNotFoundError:
            continue
    if num_kept == 0:
        Path(rotated_name(path, 0, suffix)).unlink()
