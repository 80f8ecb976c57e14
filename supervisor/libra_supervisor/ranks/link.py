"""The supervisor's end of the ranks' control sockets.

One listening Unix socket per supervisor; every rank connects and says Hello first. A connection
is taken only from our own user, and a Hello only for this run, this attempt, and a rank that is
expected and not linked yet.
"""

import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import anyio
import msgspec
from anyio import to_thread

from libra.errors import PeerError
from libra.ids import RunId
from libra.wire.decoding import decoded
from libra.wire.framing import FrameDecoder, encode_frame
from libra.wire.rank import Hello, RankCommand, RankEvent
from libra_supervisor.process.identity import ProcessIdentity, identity_of
from libra_supervisor.process.peer import MAX_PATH_BYTES, listen, peer_pid, peer_uid

SOCKET_NAME: Final = "ranks.sock"
_RECEIVE_BYTES: Final = 256 * 1024
_SEND_BYTES: Final = 1 << 20
_HELLO_WAIT_S: Final = 30.0
_NUM_PIPES: Final = 2


class Link(Protocol):
    """A rank's control socket, here or on another node; `RankLink` is one here."""

    async def send(self, frame: bytes) -> None:
        """Send a whole frame; waits while it cannot go. Raises PeerError when the rank is gone."""

    async def receive(self) -> RankEvent | None:
        """The next event; None at a clean end. Raises PeerError when the end is not clean."""

    @property
    def peer(self) -> ProcessIdentity | None:
        """Who is at the other end; None when it is no process of this machine."""

    def take_output(self) -> tuple[int, int] | None:
        """The read ends of the rank's stdout and stderr, once; None when there are none here."""

    def close(self) -> None: ...


class RankLink:
    """One rank's connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._decoder = FrameDecoder()
        self._ready_frames: list[bytes] = []
        self._fds: list[int] = []
        self._sending = anyio.Lock()
        self._is_closed = False

    async def send(self, frame: bytes) -> None:
        """Send a whole frame; waits while the rank does not read.

        Raises PeerError when the rank is gone.
        """
        async with self._sending:
            view = memoryview(frame)
            while view:
                view = view[await self._send_some(view) :]

    async def receive(self) -> RankEvent | None:
        """The next event; None at a clean end. Raises PeerError when the end is not clean."""
        while not self._ready_frames:
            data = await self._receive_some()
            if not data:
                if self._decoder.is_empty:
                    return None
                raise PeerError("the rank ended in the middle of a message")
            self._ready_frames = self._decoder.feed(data)
        try:
            event: RankEvent = decoded(self._ready_frames.pop(0), RankEvent)
        except PeerError as error:
            raise PeerError(f"the rank sent something that is no event: {error}") from error
        return event

    @property
    def peer(self) -> ProcessIdentity | None:
        """Who is at the other end, from the kernel and not from what it says."""
        return identity_of(peer_pid(self._connection))

    def take_output(self) -> tuple[int, int] | None:
        """The read ends of the rank's stdout and stderr, once; None when it sent none."""
        if len(self._fds) != _NUM_PIPES:
            return None
        (out_fd, err_fd), self._fds = self._fds, []
        return out_fd, err_fd

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        if not self._is_closed:
            self._is_closed = True
            anyio.notify_closing(self._connection)
            self._connection.close()

    async def _send_some(self, view: memoryview) -> int:
        while not self._is_closed:
            try:
                return self._connection.send(view[:_SEND_BYTES])
            except BlockingIOError:
                await self._until(anyio.wait_writable)
            except OSError as error:
                raise PeerError(f"the rank is gone: {error}") from error
        raise PeerError("the rank is gone")

    async def _receive_some(self) -> bytes:
        while not self._is_closed:
            try:
                data, fds, _, _ = socket.recv_fds(self._connection, _RECEIVE_BYTES, _NUM_PIPES)
            except BlockingIOError:
                await self._until(anyio.wait_readable)
            except ConnectionResetError:
                return b""
            except OSError as error:
                raise PeerError(f"the rank is gone: {error}") from error
            else:
                self._fds += fds
                return data
        return b""

    async def _until(self, wait: Callable[[socket.socket], Awaitable[None]]) -> None:
        try:
            await wait(self._connection)
        except anyio.ClosedResourceError:
            self._is_closed = True


Welcome: TypeAlias = Callable[[Hello, RankLink], Awaitable[None]]
"""Serves one link until its end; raises PeerError to turn the rank away."""


@contextmanager
def rank_socket(run_dir: Path) -> Iterator[tuple[str, socket.socket]]:
    """Listen for ranks; (the path that fits into a socket address, the listening socket).

    A rank connects by a plain path, which holds at most 107 bytes: in a deeper run directory the
    socket lives in a private temporary directory instead.
    """
    path = run_dir / SOCKET_NAME
    if len(bytes(path)) <= MAX_PATH_BYTES:
        with listen(path) as listener:
            try:
                yield str(path), listener
            finally:
                path.unlink(missing_ok=True)
        return
    with tempfile.TemporaryDirectory(prefix="libra-") as directory:
        path = Path(directory, SOCKET_NAME)
        with listen(path) as listener:
            yield str(path), listener


async def accept_ranks(listener: socket.socket, *, run_id: RunId, welcome: Welcome) -> None:
    """Accept ranks until cancelled; every link is closed when this returns."""
    listener.setblocking(False)
    async with anyio.create_task_group() as tasks:
        while True:
            await anyio.wait_readable(listener)
            try:
                connection, _ = listener.accept()
            except OSError:
                continue  # the peer was gone again
            if peer_uid(connection) != os.geteuid():
                connection.close()
                continue
            tasks.start_soon(_serve, RankLink(connection), run_id, welcome)


async def _serve(link: RankLink, run_id: RunId, welcome: Welcome) -> None:
    try:
        with anyio.move_on_after(_HELLO_WAIT_S) as waiting:
            hello = await link.receive()
        if waiting.cancelled_caught or not isinstance(hello, Hello) or hello.run_id != run_id:
            return
        await welcome(hello, link)
    except PeerError:
        return  # whoever waits for this rank misses it and says so
    finally:
        link.close()


async def frame_of(command: RankCommand) -> bytes:
    """Encode in a thread: a batch of 100 MB takes longer than the loop may stand still."""
    return await to_thread.run_sync(lambda: encode_frame(msgspec.msgpack.encode(command)))
