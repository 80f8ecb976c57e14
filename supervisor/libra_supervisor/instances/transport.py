"""One HTTP call to one instance: limits for each phase, and foreign errors mapped once.

What went wrong, by whom it is to be answered for:

* PeerError: the instance did not answer, or wrongly (connection lost, time-out, 5xx).
* OverloadedError: it is healthy and full (429, 503): back off, do not blame it.
* RefusedError: it holds no known weights and serves nothing until a reload succeeds.
* RejectedError: the request itself is wrong (other 4xx); no instance is to blame.
"""

from math import inf
from types import TracebackType
from typing import Self

import anyio
import msgspec

from libra import clock
from libra.errors import LibraError, OverloadedError, PeerError, RefusedError, RejectedError
from libra.ids import InstanceId
from libra.wire.decoding import decoded_json
from libra.wire.instance import INSTANCE_HEADER, WEIGHTS_UNKNOWN
from libra_supervisor.http.answer import Answer
from libra_supervisor.http.client import HttpClient
from libra_supervisor.http.errors import LostError, NotConnectedError
from libra_supervisor.http.request import Request

# uvicorn under vLLM closes an idle connection after 5 s; a shorter pool life loses fewer races.
POOL_IDLE_S = 3.0

HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
"""A page of metrics compressed would cost the server and us more than its way over loopback."""

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
    """The connection ended before the head of an answer."""

    is_stale = False
    """As `libra_supervisor.http.errors.LostError` tells it."""


class InstanceTransport:
    """Connections to one instance. An asynchronous context manager, on asyncio.

    Cancelling a call closes its connection; vLLM notices and stops generating.
    """

    def __init__(self, instance_id: InstanceId, base_url: str) -> None:
        self.instance_id = instance_id
        self._base_url = base_url.rstrip("/")

    async def __aenter__(self) -> Self:
        self._http = await HttpClient(idle_s=POOL_IDLE_S).__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(exc_type, exc, traceback)

    async def call(self, call: Call) -> bytes:
        """Return the body of a 200 answer; everything else is one of the errors named above."""
        try:
            return await self._send(call, is_fresh=False)
        except ConnectionLostError as error:
            if not (call.is_resent_when_stale and error.is_stale):
                raise
        return await self._send(call, is_fresh=True)

    async def _send(self, call: Call, *, is_fresh: bool) -> bytes:
        began, content = clock.now(), bytearray()
        answer: Answer | None = None
        end_at = began + _or_ever(call.limits.whole_s)
        first_byte_at = min(end_at, began + _or_ever(call.limits.first_byte_s))
        # One scope for all phases: each instance is called twice for every look at it.
        with anyio.CancelScope(deadline=first_byte_at) as scope:
            answer = await self._answer(call, is_fresh=is_fresh)
            try:
                await self._read(answer, content, call, scope, end_at=end_at)
            finally:
                answer.close()
        if answer is None:
            raise PeerError(f"{self._did_not_answer(call)}: its time was up")
        if scope.cancelled_caught:
            raise self._broken_off(content, call, "its time was up")
        self._check_identity(answer, call)
        if answer.status != OK:
            raise self._error_of(answer, content, call)
        return bytes(content)

    async def _answer(self, call: Call, *, is_fresh: bool) -> Answer:
        request = Request(
            base_url=self._base_url,
            method=call.method,
            path=call.path,
            headers=HEADERS | call.headers,
            body=call.body,
            connect_s=call.limits.connect_s,
        )
        try:
            return await self._http.ask(request, is_fresh=is_fresh)
        except NotConnectedError as exc:
            raise PeerError(f"{self._did_not_answer(call)}: {exc}") from exc
        except LostError as exc:
            lost = ConnectionLostError(f"{self._did_not_answer(call)}: {exc!r}")
            lost.is_stale = exc.is_stale
            raise lost from exc

    async def _read(
        self,
        answer: Answer,
        content: bytearray,
        call: Call,
        scope: anyio.CancelScope,
        *,
        end_at: float,
    ) -> None:
        idle_s, max_bytes = _or_ever(call.limits.idle_s), _or_ever(call.limits.max_bytes)
        try:
            while True:
                if answer.is_waited_for:
                    scope.deadline = min(end_at, clock.now() + idle_s)
                piece = await answer.next_piece()
                if not piece:
                    return
                content += piece
                if len(content) > max_bytes:
                    raise PeerError(
                        f"{self.instance_id} gave over {max_bytes} bytes while {call.doing}"
                    )
        except LostError as exc:
            raise self._broken_off(content, call, repr(exc)) from exc

    def _broken_off(self, content: bytearray, call: Call, why: str) -> PeerError:
        return PeerError(
            f"{self.instance_id} broke off its answer after {len(content)} bytes "
            f"while {call.doing}: {why}"
        )

    def _did_not_answer(self, call: Call) -> str:
        return f"{self.instance_id} at {self._base_url} did not answer while {call.doing}"

    def _check_identity(self, answer: Answer, call: Call) -> None:
        answered = answer.header(INSTANCE_HEADER)
        if answered != self.instance_id:
            raise PeerError(
                f"{self._base_url} belongs to {answered or 'no instance of ours'} and not to "
                f"{self.instance_id}, found while {call.doing}"
            )

    def _error_of(self, answer: Answer, content: bytearray, call: Call) -> LibraError:
        reason = error_message(content)
        said = f"{self.instance_id} answered {answer.status} while {call.doing}: {reason}"
        if answer.status == UNAVAILABLE and reason.startswith(WEIGHTS_UNKNOWN):
            return RefusedError(said)
        if answer.status in {TOO_MANY, UNAVAILABLE}:
            return OverloadedError(said)
        is_caller_fault = answer.status in CLIENT_FAULTS and answer.status != TIMED_OUT
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


def error_message(content: bytes | bytearray) -> str:
    """Return what an error body of vLLM, FastAPI or ours says, else how it begins."""
    try:
        body = decoded_json(content, _ErrorBody)
    except PeerError:
        return content[:200].decode(errors="replace")
    if isinstance(body.error, _ErrorDetail):
        return body.error.message
    return body.error or body.detail or ""
