"""Events of many connections on their way to one listener, in one order.

An event that was taken in is passed on, whatever becomes of the connection that it came by.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Never, TypeVar

import anyio

T = TypeVar("T")


class Postbox(Generic[T]):
    """Passes on what is put in while `run` is alive."""

    def __init__(self, post: Callable[[T], Awaitable[None]]) -> None:
        self._post = post
        self._waiting: deque[tuple[tuple[T, ...], anyio.Event | None]] = deque()
        """Events, and who waits for all up to here."""

        self._is_posting = False
        self._wake = anyio.Event()

    @property
    def depth(self) -> int:
        """How much waits."""
        return len(self._waiting)

    def put(self, *events: T) -> None:
        if events:
            self._waiting.append((events, None))
            self._wake.set()

    async def until_passed_on(self) -> None:
        """Wait until the listener has had everything that was put in before."""
        if self._waiting or self._is_posting:
            reached = anyio.Event()
            self._waiting.append(((), reached))
            self._wake.set()
            await reached.wait()

    async def run(self) -> Never:
        while True:
            await self._wake.wait()
            self._wake, self._is_posting = anyio.Event(), True
            while self._waiting:
                events, reached = self._waiting.popleft()
                for event in events:
                    await self._post(event)
                if reached is not None:
                    reached.set()
            self._is_posting = False
