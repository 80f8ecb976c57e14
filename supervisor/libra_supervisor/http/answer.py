"""One answer: its head, and its body piece by piece as it comes."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from libra_supervisor.http.errors import LostError

MAX_BUFFERED_BYTES = 2**17
"""Of a body that nobody reads: from here on the server has to wait."""


class Source(Protocol):
    """The connection that an answer comes over."""

    def hold(self) -> None: ...
    def go_on(self) -> None: ...
    def cut(self) -> None: ...


class Answer:
    """What a server said. Read it to its end or close it; one task may do so at a time."""

    def __init__(self, source: Source) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """By name in small letters; of several with one name the first."""

        self.has_head = False
        self._source = source
        self._pieces: list[bytes] = []
        self._num_buffered = 0
        self._is_whole = False
        self._error: LostError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def header(self, name: str) -> str | None:
        return self.headers.get(name.lower())

    async def until_head(self, or_until: Callable[[], bool] = lambda: False) -> None:
        """Wait for `status` and `headers`, or for what `wake` announces. Raises LostError."""
        while not self.has_head:
            self._raise_if_lost()
            if or_until():
                return
            await self._news()

    @property
    def is_waited_for(self) -> bool:
        """Whether `next_piece` would wait; a limit is worth setting only then."""
        return not self._pieces and not self._is_whole

    async def next_piece(self) -> bytes:
        """All that has come since the last call; empty at the end.

        Raises LostError when the connection ended first, after what had come was handed out.
        """
        while self.is_waited_for:
            self._raise_if_lost()
            await self._news()
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._num_buffered > MAX_BUFFERED_BYTES and not self._is_whole:
            self._source.go_on()
        self._num_buffered = 0
        return piece

    def close(self) -> None:
        """Cut the connection unless the whole answer came: then it has gone back already."""
        if not self._is_whole:
            self._error = LostError("the answer was closed by its reader")
            self._source.cut()

    def on_head(self, status: int) -> None:
        self.status, self.has_head = status, True
        self.wake()

    def on_piece(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._num_buffered += len(piece)
        if self._num_buffered > MAX_BUFFERED_BYTES:
            self._source.hold()
        self.wake()

    def on_end(self) -> None:
        self._is_whole = True
        self.wake()

    def on_lost(self, error: LostError) -> None:
        self._error = error
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _raise_if_lost(self) -> None:
        if self._error is not None:
            raise self._error

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
