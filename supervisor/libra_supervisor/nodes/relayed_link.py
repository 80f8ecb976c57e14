"""A rank's control socket on another node, over the link of its node."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio

from libra.errors import PeerError
from libra.wire import node as wire
from libra.wire.decoding import decoded
from libra.wire.node import MAX_PIECE_BYTES, NodeCommand
from libra.wire.rank import RankEvent
from libra_supervisor.process.identity import ProcessIdentity

Tell: TypeAlias = Callable[[NodeCommand], None]
"""Says it to the node, or drops it when that has let go of everything."""

Stream: TypeAlias = Callable[[NodeCommand], Awaitable[None]]
"""Says it when there is room; raises PeerError when the node is no member."""


class RelayedLink:
    """A rank's control socket on another node: its events, and bytes for it, over the link."""

    def __init__(self, number: int, *, tell: Tell, stream: Stream) -> None:
        self._number = number
        self._tell = tell
        self._stream = stream
        self._send, self._receive = anyio.create_memory_object_stream[bytes](float("inf"))
        self._error = ""
        self._is_over = False

    async def send(self, frame: bytes) -> None:
        """In pieces, so that others find their way between. Raises PeerError when it is gone."""
        for first in range(0, len(frame), MAX_PIECE_BYTES):
            if self._is_over:
                raise PeerError(self._error or "the rank is gone")
            piece = frame[first : first + MAX_PIECE_BYTES]
            await self._stream(wire.ToRank(self._number, piece))

    async def receive(self) -> RankEvent | None:
        """The next event; None at a clean end. Raises PeerError when the end is not clean."""
        try:
            body = await self._receive.receive()
        except anyio.EndOfStream:
            if self._error:
                raise PeerError(self._error) from None
            return None
        try:
            event: RankEvent = decoded(body, RankEvent)
        except PeerError as error:
            raise PeerError(f"the rank sent something that is no event: {error}") from error
        return event

    @property
    def peer(self) -> ProcessIdentity | None:
        """None: it is no process of this machine; the follower knows it."""
        return None

    def take_output(self) -> tuple[int, int] | None:
        return None

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._tell(wire.DropRank(self._number))
        self._send.close()
        self._receive.close()

    def on_event(self, event: bytes) -> None:
        if not self._is_over:
            self._send.send_nowait(event)

    def on_end(self, error: str) -> None:
        self._is_over, self._error = True, error
        self._send.close()
