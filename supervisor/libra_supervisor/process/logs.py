"""The supervisor's side of the log relay: start it or find it, hand it pipes, ask for last lines.

async with open_log_relay(run_dir, run_id=..., env=..., post=...) as logs:
    await logs.attach(child_id, log_path, out_fd, err_fd)
    lines = await logs.tail(child_id, 50)
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, assert_never

import anyio
import msgspec
from anyio import to_thread

from libra import clock
from libra.config.supervision import SupervisionConfig
from libra.errors import SiteError, ungrouped
from libra.ids import ChildId, RunId
from libra.tracing.log import get_log
from libra.wire.framing import FrameDecoder, encode_frame
from libra_supervisor.events import ChildEvent, LogSinkFailing, LogSinkRecovered
from libra_supervisor.process.identity import ProcessIdentity, identity_of
from libra_supervisor.process.kernel import read_tag, signal_process
from libra_supervisor.process.log_messages import (
    AskHeld,
    AskTail,
    Attach,
    Held,
    RelayCommand,
    RelayReport,
    SinkFailed,
    SinkRecovered,
    Tail,
)
from libra_supervisor.process.peer import connect, listen, peer_pid
from libra_supervisor.process.spec import CHILD_TAG, RUN_TAG, without_inherited

RELAY_ID: Final = ChildId("log-relay")
RELAY: Final = (sys.executable, "-m", "libra_supervisor.process.log_relay")
SOCKET_NAME: Final = ".log-relay.sock"
_REPLY_WAIT_S: Final = 2.0
_END_WAIT_S: Final = 6.0
_LOOK_PERIOD_S: Final = 5.0
_SILENCE_S: Final = 15.0
"""Before a relay that does not answer is taken for stopped, and once more before it is replaced."""

_EARLY_S: Final = 1.0
_MAX_EARLY_ENDS: Final = 5
_RECEIVE_BYTES: Final = 65536
_MAX_FDS: Final = 253
_MAX_MESSAGE_BYTES: Final = 64 * 2**20

_NOBODY: Final = ChildId("")
_log = get_log()

Post = Callable[[ChildEvent], Awaitable[None]]


class LogPolicy(msgspec.Struct, frozen=True, kw_only=True):
    max_bytes: int = 256 * 2**20
    """Size at which a log file is rotated."""

    num_kept: int = 3


def log_policy_from(config: SupervisionConfig) -> LogPolicy:
    return LogPolicy(max_bytes=config.log_max_bytes, num_kept=config.log_keep)


class LogRelay:
    """A connection to the relay that is renewed, with every pipe, when the relay dies."""

    def __init__(
        self, run_dir: Path, *, run_id: RunId, env: Mapping[str, str], post: Post, policy: LogPolicy
    ) -> None:
        self._directory = run_dir / "logs"
        self._run_id = run_id
        self._env = env
        self._post = post
        self._policy = policy
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._relay: ProcessIdentity | None = None
        self._held: dict[tuple[ChildId, int | None], tuple[Attach, int, int]] = {}
        self._waiting: dict[int, tuple[anyio.Event, list[Tail]]] = {}
        self._num_requests = 0
        self._received_fds: list[int] = []

    @property
    def children(self) -> frozenset[ChildId]:
        """Children whose pipes are open in the relay: after a start, those of an earlier life."""
        return frozenset(child_id for child_id, _ in self._held)

    async def start(self) -> None:
        """Find the relay of an earlier supervisor or start one. Raises SiteError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            self._connection = connect(self._socket_path)
        except OSError:
            self._start_relay()
            return
        self._relay = _relay_behind(self._connection)
        await self._take_over()

    async def run(self) -> None:
        """Receive reports until cancelled; replace a relay that died or hangs."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            await self._keep_one()

    async def _keep_one(self) -> None:
        num_early = 0
        while True:
            began_at = clock.now()
            await self._receive_all()
            num_early = num_early + 1 if clock.now() - began_at < _EARLY_S else 0
            if num_early == _MAX_EARLY_ENDS:
                raise SiteError(
                    f"the log relay ends as soon as it is started, {num_early} times in a row; "
                    f"{self._directory / 'log-relay.log'} says why"
                )
            self._start_relay()
            for attach, out_fd, err_fd in self._held.values():
                self._send(attach, (out_fd, err_fd))

    def attach(self, child_id: ChildId, log_path: str, out_fd: int, err_fd: int) -> None:
        """Have the pipes drained into `log_path`. The descriptors now belong to this object."""
        self.release(child_id)
        attach = Attach(child_id, log_path, self._policy.max_bytes, self._policy.num_kept)
        self._hold(attach, out_fd, err_fd)

    def attach_rank(self, child_id: ChildId, rank: int, out_fd: int, err_fd: int) -> None:
        """Have one rank's own pipes drained into its child's log, marked as the rank's.

        The descriptors now belong to this object.
        """
        whole, _, _ = self._held[child_id, None]
        self._hold(msgspec.structs.replace(whole, rank=rank), out_fd, err_fd)

    def _hold(self, attach: Attach, out_fd: int, err_fd: int) -> None:
        self._held[attach.child_id, attach.rank] = (attach, out_fd, err_fd)
        self._send(attach, (out_fd, err_fd))

    def release(self, child_id: ChildId) -> None:
        """Close our copies of a dead child's pipes. The relay reads its own to the end."""
        for key in [key for key in self._held if key[0] == child_id]:
            _, out_fd, err_fd = self._held.pop(key)
            os.close(out_fd)
            os.close(err_fd)

    def keep_only(self, children: frozenset[ChildId]) -> None:
        """Release every other child: after a start, those that are not taken over."""
        for child_id in self.children - children:
            self.release(child_id)

    async def _watch(self) -> None:
        """Find a relay that is stopped or hangs: children block when their pipes are full."""
        while True:
            await clock.sleep(_LOOK_PERIOD_S)
            if await self._ask_tail(_NOBODY, 0, wait_s=_SILENCE_S) is not None:
                continue
            _log.warning("log_relay_silent", silent_s=_SILENCE_S)
            self._signal_relay(signal.SIGCONT)
            if await self._ask_tail(_NOBODY, 0, wait_s=_SILENCE_S) is None:
                _log.warning("log_relay_replaced", why="it does not answer")
                self._signal_relay(signal.SIGKILL)

    def _signal_relay(self, signum: int) -> None:
        if self._relay is not None:
            signal_process(self._relay.pid, self._relay.start_ticks, signum)

    async def tail(self, child_id: ChildId, num_lines: int) -> tuple[str, ...]:
        """Return the last lines the child printed, oldest first; none when the relay is away."""
        return await self._ask_tail(child_id, num_lines, wait_s=_REPLY_WAIT_S) or ()

    async def _ask_tail(
        self, child_id: ChildId, num_lines: int, *, wait_s: float
    ) -> tuple[str, ...] | None:
        """None when no answer came in time."""
        self._num_requests += 1
        request, answered = self._num_requests, anyio.Event()
        replies: list[Tail] = []
        self._waiting[request] = (answered, replies)
        self._send(AskTail(request, child_id, num_lines))
        try:
            with anyio.move_on_after(wait_s):
                await answered.wait()
        finally:
            del self._waiting[request]
        return replies[0].lines if replies else None

    async def close(self) -> None:
        """Let the relay finish and end; it stays while children that we leave behind live."""
        for child_id in self.children:
            self.release(child_id)
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            await to_thread.run_sync(_wait_for, self._process, _END_WAIT_S)

    @property
    def _socket_path(self) -> Path:
        return self._directory / SOCKET_NAME

    def _start_relay(self) -> None:
        if self._process is not None:
            _wait_for(self._process, 0.0)
        if self._connection is not None:
            self._connection.close()
        try:
            with listen(self._socket_path) as listener:
                self._process = self._spawn_relay(listener.fileno())
                self._relay = identity_of(self._process.pid)
            self._connection = connect(self._socket_path)
        except OSError as error:
            raise SiteError(
                f"the log relay does not start in {self._directory}: {error}; "
                "check the free space, the permissions and the process limit"
            ) from error

    def _spawn_relay(self, listener_fd: int) -> subprocess.Popen[bytes]:
        env = {
            **without_inherited(self._env, keeps_proxy=False),
            RUN_TAG: self._run_id,
            CHILD_TAG: RELAY_ID,
            # The relay must find the same packages as this process, installed or not.
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        with (self._directory / "log-relay.log").open("ab") as output:
            return subprocess.Popen(  # noqa: S603 - our own program
                [*RELAY, str(listener_fd), str(self._socket_path)],
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(listener_fd,),
                start_new_session=True,
            )

    async def _take_over(self) -> None:
        """Get copies of the pipes that the relay of an earlier supervisor holds."""
        self._signal_relay(signal.SIGCONT)  # one that was stopped
        self._send(AskHeld(0))
        decoder = FrameDecoder(max_frame_bytes=_MAX_MESSAGE_BYTES)
        with anyio.move_on_after(_REPLY_WAIT_S):
            while (frames := await self._receive(decoder)) is not None:
                for frame in frames:
                    report = msgspec.msgpack.decode(frame, type=RelayReport)
                    if isinstance(report, Held):
                        self._keep(report)
                        return
        # It would read beside its successor from pipes that it got anew.
        self._signal_relay(signal.SIGKILL)
        self._start_relay()

    def _keep(self, held: Held) -> None:
        fds, self._received_fds = self._received_fds, []
        for attach, out_fd, err_fd in zip(held.children, fds[::2], fds[1::2], strict=True):
            self._held[attach.child_id, None] = (attach, out_fd, err_fd)

    async def _receive_all(self) -> None:
        decoder = FrameDecoder(max_frame_bytes=_MAX_MESSAGE_BYTES)
        while (frames := await self._receive(decoder)) is not None:
            for frame in frames:
                await self._handle(msgspec.msgpack.decode(frame, type=RelayReport))

    async def _receive(self, decoder: FrameDecoder) -> list[bytes] | None:
        """Frames of one read; None when the relay is gone."""
        connection = self._connection
        if connection is None:
            return None
        try:
            await anyio.wait_readable(connection)
            data, fds, _, _ = socket.recv_fds(connection, _RECEIVE_BYTES, _MAX_FDS)
        except (OSError, anyio.ClosedResourceError):
            return None
        self._received_fds += fds
        return decoder.feed(data) if data else None

    async def _handle(self, report: RelayReport) -> None:
        match report:
            case Tail():
                if (waiting := self._waiting.get(report.request)) is not None:
                    waiting[1].append(report)
                    waiting[0].set()
            case Held():
                self._keep(report)
            case SinkFailed(child_id, reason, dropped_bytes):
                await self._post(LogSinkFailing(child_id, reason, dropped_bytes, clock.now()))
            case SinkRecovered(child_id, dropped_bytes):
                await self._post(LogSinkRecovered(child_id, dropped_bytes, clock.now()))
            case _:
                assert_never(report)

    def _send(self, command: RelayCommand, fds: tuple[int, ...] = ()) -> None:
        # Commands are small and the relay always reads, so this does not block in practice; a
        # relay that died is noticed by `run`, which sends what is held again.
        if self._connection is None:
            return
        data = encode_frame(msgspec.msgpack.encode(command))
        try:
            sent = socket.send_fds(self._connection, [data], fds) if fds else 0
            self._connection.sendall(data[sent:])
        except OSError:
            return


@asynccontextmanager
async def open_log_relay(
    run_dir: Path,
    *,
    run_id: RunId,
    env: Mapping[str, str],
    post: Post,
    policy: LogPolicy | None = None,
) -> AsyncIterator[LogRelay]:
    """Start (or find) the relay and serve it until the block ends; it inherits from `env`.

    Raises SiteError, from the block too, when a relay that died cannot be replaced.
    """
    relay = LogRelay(run_dir, run_id=run_id, env=env, post=post, policy=policy or LogPolicy())
    await relay.start()
    try:
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(relay.run)
                try:
                    yield relay
                finally:
                    tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):  # bounded by _END_WAIT_S
            await relay.close()


def _relay_behind(connection: socket.socket) -> ProcessIdentity | None:
    """The relay at the other end; None when that is somebody else."""
    pid = peer_pid(connection)
    tag = read_tag(pid)
    return identity_of(pid) if tag is not None and tag[1] == RELAY_ID else None


def _wait_for(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        # It still drains the pipes of children that outlive us; not ours to wait for any longer.
        process.returncode = 0
