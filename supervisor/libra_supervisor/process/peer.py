"""Unix sockets in deep directories, and who is at their other end.

A socket's path holds at most 107 bytes, a run directory may be deeper. Linux also accepts
/proc/self/fd/N/NAME, where N is the open directory: short whatever the directory's length.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

MAX_PATH_BYTES: Final = 107
_CREDENTIALS: Final = struct.Struct("3i")


def peer_uid(connection: socket.socket) -> int:
    """User id of the process that connected, as the kernel recorded it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return int(uid)


def peer_pid(connection: socket.socket) -> int:
    """Process id of the process that connected; it may have ended since."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(raw)
    return int(pid)


def listen(path: Path, *, backlog: int = 64) -> socket.socket:
    """Listen at `path`, mode 0600; replaces a file left there. Not inheritable."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as short:
            # The mode is right from the start: umask is the process's, so other threads that
            # create a file in these microseconds get a stricter mode, never a laxer one.
            mask = os.umask(0o177)
            try:
                listener.bind(short)
            finally:
                os.umask(mask)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def connect(path: Path) -> socket.socket:
    """Open a blocking connection to the socket at `path`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as short:
            connection.connect(short)
    except OSError:
        connection.close()
        raise
    return connection


@contextmanager
def _short(path: Path) -> Iterator[str]:
    if len(os.fsencode(path)) <= MAX_PATH_BYTES:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
