"""One request to one engine on behalf of a client, limited phase by phase, never sent twice.

The exception: a pooled connection that proves closed within STALE_WITHIN_S and before any byte of
an answer came. Such a request never reached the engine, and goes out once more on a fresh
connection. One that is lost later may have been worked on, and is not repeated.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from io import BytesIO
from math import inf
from types import SimpleNamespace, TracebackType
from typing import Self

import aiohttp
import anyio
import msgspec

from libra import clock
from libra.errors import PeerError
from libra.ids import InstanceId
from libra.wire.instance import INSTANCE_HEADER

POOL_IDLE_S = 3.0
"""Below the 5 s after which uvicorn under vLLM closes an idle connection."""

STALE_WITHIN_S = 1.0
"""A closed connection answers a request with a reset after one round trip."""

LARGE_BODY_BYTES = 2**20
"""From here on a body is written in pieces, so that the event loop gets its turn in between."""


class PhaseLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per phase; None waits for ever. The whole has no limit: a long answer is no fault."""

    connect_s: float = 5.0
    first_byte_s: float | None = None
    """Of a whole answer the first byte comes with the last token, so it has no limit. A server
    that hangs is found by its lack of progress and ended, which ends its calls."""

    idle_s: float | None = 300.0
    """Between two pieces of an answer; longer than a weight reload that freezes it."""


class UnreachableError(PeerError):
    """The connection could not be made: the engine has not seen the request."""


class Engine(msgspec.Struct, frozen=True):
    """Where an instance answers."""

    instance_id: InstanceId
    url: str
    """Like `http://127.0.0.1:8000` or `http://[::1]:8000`, without a trailing slash."""


class Upstream:
    """Connections to all engines. An asynchronous context manager, on asyncio."""

    def __init__(self, limits: PhaseLimits) -> None:
        self._limits = limits

    async def __aenter__(self) -> Self:
        self._pooled = _session(keepalive_timeout=POOL_IDLE_S)
        self._fresh = _session(force_close=True)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._pooled.close()
            await self._fresh.close()

    @asynccontextmanager
    async def ask(
        self,
        engine: Engine,
        path: str,
        *,
        body: bytes,
        headers: Mapping[str, str],
        patience: AbstractContextManager[object],
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The engine's answer, its body still to be read. Closed, and so aborted, with the block.

        The beginning of the answer is awaited within `patience`, which may end the wait. Raises
        UnreachableError, or PeerError when no answer began.
        """
        with patience:
            response = await self._send(engine, path, body=body, headers=headers)
        try:
            _check_identity(engine, response)
            yield response
        finally:
            # Gives the connection back after a whole body, else cuts it: the engine stops.
            response.close()

    async def pour(
        self,
        engine: Engine,
        response: aiohttp.ClientResponse,
        sink: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Hand the body to `sink` piece by piece as it comes.

        Raises PeerError when the engine breaks off or idles too long; what `sink` raises passes.
        The time that `sink` takes is not the engine's.
        """
        idle_s = inf if self._limits.idle_s is None else self._limits.idle_s
        with anyio.move_on_after(None) as scope:
            while True:
                scope.deadline = clock.now() + idle_s
                piece = await _next_piece(engine, response)
                scope.deadline = inf
                if not piece:
                    return
                await sink(piece)
        raise PeerError(f"{engine.instance_id} was silent for {idle_s} s within an answer")

    async def _send(
        self, engine: Engine, path: str, *, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        trace = SimpleNamespace(is_reused=False)
        began = clock.now()
        try:
            return await self._post(self._pooled, engine.url + path, body, headers, trace)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            raise UnreachableError(f"{engine.instance_id} at {engine.url}: {exc!r}") from exc
        except TimeoutError as exc:  # an OSError too, but no closed connection
            limit_s = self._limits.first_byte_s
            raise PeerError(f"{engine.instance_id} was silent for {limit_s} s") from exc
        except (aiohttp.ClientError, OSError) as exc:
            if not trace.is_reused or clock.now() > began + STALE_WITHIN_S:
                raise PeerError(f"{engine.instance_id} did not answer: {exc!r}") from exc
        return await self._send_again(engine, path, body, headers)

    async def _send_again(
        self, engine: Engine, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        trace = SimpleNamespace(is_reused=False)
        try:
            return await self._post(self._fresh, engine.url + path, body, headers, trace)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            raise UnreachableError(f"{engine.instance_id} at {engine.url}: {exc!r}") from exc
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            raise PeerError(f"{engine.instance_id} did not answer: {exc!r}") from exc

    async def _post(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        trace: SimpleNamespace,
    ) -> aiohttp.ClientResponse:
        limit_s = self._limits.first_byte_s
        with nullcontext() if limit_s is None else anyio.fail_after(limit_s):
            return await session.post(
                url,
                data=body if len(body) < LARGE_BODY_BYTES else BytesIO(body),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_s),
                trace_request_ctx=trace,
                allow_redirects=False,
            )


async def _next_piece(engine: Engine, response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.content.readany()
    except (aiohttp.ClientError, OSError) as exc:
        raise PeerError(f"{engine.instance_id} broke off its answer: {exc!r}") from exc


def _session(
    *, keepalive_timeout: float | None = None, force_close: bool = False
) -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    if force_close:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
    else:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive_timeout)
    # trust_env off: a proxy variable must not send loopback calls elsewhere. Bodies are passed on
    # as they are, compressed or not.
    return aiohttp.ClientSession(
        connector=connector, trace_configs=[trace], trust_env=False, auto_decompress=False
    )


async def _note_reuse(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    context.trace_request_ctx.is_reused = True


def _check_identity(engine: Engine, response: aiohttp.ClientResponse) -> None:
    """Refuse a stranger on the port. Engines that were not started by us tell no name."""
    answered = response.headers.get(INSTANCE_HEADER)
    if answered is not None and answered != engine.instance_id:
        raise PeerError(f"{engine.url} is {answered} and not {engine.instance_id}")
