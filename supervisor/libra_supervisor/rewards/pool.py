"""Scores cases in worker processes, each replaced as soon as a case has spoilt it."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, TypeAlias

import anyio

from libra import clock
from libra.errors import ChildError
from libra.ids import ChildId, Incarnation
from libra.rewards.case import RewardCase
from libra.rewards.coercion import RewardFailed

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream

MAX_FAILED_STARTS = 3
"""In a row, without a worker becoming ready in between."""

RESTART_DELAY_S = 1.0
"""After a failed start; a worker that a case has spoilt is replaced at once."""


class Worker(Protocol):
    def is_usable(self) -> bool: ...

    async def score(self, case: RewardCase) -> float | RewardFailed: ...


StartWorker: TypeAlias = Callable[[ChildId, Incarnation], AbstractAsyncContextManager[Worker]]
"""Raises ConfigError or ChildError on entering; ends the worker on leaving."""


class _Job:
    def __init__(self, case: RewardCase) -> None:
        self.case = case
        self.done = anyio.Event()
        self.outcome: float | RewardFailed = RewardFailed("the reward pool has stopped")


class RewardPool:
    """`num_workers` workers at most. `score` works while `run` is alive."""

    def __init__(self, start_worker: StartWorker, *, num_workers: int) -> None:
        self._start_worker = start_worker
        self._num_workers = num_workers
        self._send, self._jobs = anyio.create_memory_object_stream[_Job]()
        self._is_ready = anyio.Event()
        self._num_starts = 0
        self.is_over = False
        """Workers cannot be had any more: what is said of a case from then on is not its fault."""

        self.num_scored = 0
        self.failed_by_reason: Counter[str] = Counter()
        """Failed cases by the first words of their reason."""

    @property
    def num_replaced(self) -> int:
        """Workers that were started to take the place of another."""
        return max(0, self._num_starts - self._num_workers)

    async def run(self) -> None:
        """Own the workers; ends by cancellation, or raises.

        ConfigError: the reward function cannot be loaded. ChildError: workers fail before they are
        ready.
        """
        try:
            async with anyio.create_task_group() as slots:
                for index in range(self._num_workers):
                    slots.start_soon(self._keep_slot, index)
        finally:
            self._send.close()
            self._jobs.close()

    async def wait_ready(self) -> None:
        """Return when the first worker has loaded the reward function."""
        await self._is_ready.wait()

    async def score(self, case: RewardCase) -> float | RewardFailed:
        """Score one case; waits for a free worker, and the time limit begins after that wait."""
        job = _Job(case)
        try:
            await self._send.send(job)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            # Whoever owns `run` hears the cause; a second error from here would hide it.
            return job.outcome
        await job.done.wait()
        self._count(job.outcome)
        return job.outcome

    async def _keep_slot(self, index: int) -> None:
        """Have a worker in this slot until cancelled."""
        num_failed_starts = 0
        job: _Job | None = None
        while True:
            self._num_starts += 1
            incarnation = Incarnation(f"reward-{index}-{self._num_starts}")
            try:
                async with self._start_worker(ChildId(f"reward-{index}"), incarnation) as worker:
                    num_failed_starts = 0
                    self._is_ready.set()
                    job = await _serve(worker, self._jobs, job)
            except ChildError:
                num_failed_starts += 1
                if num_failed_starts == MAX_FAILED_STARTS:
                    self.is_over = True
                    raise
                await clock.sleep(RESTART_DELAY_S * num_failed_starts)
            except BaseException:
                self.is_over = True
                raise

    def _count(self, outcome: float | RewardFailed) -> None:
        if isinstance(outcome, RewardFailed):
            self.failed_by_reason[" ".join(outcome.reason.split()[:4])] += 1
        else:
            self.num_scored += 1


async def _serve(
    worker: Worker, jobs: "MemoryObjectReceiveStream[_Job]", first: _Job | None
) -> _Job | None:
    """Give the worker `first`, then one job after another, until it cannot be used any more.

    Returns the job that the next worker has to begin with, if there is one.
    """
    job = first
    while True:
        if job is None:
            job = await jobs.receive()
        if not worker.is_usable():
            # It ended since its last case, which this one is not to blame for.
            return job
        try:
            job.outcome = await worker.score(job.case)
        finally:
            job.done.set()
        job = None
        if not worker.is_usable():
            return None
