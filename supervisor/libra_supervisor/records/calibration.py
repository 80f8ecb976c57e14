"""Where calibration books lie: one file per (device, model), shared by a user's runs.

A book is read, changed and replaced under a lock, so that runs side by side lose none of each
other's measurements. Blocks: call `add` in a thread.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import structlog

from libra.config.environment import Environment
from libra.config.run import RunConfig
from libra.planner.calibration import (
    Calibration,
    Observation,
    book_of,
    decode,
    encode,
    observe,
)
from libra.storage.atomic import atomic_write

_log = structlog.get_logger()
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def store_of(config: RunConfig, environment: Environment) -> "CalibrationStore | None":
    """The store that the configuration names, else the user's; None for a user without a home."""
    if configured := config.global_resource_planner.calibration_dir:
        return CalibrationStore(Path(configured))
    data_home = environment.data_home
    if data_home is None and environment.home is not None:
        data_home = f"{environment.home}/.local/share"
    return None if data_home is None else CalibrationStore(Path(data_home) / "libra/calibration")


def empty_book(config: RunConfig) -> Calibration | None:
    """The book that this configuration's measurements belong to; None when it names no device."""
    if config.hardware is None or config.model_arch is None:
        return None
    return book_of(config.hardware, config.model_arch)


def known_book(config: RunConfig, store: "CalibrationStore | None") -> Calibration | None:
    """What is known about this configuration's device and model; None when it names none."""
    empty = empty_book(config)
    return empty if empty is None or store is None else store.load(empty)


class CalibrationStore:
    """The books below one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path_of(self, hardware: str, model: str) -> Path:
        return self._directory / f"{_safe(hardware)}--{_safe(model)}.json"

    def load(self, empty: Calibration) -> Calibration:
        """The stored book of the device and model that `empty` is of, or `empty`.

        A file that is no book is said and not used.
        """
        path = self.path_of(empty.hardware, empty.model)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return empty
        except OSError as error:
            _log.warning("calibration_not_read", path=str(path), why=error.strerror)
            return empty
        try:
            return decode(content, hardware=empty.hardware, model=empty.model)
        except msgspec.MsgspecError as error:
            _log.warning("calibration_not_read", path=str(path), why=str(error))
            return empty

    def add(self, empty: Calibration, observations: Sequence[Observation]) -> Calibration:
        """Put the observations into the stored book; returns it as it is now.

        Raises OSError when the directory cannot be written.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._locked():
            book = self.load(empty)
            for observation in observations:
                book = observe(book, observation)
            atomic_write(self.path_of(book.hardware, book.model), encode(book))
        return book

    @contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._directory / ".lock", flags, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _safe(name: str) -> str:
    return _UNSAFE.sub("_", name).strip("._") or "unnamed"
