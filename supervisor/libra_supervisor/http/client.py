"""Connections to any number of servers, kept open for a while and used again.

No proxies, redirects, cookies or compression: a request goes where it is sent, and what comes
back is handed on as it is.
"""

import asyncio
from functools import partial
from socket import SOCK_STREAM
from types import TracebackType
from typing import Self

import aiohappyeyeballs
import anyio

from libra import clock
from libra_supervisor.http.answer import Answer
from libra_supervisor.http.connection import Connection
from libra_supervisor.http.errors import LostError, NotConnectedError
from libra_supervisor.http.request import Origin, Request, head_of, origin_of

SECOND_ADDRESS_AFTER_S = 0.25
"""A name may have addresses of which the first leads nowhere (RFC 8305)."""


class HttpClient:
    """An asynchronous context manager, on asyncio."""

    def __init__(self, *, idle_s: float) -> None:
        """`idle_s` after an answer its connection is closed, unless it was used again."""
        self._idle_s = idle_s
        self._open: set[Connection] = set()
        self._idle: dict[Origin, dict[Connection, asyncio.TimerHandle]] = {}

    @property
    def num_busy(self) -> int:
        """Connections that carry a request."""
        return sum(connection.is_busy for connection in self._open)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for connection in tuple(self._open):
            connection.lose("the client was closed")
        with anyio.CancelScope(shield=True):
            await clock.sleep(0)  # the event loop closes the sockets

    async def ask(self, request: Request, *, is_fresh: bool = False) -> Answer:
        """Send a request and return when the head of its answer is there.

        `is_fresh` asks for a new connection. Raises NotConnectedError or LostError.
        """
        origin = origin_of(request.base_url)
        head = head_of(request, origin)
        idle = None if is_fresh else self._idle_connection(origin)
        connection = idle or await self._connect(origin, request.connect_s)
        try:
            return await connection.ask(head, request.body or b"")
        except LostError as exc:
            exc.is_stale = idle is not None and not connection.has_heard
            raise

    def _idle_connection(self, origin: Origin) -> Connection | None:
        idle = self._idle.get(origin, {})
        while idle:
            connection, closing = idle.popitem()
            closing.cancel()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, origin: Origin, within_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            with anyio.fail_after(within_s):
                addresses = await loop.getaddrinfo(origin.host, origin.port, type=SOCK_STREAM)
                # Not left to the loop: uvloop's tries one address after the other.
                socket = await aiohappyeyeballs.start_connection(
                    addresses, happy_eyeballs_delay=SECOND_ADDRESS_AFTER_S, loop=loop
                )
                _, connection = await loop.create_connection(
                    lambda: Connection(partial(self._keep, origin), partial(self._drop, origin)),
                    sock=socket,
                    ssl=origin.is_encrypted or None,
                    server_hostname=origin.host if origin.is_encrypted else None,
                )
        except OSError as exc:
            raise NotConnectedError(repr(exc)) from exc
        self._open.add(connection)
        return connection

    def _keep(self, origin: Origin, connection: Connection) -> None:
        closing = asyncio.get_running_loop().call_later(self._idle_s, connection.cut)
        self._idle.setdefault(origin, {})[connection] = closing

    def _drop(self, origin: Origin, connection: Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(origin, {})
        closing = idle.pop(connection, None)
        if closing is not None:
            closing.cancel()
        if not idle:
            self._idle.pop(origin, None)
