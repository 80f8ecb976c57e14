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
        self._waiting: deque[T] = deque()
        self._num_put = self._num_passed_on = 0
        self._wake = anyio.Event()
        self._moved = anyio.Event()

    def put(self, *events: T) -> None:
        self._waiting.extend(events)
        self._num_put += len(events)
        self._wake.set()

    async def until_passed_on(self) -> None:
        """Wait until the listener has had everything that was put in before."""
        number = self._num_put
        while self._num_passed_on < number:
            await self._moved.wait()

    async def run(self) -> Never:
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            while self._waiting:
                await self._post(self._waiting.popleft())
                self._num_passed_on += 1
                self._moved.set()
                self._moved = anyio.Event()
