"""What waits to be sent on one connection, sent in order by one task."""

from collections import deque
from collections.abc import Callable

import anyio
import msgspec

from libra.errors import PeerError
from libra.wire.node import Envelope
from libra_supervisor.nodes.connection import Connection


class Outgoing:
    """Of one connection. `run` is its task; the rest may be called any time."""

    def __init__(self, connection: Connection, bare: Callable[[], Envelope]) -> None:
        """`bare` makes the sign of life that is sent when there is nothing else to say."""
        self._connection = connection
        self._bare = bare
        self._waiting: deque[Envelope] = deque()
        self._is_owed = False
        self._wake = anyio.Event()

    def add(self, *envelopes: Envelope) -> None:
        self._waiting.extend(envelopes)
        self._wake.set()

    def owe(self) -> None:
        """Have what came in acknowledged; many at once by one message."""
        self._is_owed = True
        self._wake.set()

    async def run(self) -> None:
        """Send until the connection ends. Raises PeerError then."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            while self._waiting:
                await self._send(self._waiting.popleft())
            if self._is_owed:
                # Numbered messages carry the acknowledgement of the moment they were made.
                self._is_owed = False
                await self._send(self._bare())

    async def run_within(self, scope: anyio.CancelScope) -> None:
        """Send until the connection ends, which is then over for both directions."""
        try:
            await self.run()
        except PeerError:
            scope.cancel()

    async def _send(self, envelope: Envelope) -> None:
        await self._connection.send(msgspec.msgpack.encode(envelope))
