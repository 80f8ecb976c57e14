"""Keeps one scheduler and a shared-load directory in step, off the request path.

Own counts are exact in the scheduler's memory and never read back. They are written at most every
MIN_INTERVAL_S while they change, and every heartbeat when they do not. The others are read right
after an own write, else every `shared_load_cache_ttl_s`.

Why so often: schedulers that see each other late all fill the same valleys. With 8 of them, 64
instances and bursts, an exchange each 20 ms keeps the imbalance within 3-5 % of one scheduler's,
each 100 ms within 8-21 % (scripts/bench/bench_scheduler.py). Where an exchange is dear, on a large
fleet or a slow disk, the interval grows so that it takes a bounded share of the time.
"""

import threading
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio
import anyio.to_thread
import msgspec
import structlog

from libra import clock
from libra.scheduling.shared_view import FORMAT, RankLoad, SharedView

if TYPE_CHECKING:
    from libra.config.rollout import SchedulingConfig
    from libra.scheduling.scheduler import Scheduler

T = TypeVar("T")

MIN_INTERVAL_S = 0.02
MAX_LOOP_SHARE = 0.05
"""Share of the event loop's time that exchanges may take."""

MAX_DISK_SHARE = 0.5
"""Share of the time that an exchange may be waiting for the disk."""

DISK_TIMEOUT_S = 5.0
"""A disk that does not answer within this is skipped; its thread is left to end by itself."""

MAX_DISK_THREADS = 2
"""Threads a dead disk may hold. While all of them hang no more are sent after them."""

log = structlog.get_logger("libra.shared_load")


class LoadFiles(Protocol):
    """A `SharedDirectory`, or a test's stand-in."""

    def write(self, content: RankLoad) -> None: ...
    def read(self) -> dict[str, RankLoad]: ...
    def remove(self) -> None: ...


class ExchangeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may want to know."""

    live_ranks: tuple[str, ...]
    skew_s: dict[str, float]
    is_disk_answering: bool


class LoadExchange:
    """One rank's part in the exchange."""

    def __init__(
        self,
        scheduler: "Scheduler",
        files: LoadFiles,
        config: "SchedulingConfig",
        *,
        rank: str,
        writer: str,
    ) -> None:
        """`rank` is unique among the schedulers of the fleet, `writer` random per process."""
        self._scheduler = scheduler
        self._files = files
        self._config = config
        self._rank = rank
        self._writer = writer
        self._view = SharedView(own_rank=rank, own_writer=writer, ttl_s=config.shared_load_ttl_s)
        self._written_revision: int | None = None
        self._written_at = -inf
        self._read_at = -inf
        self._sequence = 0
        self._loop_s = 0.0
        self._disk_s = 0.0
        self._is_disk_answering = True
        self._free_threads = threading.Semaphore(MAX_DISK_THREADS)

    def status(self) -> ExchangeStatus:
        return ExchangeStatus(
            live_ranks=self._view.live_ranks(clock.now()),
            skew_s=self._view.skew_s(),
            is_disk_answering=self._is_disk_answering,
        )

    async def run(self) -> None:
        """Exchange until cancelled, then leave the directory."""
        try:
            while True:
                await self.exchange_once()
                await clock.sleep(self._interval_s())
        finally:
            with anyio.move_on_after(DISK_TIMEOUT_S, shield=True):
                await self._on_disk(self._files.remove)

    async def exchange_once(self) -> None:
        """Write if there is something to say, read if it is time, and tell the scheduler."""
        began = clock.now()
        heartbeat_at = self._written_at + self._config.shared_load_heartbeat_s
        if self._scheduler.load_revision != self._written_revision or began >= heartbeat_at:
            await self._write()
        elif began < self._read_at + self._config.shared_load_cache_ttl_s:
            return
        self._read_at = began
        files = await self._on_disk(self._files.read)
        self._disk_s = clock.now() - began
        self._take_in(files or {})

    def _take_in(self, files: dict[str, RankLoad]) -> None:
        began = clock.monotonic()
        now = clock.now()
        self._view.on_read(files, now=now, wall_ns=clock.wall_ns())
        self._scheduler.on_remote_load(self._view.remote_load(now), now)
        for rank in self._view.take_conflicts():
            log.error("two processes have one rank in shared_load_dir", rank=rank)
        self._loop_s = clock.monotonic() - began

    def _interval_s(self) -> float:
        return max(MIN_INTERVAL_S, self._loop_s / MAX_LOOP_SHARE, self._disk_s / MAX_DISK_SHARE)

    async def _write(self) -> None:
        revision = self._scheduler.load_revision
        self._sequence += 1
        content = RankLoad(
            format=FORMAT,
            rank=self._rank,
            writer=self._writer,
            sequence=self._sequence,
            written_at_ns=clock.wall_ns(),
            load=self._scheduler.own_load(),
        )

        def write() -> bool:
            self._files.write(content)
            return True

        self._written_at = clock.now()
        if await self._on_disk(write):
            self._written_revision = revision

    async def _on_disk(self, do: Callable[[], T]) -> T | None:
        """Run `do` in a thread; None when the disk fails or does not answer."""
        if not self._free_threads.acquire(blocking=False):
            return None

        def do_and_free() -> T:
            try:
                return do()
            finally:
                self._free_threads.release()

        with anyio.move_on_after(DISK_TIMEOUT_S):
            try:
                result = await anyio.to_thread.run_sync(do_and_free, abandon_on_cancel=True)
            except OSError as exc:
                self._note_disk(is_answering=False, why=str(exc))
                return None
            self._note_disk(is_answering=True, why="")
            return result
        self._note_disk(is_answering=False, why=f"no answer within {DISK_TIMEOUT_S} s")
        return None

    def _note_disk(self, *, is_answering: bool, why: str) -> None:
        if is_answering == self._is_disk_answering:
            return
        self._is_disk_answering = is_answering
        if is_answering:
            log.info("shared_load_dir answers again")
        else:
            log.warning("shared_load_dir fails: routing by the own view", why=why)
