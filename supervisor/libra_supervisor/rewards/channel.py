"""Framed messages over one Unix socket, from inside a task."""

import socket

import anyio

from libra.errors import PeerError
from libra.wire.framing import FrameDecoder, encode_frame

_CHUNK_BYTES = 1 << 16


class Channel:
    """One connection to one worker. One task at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._decoder = FrameDecoder()
        self._frames: list[bytes] = []

    @property
    def is_quiet(self) -> bool:
        """True when nothing has arrived unasked: neither data nor the end of the stream."""
        if self._frames or not self._decoder.is_empty:
            return False
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def send(self, payload: bytes) -> None:
        """Send one frame. Raises PeerError when the worker is gone."""
        left = memoryview(encode_frame(payload))
        while left:
            try:
                left = left[self._connection.send(left) :]
            except BlockingIOError:
                await anyio.wait_writable(self._connection)
            except OSError as error:
                raise PeerError(f"the connection was lost: {error.strerror}") from error

    async def receive(self) -> bytes:
        """Return the next frame. Raises PeerError at the end of the stream."""
        while not self._frames:
            try:
                chunk = self._connection.recv(_CHUNK_BYTES)
            except BlockingIOError:
                await anyio.wait_readable(self._connection)
                continue
            except OSError as error:
                raise PeerError(f"the connection was lost: {error.strerror}") from error
            if not chunk:
                raise PeerError("the connection was closed")
            self._frames += self._decoder.feed(chunk)
        return self._frames.pop(0)

    def close(self) -> None:
        self._connection.close()


async def accepted(listener: socket.socket) -> socket.socket:
    """Wait for the next connection to a listening socket that does not block."""
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            await anyio.wait_readable(listener)
        else:
            return connection
