"""The link over real sockets: a WebSocket of the leader's, dialled by the followers.

The proxy of the environment is ignored: nodes reach each other directly or not at all.
"""

import ipaddress
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
import anyio
from aiohttp import web
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.stapled import MultiListener

from libra.errors import InvariantError, PeerError, SiteError, ungrouped
from libra.wire.bearer import has_bearer
from libra.wire.node import MAX_ENVELOPE_BYTES, NODE_PATH
from libra_supervisor.nodes.connection import Connection
from libra_supervisor.nodes.door import MOST_STRANGERS, Door, StrangersLine

_CONNECT_S: Final = 5.0
_CLOSE_S: Final = 1.0
_UNAUTHORIZED: Final = 401
_BACKLOG: Final = 1024
_OTHER_NAME: Final = (62, 64)
"""OpenSSL's codes for a certificate that names another host or address."""

_CLOSED: Final = (
    aiohttp.WSMsgType.CLOSE,
    aiohttp.WSMsgType.CLOSING,
    aiohttp.WSMsgType.CLOSED,
)

_Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


class SocketConnection:
    """`Connection` over either end of a WebSocket."""

    def __init__(self, socket: _Socket) -> None:
        self._socket = socket

    async def send(self, message: bytes) -> None:
        try:
            await self._socket.send_bytes(message)
        except (OSError, aiohttp.ClientError) as error:
            raise PeerError(f"the other node is gone: {error}") from error

    async def receive(self) -> bytes | None:
        message = await self._socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            data: bytes = message.data
            return data
        if message.type in _CLOSED:
            return None
        if message.type is aiohttp.WSMsgType.ERROR:
            raise PeerError(f"the connection broke: {message.data}")
        raise PeerError(f"the other node sent {message.type.name}, not a binary message")


def leader_tls(cert: str, key: str, authority: str = "") -> ssl.SSLContext | None:
    """What the leader shows; None without a certificate. Raises SiteError.

    `authority`: followers of the same configuration would take nothing unencrypted.
    """
    if not cert:
        if authority:
            raise SiteError(
                "node_tls_ca is set, so the leader needs node_tls_cert and node_tls_key"
            )
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise SiteError(f"node_tls_cert {cert} and node_tls_key cannot be used: {error}") from error
    return context


def follower_tls(cert: str, authority: str) -> ssl.SSLContext | None:
    """What a follower accepts; None for a link without TLS. Raises SiteError.

    TLS it is when either is given: a follower needs no certificate of its own.
    """
    if not (cert or authority):
        return None
    try:
        return ssl.create_default_context(cafile=authority or None)
    except (OSError, ssl.SSLError) as error:
        raise SiteError(f"node_tls_ca {authority} cannot be used: {error}") from error


@asynccontextmanager
async def node_listener(
    serve: Callable[[Connection], Awaitable[None]],
    *,
    host: str,
    port: int,
    token: str,
    tls: ssl.SSLContext | None = None,
    num_followers: int = 0,
) -> AsyncIterator[int]:
    """Listen for followers while the block runs; yields the port.

    `num_followers` may all dial at once. Raises SiteError when it cannot be bound.
    """

    async def link(request: web.Request) -> web.StreamResponse:
        if not has_bearer(request.headers.get("Authorization", ""), token):
            return web.Response(status=_UNAUTHORIZED, text="this needs the token of the nodes\n")
        door.admit(request)
        socket = web.WebSocketResponse(
            timeout=_CLOSE_S, max_msg_size=MAX_ENVELOPE_BYTES, compress=False
        )
        await socket.prepare(request)
        await serve(SocketConnection(socket))
        await socket.close()
        return socket

    application = web.Application()
    application.add_routes([web.get(NODE_PATH, link)])
    line = StrangersLine()
    runner = web.AppRunner(
        application,
        access_log=None,
        logger=line.logger(),
        handle_signals=False,
        shutdown_timeout=_CLOSE_S,
        handler_cancellation=True,
    )
    listener = await _listening(host, port)
    sockets = [
        it.extra(SocketAttribute.raw_socket)  # noqa: S610 - anyio's, no query of Django's
        for it in listener.listeners
    ]
    await runner.setup()
    most = MOST_STRANGERS + num_followers
    door = Door(_server_of(runner), tls=tls, most_strangers=most, line=line)
    try:
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                for each in sockets:
                    tasks.start_soon(door.accept, each)
                yield listener.extra(SocketAttribute.local_port)  # noqa: S610 - as above
                tasks.cancel_scope.cancel()
    finally:
        await listener.aclose()
        await runner.cleanup()


async def _listening(host: str, port: int) -> MultiListener[SocketStream]:
    """At every address of the host."""
    try:
        return await anyio.create_tcp_listener(local_host=host, local_port=port, backlog=_BACKLOG)
    except OSError as error:
        raise SiteError(
            f"the port for other nodes, {port} on {host}, cannot be used: "
            f"{error.strerror or error}; see nodes and node_port"
        ) from error


def _server_of(runner: web.AppRunner) -> web.Server:
    if runner.server is None:
        raise InvariantError("the server of the nodes' port was not set up")
    return runner.server


@asynccontextmanager
async def dialled(
    host: str, port: int, *, token: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Connection]:
    """A connection to the leader while the block runs. Raises PeerError when there is none."""
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://{_in_url(host)}:{port}{NODE_PATH}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    async with aiohttp.ClientSession(trust_env=False, timeout=timeout) as session:
        try:
            socket = await session.ws_connect(
                url,
                headers={"Authorization": f"Bearer {token}"},
                ssl=True if tls is None else tls,
                max_msg_size=MAX_ENVELOPE_BYTES,
                timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
            )
        except aiohttp.WSServerHandshakeError as error:
            raise PeerError(_why_refused(host, port, error)) from error
        except (OSError, aiohttp.ClientError) as error:
            raise PeerError(_why_nobody(f"{host} port {port}", error)) from error
        try:
            yield SocketConnection(socket)
        finally:
            await socket.close()


def _why_nobody(where: str, error: Exception) -> str:
    """What went wrong before anybody answered as a leader does."""
    match error:
        case aiohttp.ClientConnectorCertificateError():
            found = error.certificate_error
            if isinstance(found, ssl.CertificateError) and found.verify_code in _OTHER_NAME:
                return (
                    f"the certificate of the leader at {where} names another host than nodes does"
                )
            why = getattr(found, "verify_message", found)
            return f"node_tls_ca did not sign the certificate of the leader at {where}: {why}"
        case aiohttp.ClientConnectorSSLError():
            return (
                f"whoever answers at {where} speaks no TLS: a leader needs node_tls_cert and "
                f"node_tls_key where followers have node_tls_ca ({error.os_error})"
            )
        case aiohttp.ServerDisconnectedError() | ConnectionResetError():
            return (
                f"whoever answers at {where} closed the connection: a leader with node_tls_cert "
                "does so where a follower has no node_tls_ca"
            )
        case aiohttp.ClientConnectorError():
            number = error.os_error.errno
            why = os.strerror(number) if number and number > 0 else str(error.os_error)
            return f"no leader at {where}: {why}"
        case aiohttp.ConnectionTimeoutError():
            return f"no leader at {where}: no answer within {_CONNECT_S:g} s"
        case _:
            return f"no leader at {where}: {error}"


def _why_refused(host: str, port: int, error: aiohttp.WSServerHandshakeError) -> str:
    if error.status == _UNAUTHORIZED:
        return f"the leader at {host} port {port} has another token of the nodes"
    return f"whoever answers at {host} port {port} is no leader: {error.status} {error.message}"


def _in_url(host: str) -> str:
    try:
        is_ipv6 = ipaddress.ip_address(host.partition("%")[0]).version == 6  # noqa: PLR2004
    except ValueError:
        return host
    return f"[{host}]" if is_ipv6 else host
