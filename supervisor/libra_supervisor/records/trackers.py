"""TensorBoard, W&B and MLflow beside metrics.jsonl, which stays the truth.

Each tracker has a bounded queue and a thread of its own: the run hands a step over and goes on.
What a tracker cannot take in time is dropped, counted and said; what it raises is counted and said,
and ends nothing. A step that is trained again after a restart has the same number and a higher
`attempt`.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

import msgspec
import structlog

from libra_supervisor.records.step import StepRecord

QUEUE_STEPS: Final = 256
CLOSE_S: Final = 10.0
"""Longest wait at the end of a run for what is still queued."""

_log = structlog.get_logger()


class Backend(Protocol):
    """One tracker's own library. Called from one thread only."""

    def log(self, step: int, at_ns: int, values: Mapping[str, float]) -> None:
        """Keep the values of one step; `at_ns` is wall time."""

    def close(self) -> None: ...


class Tracker:
    """One backend behind its queue."""

    def __init__(
        self, name: str, opened: Callable[[], Backend], *, queue_steps: int = QUEUE_STEPS
    ) -> None:
        """`opened` makes the backend, in the tracker's thread: its import may take seconds."""
        self.name = name
        self.num_dropped = 0
        """Steps that found the queue full, or were left in it at the end."""

        self.num_failed = 0
        self._opened = opened
        self._queue: queue.Queue[StepRecord | None] = queue.Queue(queue_steps)
        # A daemon: a library that hangs must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def offer(self, record: StepRecord) -> None:
        """Hand a step over; never waits."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                _log.warning("tracker_falls_behind", tracker=self.name, step=record.step)

    def close(self, *, timeout_s: float = CLOSE_S) -> None:
        """Give it a while to finish. Blocks for at most twice `timeout_s`."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            pass
        else:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.num_dropped += self._queue.qsize()
        if self.num_dropped or self.num_failed:
            _log.warning(
                "tracker_incomplete",
                tracker=self.name,
                dropped=self.num_dropped,
                failed=self.num_failed,
            )

    def _run(self) -> None:
        """Open at the first step, and again at the next while that fails."""
        backend: Backend | None = None
        while (record := self._queue.get()) is not None:
            try:
                backend = backend or self._opened()
                backend.log(record.step, record.wall_time_ns, values_of(record))
            except Exception as error:  # noqa: BLE001 - a tracker's trouble is never the run's
                self._fail(error)
        try:
            if backend is not None:
                backend.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.num_failed += 1
        if self.num_failed == 1:
            why = f"{type(error).__name__}: {error}"
            _log.warning("tracker_fails", tracker=self.name, why=why)


class Trackers:
    """All of a run's trackers."""

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self.all = tuple(trackers)

    def offer(self, record: StepRecord) -> None:
        for tracker in self.all:
            tracker.offer(record)

    def close(self) -> None:
        for tracker in self.all:
            tracker.close()


def values_of(record: StepRecord) -> dict[str, float]:
    """The record's numbers by name: drops as `num_dropped/<reason>`, without what is None."""
    values: dict[str, float] = {}
    for name, value in msgspec.structs.asdict(record).items():
        if isinstance(value, dict):
            values |= {f"{name}/{reason}": float(count) for reason, count in value.items()}
        elif value is not None and name != "wall_time_ns":
            values[name] = float(value)
    return values
