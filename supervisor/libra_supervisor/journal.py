"""What survives the supervisor: state.json is the truth, journal.jsonl the audit.

`state.json` is replaced as a whole (temporary file, fsync, rename, fsync of the directory), so a
reader sees the old state or the new one. `journal.jsonl` only grows; a last line torn by a crash
is skipped when it is read.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from libra import clock
from libra.errors import DataError
from libra.ids import ChildId, Incarnation, RunId
from libra.storage.atomic import write_record

SCHEMA_VERSION: Final = 1
RUN_ID_NAME: Final = "run_id"


class ChildRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A running child as it is written down, for the supervisor that comes after."""

    child_id: ChildId
    incarnation: Incarnation
    pid: int
    start_ticks: int
    boot_id: str
    is_ready: bool = False
    """It has been ready once; if not, it may still be loading."""

    facts: dict[str, str] = {}
    """What its kind needs to take it over: its address, what it was started with."""


class SupervisorState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a new supervisor must know to go on with the run."""

    run_id: RunId
    written_at_ns: int
    """Wall time, for people."""

    supervisor_pid: int
    supervisor_start_ticks: int = 0
    """With its boot id it tells the supervisor from a later process on its pid."""

    supervisor_boot_id: str = ""
    children: tuple[ChildRecord, ...] = ()
    facts: dict[str, Any] = {}
    """Of the run as a whole: step, policy version, quarantined slots."""

    schema_version: int = SCHEMA_VERSION


class StateFile:
    """`state.json` of one run directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, state: SupervisorState) -> None:
        """Replace the file durably; blocks on fsync, so call it in a thread.

        Raises SiteError when the disk refuses; the old state is still there then.
        """
        write_record(self._path, msgspec.json.format(msgspec.json.encode(state), indent=1))

    def load(self) -> SupervisorState | None:
        """The last saved state, None when there is none.

        Raises DataError when it was written by a newer Libra or is not ours.
        """
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            version = msgspec.json.decode(content, type=_Versioned).schema_version
            if version > SCHEMA_VERSION:
                raise DataError(
                    f"{self._path} has schema version {version}, this Libra reads up to "
                    f"{SCHEMA_VERSION}; use the Libra that wrote it or a newer one"
                )
            return msgspec.json.decode(content, type=SupervisorState)
        except msgspec.MsgspecError as error:
            raise DataError(
                f"{self._path} is not a state of this program ({error}); "
                "move it away to start without it"
            ) from error


def read_run_id(path: Path) -> RunId | None:
    """The run's identity in its file of its own, which outlives a damaged state.json."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return RunId(text) if text else None


class Journal:
    """`journal.jsonl` of one run directory: what happened and what was done about it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._num_lost = 0

    @property
    def num_lost(self) -> int:
        """Entries that could not be written (the disk is full); the run goes on without them."""
        return self._num_lost

    def append(self, name: str, **fields: Any) -> None:
        """Add one line `{"at_ns": ..., "name": NAME, ...}`; an audit never stops the run.

        `fields` must be JSON-able.
        """
        line = msgspec.json.encode({"at_ns": clock.wall_ns(), "name": name, **fields}) + b"\n"
        self._write(line)

    def append_struct(self, entry: msgspec.Struct) -> None:
        """Add a tagged struct (an event, a command) under its type's name."""
        fields = msgspec.to_builtins(entry)
        fields.pop("type", None)
        self.append(type(entry).__name__, **fields)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, line: bytes) -> None:
        try:
            if self._fd is None:
                self._fd = _open_after_newline(self._path)
            if os.write(self._fd, line) != len(line):
                # A torn line ends with the next newline, which `read_journal` then skips.
                self._num_lost += 1
                os.write(self._fd, b"\n")
        except OSError:
            self._num_lost += 1


def read_journal(path: Path) -> Iterator[Mapping[str, Any]]:
    """Entries in order; lines that are not whole JSON objects are skipped."""
    with path.open("rb") as file:
        for line in file:
            try:
                entry = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.MsgspecError:
                continue
            yield entry


class _Versioned(msgspec.Struct):
    schema_version: int


def _open_after_newline(path: Path) -> int:
    """Open for appending; a line torn by a crash is closed first."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")
    return fd
