"""The gate through which every request enters the engine; it is closed while weights change."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio

from libra.errors import RefusedError
from libra.wire.instance import WEIGHTS_UNKNOWN


class Gate:
    """Open, closed (who comes waits) or refusing (who comes or waits is turned away)."""

    def __init__(self) -> None:
        self._refusal: str | None = None
        self._num_entering = 0
        self._moved = anyio.Event()
        self._is_open = True

    @property
    def refusal(self) -> str | None:
        """Why nobody is let in, or None when they are or will be."""
        return self._refusal

    @asynccontextmanager
    async def entry(self) -> AsyncGenerator[None]:
        """Wait for the gate; the body hands the request over. Raises RefusedError."""
        while not self._is_open:
            if self._refusal is not None:
                raise RefusedError(self._refusal)
            await self._moved.wait()
        self._num_entering += 1
        try:
            yield
        finally:
            self._num_entering -= 1
            self._announce()

    async def close(self) -> None:
        """Let nobody in any more and return when those on the threshold are through.

        A refusing gate goes on refusing.
        """
        self._is_open = False
        while self._num_entering:
            await self._moved.wait()

    def open(self) -> None:
        self._is_open = True
        self._refusal = None
        self._announce()

    def refuse(self, reason: str) -> None:
        self._is_open = False
        self._refusal = f"{WEIGHTS_UNKNOWN}: {reason}"
        self._announce()

    def _announce(self) -> None:
        moved, self._moved = self._moved, anyio.Event()
        moved.set()
