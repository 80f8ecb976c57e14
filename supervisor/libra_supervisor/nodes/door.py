"""Who comes to the leader's port and has not shown the token: few at a time, and not for long."""

import asyncio
import logging
import socket
import ssl
from collections import deque
from typing import Final

import anyio
import anyio.abc
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from libra import clock
from libra.tracing.log import get_log

PROOF_WAIT_S: Final = 10.0
"""From the first packet, a TLS handshake included."""

MOST_STRANGERS: Final = 64
_PAUSE_S: Final = 0.1
_LINE_PERIOD_S: Final = 10.0
_SERVER_LOG: Final = "aiohttp.server"

_NO_TLS: Final = "it speaks TLS, which needs node_tls_cert and node_tls_key here"
_NO_TLS_THERE: Final = "it speaks no TLS; a follower needs node_tls_ca"
_NO_HANDSHAKE: Final = (
    "it left the TLS handshake: a follower does where its node_tls_ca did not sign node_tls_cert, "
    "or that names another host than nodes does"
)
_PLAIN: Final = ("HTTP_REQUEST", "WRONG_VERSION_NUMBER")
"""What OpenSSL calls a peer without TLS."""

_log = get_log()


class StrangersLine(logging.Handler):
    """One line now and then for what comes to the port and is no follower's.

    As a handler: of what the HTTP server has to say of it. Anything else goes where it would.
    """

    def __init__(self) -> None:
        super().__init__()
        self._not_before = 0.0
        self._num_unsaid = 0

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            no_request = f"it sent no request: {type(error).__name__}"
            self.say(_NO_TLS if _begins_tls(error) else no_request)
        elif record.levelno > logging.DEBUG:
            logging.getLogger(_SERVER_LOG).handle(record)

    def say(self, why: str) -> None:
        now = clock.now()
        if now < self._not_before:
            self._num_unsaid += 1
            return
        _log.warning("node_port_stranger", why=why, others=self._num_unsaid)
        self._not_before, self._num_unsaid = now + _LINE_PERIOD_S, 0

    def logger(self) -> logging.Logger:
        """For the HTTP server."""
        logger = logging.Logger(_SERVER_LOG, logging.DEBUG)  # noqa: LOG001 - of this port alone
        logger.addHandler(self)
        return logger


class _Stranger:
    """A connection whose other end has proved nothing yet."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope(deadline=clock.now() + PROOF_WAIT_S)
        self.proved = anyio.Event()
        self.protocol: asyncio.BaseProtocol | None = None
        self.transport: asyncio.Transport | None = None

    @property
    def has_left(self) -> bool:
        return self.transport is not None and self.transport.is_closing()


class Door:
    """Hands connections to `server`. One that is not admitted in time is closed.

    When too many wait, the one that has waited longest makes room: who has the token shows it
    within a round trip, so a crowd cannot keep it out by mere presence.
    """

    def __init__(
        self,
        server: web.Server,
        *,
        tls: ssl.SSLContext | None,
        most_strangers: int = MOST_STRANGERS,
        line: StrangersLine | None = None,
    ) -> None:
        self._server = server
        self._line = line or StrangersLine()
        self._tls = tls
        self._most_strangers = most_strangers
        self._waiting: deque[_Stranger] = deque()
        self._of_protocol: dict[asyncio.BaseProtocol, _Stranger] = {}
        self._is_crowded = False

    @property
    def num_strangers(self) -> int:
        return len(self._waiting)

    def admit(self, request: web.Request) -> None:
        """The other end of the request's connection has shown the token."""
        stranger = self._of_protocol.get(request.protocol)
        if stranger is not None:
            stranger.proved.set()

    async def accept(self, listener: socket.socket) -> None:
        """Take connections from a listening socket; until cancelled."""
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:
                    # It went away before it was taken, or this process has too many files open.
                    _log.warning("node_connection_not_taken", why=str(error))
                    await clock.sleep(_PAUSE_S)
                    continue
                self._make_room()
                stranger = _Stranger()
                self._waiting.append(stranger)
                tasks.start_soon(self._watch, stranger, connection)

    def _make_room(self) -> None:
        is_full = len(self._waiting) >= self._most_strangers
        if is_full:
            gone = next((it for it in self._waiting if it.has_left), self._waiting[0])
            self._waiting.remove(gone)
            gone.scope.cancel()
        if is_full and not self._is_crowded:
            _log.warning("node_port_crowded", num_strangers=len(self._waiting))
        self._is_crowded = is_full

    async def _watch(self, stranger: _Stranger, connection: socket.socket) -> None:
        def protocol() -> asyncio.BaseProtocol:
            # Known before its first byte is read.
            stranger.protocol = made = self._server()
            self._of_protocol[made] = stranger
            return made

        try:
            with stranger.scope:
                stranger.transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                    protocol, connection, ssl=self._tls
                )
                await stranger.proved.wait()
        except OSError as error:
            # Its handshake came to nothing.
            if self._tls is not None:
                is_plain = isinstance(error, ssl.SSLError) and error.reason in _PLAIN
                self._line.say(_NO_TLS_THERE if is_plain else _NO_HANDSHAKE)
            connection.close()
        finally:
            self._forget(stranger)
            if stranger.transport is not None and not stranger.proved.is_set():
                stranger.transport.abort()

    def _forget(self, stranger: _Stranger) -> None:
        if stranger in self._waiting:
            self._waiting.remove(stranger)
        if stranger.protocol is not None:
            del self._of_protocol[stranger.protocol]


def _begins_tls(error: HttpProcessingError) -> bool:
    """Whether what was no request is the beginning of a TLS handshake."""
    return "HTTPS traffic" in error.message
