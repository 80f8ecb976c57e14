"""One reward worker's life: started, scoring, ended with everything it started."""

import sys
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from libra.errors import ChildError, ConfigError, InvariantError, PeerError
from libra.ids import ChildId, Incarnation, RunId
from libra.rewards.case import RewardCase
from libra.rewards.coercion import RewardFailed
from libra.rewards.messages import (
    Scored,
    WorkerOrder,
    WorkerReady,
    WorkerUnusable,
    message_of,
)
from libra_supervisor.process.child import RunningChild
from libra_supervisor.process.peer import listen
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.process.spec import Limits, ProcessSpec
from libra_supervisor.process.tree import StopDeadlines
from libra_supervisor.rewards.channel import Channel, accepted

START_TIMEOUT_S = 60.0
"""Interpreter and user code; a reward that imports a large library takes this long when cold."""

KILL = StopDeadlines(term_grace_s=0.0, kill_wait_s=5.0)
"""Workers hold nothing worth a grace."""

_EXIT_WAIT_S = 1.0


class RewardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker of a pool has in common."""

    run_id: RunId
    run_dir: Path
    """Sockets lie here, logs in its logs/."""

    reward: str
    reward_args: dict[str, Any]
    env: Mapping[str, str]
    cwd: str
    """User modules are found from here and on PYTHONPATH."""

    timeout_s: float = 10.0
    memory_bytes: int = 4 * 2**30


class RewardWorker:
    """A worker that is ready."""

    def __init__(self, child: RunningChild, channel: Channel, *, timeout_s: float) -> None:
        self._child = child
        self._channel = channel
        self._timeout_s = timeout_s
        self._is_broken = False

    def is_usable(self) -> bool:
        """Whether it may be given a case; if not, another has to take its place."""
        # A worker that died or spoke while nothing was asked must not be given the next case: the
        # case would be blamed for it.
        return not self._is_broken and self._channel.is_quiet

    async def score(self, case: RewardCase) -> float | RewardFailed:
        """Score one case within the time limit; afterwards look at `is_usable`."""
        try:
            payload = msgspec.msgpack.encode(case)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            # The workflow's response text may be anything.
            return RewardFailed(f"the case cannot be sent to a worker: {error}")
        self._is_broken = True
        with anyio.move_on_after(self._timeout_s):
            try:
                await self._channel.send(payload)
                answer = message_of(await self._channel.receive())
            except PeerError:
                return RewardFailed(f"the worker {await self._how_it_ended()}")
            except msgspec.MsgspecError as error:
                return RewardFailed(f"the worker's answer cannot be read: {error}")
            match answer:
                case Scored(value):
                    self._is_broken = False
                    return value
                case RewardFailed():
                    self._is_broken = False
                    return answer
                case WorkerReady() | WorkerUnusable():
                    return RewardFailed("the worker answered out of turn")
        return RewardFailed(f"took longer than {self._timeout_s:g} s")

    async def _how_it_ended(self) -> str:
        with anyio.move_on_after(_EXIT_WAIT_S):
            return str(await self._child.wait())
        return "closed its connection"


@asynccontextmanager
async def running_worker(
    child_id: ChildId, incarnation: Incarnation, *, spawner: Spawner, settings: RewardSettings
) -> AsyncGenerator[RewardWorker]:
    """Start a worker, wait until its reward function is loaded, end its whole tree afterwards.

    Raises ConfigError when the reward cannot be loaded, ChildError when the process fails before
    that. The end is shielded, and bounded by KILL.
    """
    socket_path = settings.run_dir / f".{child_id}.sock"
    listener = listen(socket_path, backlog=1)
    listener.setblocking(False)
    try:
        spec = _spec(child_id, incarnation, socket_path, settings)
        child = await spawner.spawn(spec, incarnation)
        try:
            with anyio.move_on_after(START_TIMEOUT_S) as deadline:
                channel = await _first_contact(child, listener, incarnation)
            if deadline.cancelled_caught:
                raise ChildError(f"{child_id} was not ready after {START_TIMEOUT_S:g} s")
            try:
                yield RewardWorker(child, channel, timeout_s=settings.timeout_s)
            finally:
                channel.close()
        finally:
            with anyio.CancelScope(shield=True):
                await child.tree.end(KILL)
                child.reap()
    finally:
        listener.close()
        socket_path.unlink(missing_ok=True)


async def _first_contact(child: RunningChild, listener: Any, incarnation: Incarnation) -> Channel:
    """The connection of a worker that says it is ready, unless it ends first."""
    found: list[Channel] = []
    ended: list[str] = []
    is_ready = False

    async def watch() -> None:
        ended.append(str(await child.wait()))
        tasks.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            channel = Channel(await accepted(listener))
            found.append(channel)
            try:
                message = message_of(await channel.receive())
            except PeerError:
                # It ended in the middle of its first message: `watch` says how.
                await anyio.sleep_forever()
            _expect_ready(child.child_id, message, incarnation)
            is_ready = True
            tasks.cancel_scope.cancel()
    except BaseException:
        _close(found)
        raise
    if is_ready:
        return found[0]
    _close(found)
    lines = await child.last_lines(10)
    said = "".join(f"\n  {line}" for line in lines)
    raise ChildError(f"{child.child_id} {ended[0]} before it was ready{said}")


def _close(channels: Iterable[Channel]) -> None:
    for channel in channels:
        channel.close()


def _expect_ready(child_id: ChildId, message: object, incarnation: Incarnation) -> None:
    match message:
        case WorkerReady(named) if named == incarnation:
            return
        case WorkerUnusable(named, reason) if named == incarnation:
            raise ConfigError(reason)
        case _:
            raise InvariantError(f"{child_id} began with {message!r:.80}")


def _spec(
    child_id: ChildId, incarnation: Incarnation, socket_path: Path, settings: RewardSettings
) -> ProcessSpec:
    order = WorkerOrder(
        socket_path=str(socket_path),
        incarnation=incarnation,
        reward=settings.reward,
        reward_args=settings.reward_args,
    )
    return ProcessSpec(
        child_id=child_id,
        run_id=settings.run_id,
        argv=(sys.executable, "-m", "libra.rewards.worker", msgspec.json.encode(order).decode()),
        # One thread each: there is a worker per core.
        env={"OMP_NUM_THREADS": "1", **settings.env},
        cwd=settings.cwd,
        log_path=str(settings.run_dir / "logs" / f"{child_id}.log"),
        limits=Limits(address_space_bytes=settings.memory_bytes),
        is_bound_to_supervisor=True,
    )
