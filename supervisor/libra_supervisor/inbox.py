"""The one way news reaches the loop: a bounded stream of events."""

from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

import anyio

CAPACITY = 4096
"""Beyond it posters wait. A full inbox means the loop is slower than the news, never a loss."""

T = TypeVar("T")


class Inbox(Generic[T]):
    """Many posters, one reader."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[T](capacity)

    @property
    def depth(self) -> int:
        """Events that wait."""
        return self._receive.statistics().current_buffer_used

    async def post(self, event: T) -> None:
        """Add an event; waits while the inbox is full. After `close` events are dropped."""
        try:
            await self._send.send(event)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            # The run is over; what still happens concerns nobody.
            return

    def post_nowait(self, event: T) -> bool:
        """Add an event from a signal handler; False when the inbox is full or closed."""
        try:
            self._send.send_nowait(event)
        except (anyio.WouldBlock, anyio.ClosedResourceError, anyio.BrokenResourceError):
            return False
        return True

    async def events(self) -> AsyncGenerator[T, None]:
        async for event in self._receive:
            yield event

    def close(self) -> None:
        self._receive.close()
        self._send.close()
