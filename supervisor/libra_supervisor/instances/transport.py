"""One HTTP call to one instance: limits for each phase, and foreign errors mapped once.

What went wrong, by whom it is to be answered for:

* PeerError: the instance did not answer, or wrongly (connection lost, time-out, 5xx).
* OverloadedError: it is healthy and full (429, 503): back off, do not blame it.
* RefusedError: it holds no known weights and serves nothing until a reload succeeds.
* RejectedError: the request itself is wrong (other 4xx); no instance is to blame.
"""

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from math import inf
from types import SimpleNamespace, TracebackType
from typing import Self

import aiohttp
import anyio
import msgspec

from libra import clock
from libra.errors import LibraError, OverloadedError, PeerError, RefusedError, RejectedError
from libra.ids import InstanceId
from libra.wire.instance import INSTANCE_HEADER, WEIGHTS_UNKNOWN

# uvicorn under vLLM closes an idle connection after 5 s; a shorter pool life loses fewer races.
POOL_IDLE_S = 3.0

OK = 200
TIMED_OUT = 408
TOO_MANY = 429
UNAVAILABLE = 503
CLIENT_FAULTS = range(400, 500)

# vLLM answers 400 when its own logits are NaN: then the request is not at fault.
NOT_A_NUMBER = "Out of range float values"


class CallLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds for each phase of a call; None waits for ever."""

    connect_s: float = 5.0
    first_byte_s: float | None = None
    idle_s: float | None = 60.0
    whole_s: float | None = None
    """From the beginning to the last byte: what trickles ends too."""

    max_bytes: int | None = None
    """Of the answer."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    doing: str
    """Completes the sentence "<instance> did not answer while ..."."""

    limits: CallLimits
    body: bytes | None = None
    headers: dict[str, str] = {}
    is_resent_when_stale: bool = False
    """Send it once more when a pooled connection proves closed before any byte of an answer."""


class ConnectionLostError(PeerError):
    """The connection ended before the first byte of an answer."""


class InstanceTransport:
    """Connections to one instance. An asynchronous context manager, on asyncio.

    Cancelling a call closes its connection; vLLM notices and stops generating.
    """

    def __init__(self, instance_id: InstanceId, base_url: str) -> None:
        self.instance_id = instance_id
        self._base_url = base_url.rstrip("/")

    async def __aenter__(self) -> Self:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        # trust_env off: a proxy variable must not send loopback calls elsewhere.
        self._pooled = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_IDLE_S),
            trace_configs=[trace],
            trust_env=False,
        )
        self._unpooled = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), trust_env=False
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._pooled.close()
            await self._unpooled.close()

    async def call(self, call: Call) -> bytes:
        """Return the body of a 200 answer; everything else is one of the errors named above."""
        trace = SimpleNamespace(is_reused=False)
        try:
            return await self._send(self._pooled, call, trace)
        except ConnectionLostError:
            if not (call.is_resent_when_stale and trace.is_reused):
                raise
        return await self._send(self._unpooled, call, trace)

    async def _send(
        self, session: aiohttp.ClientSession, call: Call, trace: SimpleNamespace
    ) -> bytes:
        end_at = clock.now() + _or_ever(call.limits.whole_s)
        async with self._answer(session, call, trace, end_at=end_at) as response:
            content = await self._body(response, call, end_at=end_at)
        self._check_identity(response, call)
        if response.status != OK:
            raise self._error_of(response, content, call)
        return content

    @asynccontextmanager
    async def _answer(
        self,
        session: aiohttp.ClientSession,
        call: Call,
        trace: SimpleNamespace,
        *,
        end_at: float,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=call.limits.connect_s)
        in_s = min(end_at - clock.now(), _or_ever(call.limits.first_byte_s))
        with self._as_connection_lost(call), anyio.fail_after(in_s):
            response = await session.request(
                call.method,
                self._base_url + call.path,
                data=call.body,
                headers={"Content-Type": "application/json"} | call.headers,
                timeout=limits,
                trace_request_ctx=trace,
                allow_redirects=False,
            )
        try:
            yield response
        finally:
            # Closes the connection unless the whole body was read; then it went back already.
            response.close()

    async def _body(self, response: aiohttp.ClientResponse, call: Call, *, end_at: float) -> bytes:
        content, idle_s = bytearray(), _or_ever(call.limits.idle_s)
        max_bytes = _or_ever(call.limits.max_bytes)
        try:
            with anyio.fail_after(None) as scope:
                while True:
                    scope.deadline = min(end_at, clock.now() + idle_s)
                    chunk = await response.content.readany()
                    if not chunk:
                        return bytes(content)
                    content += chunk
                    if len(content) > max_bytes:
                        raise PeerError(
                            f"{self.instance_id} gave over {max_bytes} bytes while {call.doing}"
                        )
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            raise PeerError(
                f"{self.instance_id} broke off its answer after {len(content)} bytes "
                f"while {call.doing}: {exc!r}"
            ) from exc

    @contextmanager
    def _as_connection_lost(self, call: Call) -> Generator[None]:
        try:
            yield
        except (aiohttp.ClientConnectorError, TimeoutError) as exc:
            raise PeerError(f"{self._did_not_answer(call)}: {exc!r}") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise ConnectionLostError(f"{self._did_not_answer(call)}: {exc!r}") from exc

    def _did_not_answer(self, call: Call) -> str:
        return f"{self.instance_id} at {self._base_url} did not answer while {call.doing}"

    def _check_identity(self, response: aiohttp.ClientResponse, call: Call) -> None:
        answered = response.headers.get(INSTANCE_HEADER)
        if answered != self.instance_id:
            raise PeerError(
                f"{self._base_url} belongs to {answered or 'no instance of ours'} and not to "
                f"{self.instance_id}, found while {call.doing}"
            )

    def _error_of(self, response: aiohttp.ClientResponse, content: bytes, call: Call) -> LibraError:
        reason = error_message(content)
        said = f"{self.instance_id} answered {response.status} while {call.doing}: {reason}"
        if response.status == UNAVAILABLE and reason.startswith(WEIGHTS_UNKNOWN):
            return RefusedError(said)
        if response.status in {TOO_MANY, UNAVAILABLE}:
            return OverloadedError(said)
        is_caller_fault = response.status in CLIENT_FAULTS and response.status != TIMED_OUT
        if is_caller_fault and NOT_A_NUMBER not in reason:
            return RejectedError(said)
        return PeerError(said)


def _or_ever(limit: float | None) -> float:
    return inf if limit is None else limit


class _ErrorDetail(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail | str | None = None
    detail: str | None = None


def error_message(content: bytes) -> str:
    """Return what an error body of vLLM, FastAPI or ours says, else how it begins."""
    try:
        body = msgspec.json.decode(content, type=_ErrorBody)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return content[:200].decode(errors="replace")
    if isinstance(body.error, _ErrorDetail):
        return body.error.message
    return body.error or body.detail or ""


async def _note_reuse(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    context.trace_request_ctx.is_reused = True
