"""The files of a shared-load directory. Blocking: call from a thread, the disk may be far away."""

import os
import stat
from pathlib import Path

import msgspec

from libra.errors import SiteError
from libra.scheduling.shared_view import FORMAT, RankLoad

PREFIX, SUFFIX = "load_", ".json"
MAX_FILE_BYTES = 16 * 2**20

_decoder = msgspec.json.Decoder(RankLoad)


class SharedDirectory:
    """One directory, seen by one rank."""

    def __init__(self, path: Path, *, rank: str, writer: str) -> None:
        """Make `path` when it is missing. Raises SiteError when it cannot be used."""
        self._path = path
        self._own = path / f"{PREFIX}{rank}{SUFFIX}"
        # The writer's name is in it, so that two processes with one rank never share it.
        self._draft = path / f".{PREFIX}{rank}.{writer}.tmp"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._draft.write_bytes(b"")
            self._draft.unlink()
        except OSError as exc:
            raise SiteError(f"shared_load_dir {path} cannot be written: {exc.strerror}") from exc

    def write(self, content: RankLoad) -> None:
        """Replace the own file in one step. Raises OSError.

        Not flushed to disk: after a crash of the machine nothing in it would be true any more.
        """
        self._draft.write_bytes(msgspec.json.encode(content))
        self._draft.replace(self._own)

    def read(self) -> dict[str, RankLoad]:
        """Every readable file by rank. Raises OSError when the directory itself is unreadable.

        A file that vanishes, is stale on NFS, or is short or foreign is left out: the next pass
        sees it whole. Each is opened anew, since that is when NFS asks the server.
        """
        found: dict[str, RankLoad] = {}
        for name in os.listdir(self._path):  # noqa: PTH208 - names only, no stat
            if name.startswith(PREFIX) and name.endswith(SUFFIX):
                content = _read(self._path / name)
                if content is not None and name == f"{PREFIX}{content.rank}{SUFFIX}":
                    found[content.rank] = content
        return found

    def remove(self) -> None:
        """Leave: take the own file and a left draft away."""
        self._own.unlink(missing_ok=True)
        self._draft.unlink(missing_ok=True)


def _read(path: Path) -> RankLoad | None:
    try:
        content = _decoder.decode(_bytes_of(path))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return content if content.format == FORMAT else None


def _bytes_of(path: Path) -> bytes:
    """Read a regular file. Raises OSError, also for anything else that bears such a name."""
    # Without O_NONBLOCK the opening of a fifo waits for a writer, for ever.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file")
        return file.read(MAX_FILE_BYTES)
