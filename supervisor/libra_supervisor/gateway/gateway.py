"""The OpenAI-compatible gateway: a request is sized up, placed, passed on, and stamped.

`routes` must be served by a runner with `handler_cancellation=True`: a client that goes away
cancels its handler, which gives the place back and closes the engine's connection at once.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from types import TracebackType
from typing import Self, TypeAlias

import msgspec
from aiohttp import web

from libra import clock
from libra.errors import LibraError, PeerError, RejectedError
from libra.ids import InstanceId, PolicyVersion, PromptId, RequestId
from libra.scheduling.request import RouteRequest
from libra.wire.instance import INSTANCE_HEADER, VERSIONS_HEADER
from libra_supervisor.gateway.output_count import StreamCount, tokens_in_answer
from libra_supervisor.gateway.question import Route, read_question
from libra_supervisor.gateway.refusal import error_event, refusal
from libra_supervisor.gateway.upstream import Engine, PhaseLimits, UnreachableError, Upstream
from libra_supervisor.gateway.waiting import Placement, SaturatedError, WaitingRoom
from libra_supervisor.http.answer import Answer

PROMPT_ID_HEADER = "X-Libra-Prompt-Id"
MIN_VERSION_HEADER = "X-Libra-Min-Version"
VERSION_HEADER = "X-Libra-Policy-Version"
"""The version of the instance when the request was placed; a stream has only this one."""

MAX_BODY_BYTES = 64 * 2**20
MAX_UNREACHABLE = 3
"""Instances that are tried when connections cannot be made; a refusal by a full one is not
counted, since it ends at the request's deadline."""

REQUEST_ID_HEADER = "X-Request-Id"
PASSED_ON = ("Content-Type", "Accept", "traceparent", "tracestate")
PASSED_BACK = ("Content-Type", REQUEST_ID_HEADER)
MAX_VERSION_DIGITS = 18
OK, TIMED_OUT, TOO_MANY, UNAVAILABLE = 200, 408, 429, 503
CLIENT_FAULTS = range(400, 500)
NOT_A_NUMBER = b"Out of range float values"
"""In a 400 of vLLM whose own logits are NaN: the request is not at fault."""


Patience: TypeAlias = Callable[[InstanceId, RequestId], AbstractContextManager[object]]
"""A block within which an answer is awaited; PeerError when the instance lost the request."""


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    model_names: tuple[str, ...]
    """What /v1/models lists: the names under which every engine serves the policy."""

    max_model_len: int
    chat_default_tokens: int
    """Expected limit of a chat request that names none: `max_new_tokens`."""

    queue_deadline_s: float
    limits: PhaseLimits = PhaseLimits()


class Gateway:
    """Request handlers over one scheduler. An asynchronous context manager, on asyncio."""

    def __init__(
        self,
        room: WaitingRoom,
        url_of: Callable[[InstanceId], str | None],
        patience_with: Patience,
        options: GatewayOptions,
    ) -> None:
        """`url_of` answers None for an instance that is gone."""
        self._room = room
        self._url_of = url_of
        self._patience_with = patience_with
        self._options = options
        self._upstream = Upstream(options.limits)
        self._serials = count(1)

    async def __aenter__(self) -> Self:
        await self._upstream.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._upstream.__aexit__(exc_type, exc, traceback)

    def routes(self) -> Sequence[web.RouteDef]:
        return [
            web.post("/v1/completions", self._handler("/v1/completions")),
            web.post("/v1/chat/completions", self._handler("/v1/chat/completions")),
            web.get("/v1/models", self._models),
        ]

    async def _models(self, _request: web.Request) -> web.Response:
        models = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "libra",
                "max_model_len": self._options.max_model_len,
            }
            for name in self._options.model_names
        ]
        return web.json_response({"object": "list", "data": models})

    def _handler(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                body = await _read_body(request)
                return await self._answer(request, route, body)
            except LibraError as error:
                return refusal(error)

        return handle

    async def _answer(self, request: web.Request, route: Route, body: bytes) -> web.StreamResponse:
        wanted = self._route_request(request, route, body)

        async def relay(placement: Placement) -> web.StreamResponse:
            return await self._relay(request, route, body, placement, wanted.request_id)

        for _ in range(MAX_UNREACHABLE - 1):
            try:
                return await self._room.serve(wanted, relay)
            except UnreachableError:
                continue  # no engine has seen it
        return await self._room.serve(wanted, relay)

    def _route_request(self, request: web.Request, route: Route, body: bytes) -> RouteRequest:
        question = read_question(body, route, chat_default_tokens=self._options.chat_default_tokens)
        prompt_id = _name_in(request, PROMPT_ID_HEADER)
        request_id = _name_in(request, REQUEST_ID_HEADER) or f"gateway-{next(self._serials)}"
        return RouteRequest(
            request_id=RequestId(request_id),
            max_new_tokens=question.max_new_tokens,
            num_prompt_tokens=question.num_prompt_tokens,
            num_prompt_chars=question.num_prompt_chars,
            prompt_id=None if prompt_id is None else PromptId(prompt_id),
            category=f"gateway {route}",
            min_version=_min_version(request),
            deadline_at=clock.now() + self._options.queue_deadline_s,
        )

    async def _relay(
        self,
        request: web.Request,
        route: Route,
        body: bytes,
        placement: Placement,
        request_id: RequestId,
    ) -> web.StreamResponse:
        engine = self._engine(placement)
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        # Tokens are counted in the bytes that pass by, so they come uncompressed.
        # The engine is asked by this name whether it still has the request.
        headers |= {"Accept-Encoding": "identity", REQUEST_ID_HEADER: request_id}
        patience = self._patience_with(engine.instance_id, request_id)
        async with self._upstream.ask(
            engine, route, body=body, headers=headers, patience=patience
        ) as answer:
            if answer.status in (TOO_MANY, UNAVAILABLE):
                raise SaturatedError(
                    f"{engine.instance_id} answered {answer.status}",
                    retry_after_s=_retry_after_s(answer),
                )
            if answer.status == OK and _is_stream(answer):
                return await self._relay_stream(request, engine, answer, placement)
            return await self._relay_whole(engine, answer, placement)

    async def _relay_whole(
        self, engine: Engine, answer: Answer, placement: Placement
    ) -> web.Response:
        """Pass on an answer once all of it is there, so that a broken one can be said to be so."""
        content = bytearray()

        async def keep(piece: bytes) -> None:
            content.extend(piece)

        await self._upstream.pour(engine, answer, keep)
        whole = bytes(content)
        if answer.status == OK:
            placement.complete(tokens_in_answer(whole))
        elif _is_caller_fault(answer.status, whole):
            placement.fail(RejectedError(f"{engine.instance_id} answered {answer.status}"))
        else:
            said = whole[:500].decode(errors="replace")
            raise PeerError(f"{engine.instance_id} answered {answer.status}: {said}")
        return web.Response(
            body=whole, status=answer.status, headers=_stamped(answer, placement, is_whole=True)
        )

    async def _relay_stream(
        self,
        request: web.Request,
        engine: Engine,
        answer: Answer,
        placement: Placement,
    ) -> web.StreamResponse:
        """Pass on events as they come. Once the first is out, nothing is tried again."""
        response = web.StreamResponse(headers=_stamped(answer, placement, is_whole=False))
        placement.pin()
        try:
            await response.prepare(request)
            await self._forward(engine, answer, response, placement)
            await response.write_eof()
        except ConnectionResetError:
            pass  # the client went away: the place and the engine are freed as this returns
        return response

    async def _forward(
        self,
        engine: Engine,
        answer: Answer,
        response: web.StreamResponse,
        placement: Placement,
    ) -> None:
        seen = StreamCount()

        async def forward(piece: bytes) -> None:
            seen.feed(piece)
            await response.write(piece)

        try:
            await self._upstream.pour(engine, answer, forward)
        except PeerError as error:
            placement.fail(error)
            await response.write(error_event(str(error)))
            return
        if seen.has_error:
            placement.fail(PeerError(f"{engine.instance_id} reported an error in its stream"))
        else:
            placement.complete(seen.num_tokens)

    def _engine(self, placement: Placement) -> Engine:
        instance_id = placement.reservation.instance_id
        url = self._url_of(instance_id)
        if url is None:
            raise UnreachableError(f"{instance_id} is gone")
        return Engine(instance_id, url)


async def _read_body(request: web.Request) -> bytes:
    """Read up to MAX_BODY_BYTES, whatever limit the application has for its own bodies."""
    pieces, num_bytes = [], 0
    try:
        while piece := await request.content.readany():
            num_bytes += len(piece)
            if num_bytes > MAX_BODY_BYTES:
                raise RejectedError(f"the body exceeds {MAX_BODY_BYTES} bytes")
            pieces.append(piece)
    except web.RequestPayloadError as exc:
        raise RejectedError("the body is not what its headers say") from exc
    return b"".join(pieces)


def _name_in(request: web.Request, header: str) -> str | None:
    """A client's name for something, in ASCII: it goes into logs, messages and other headers."""
    given = request.headers.get(header)
    return given if given is None else given.encode("ascii", "backslashreplace").decode()


def _min_version(request: web.Request) -> PolicyVersion | None:
    given = request.headers.get(MIN_VERSION_HEADER)
    if given is None:
        return None
    if not given.isascii() or not given.isdigit() or len(given) > MAX_VERSION_DIGITS:
        raise RejectedError(f"{MIN_VERSION_HEADER} is {given!r}; a policy version is a number")
    return PolicyVersion(int(given))


def _retry_after_s(answer: Answer) -> float | None:
    """Seconds, when the engine gave a number; a date is not worth reading for a pause."""
    given = answer.header("Retry-After") or ""
    return float(given) if given.isascii() and given.isdigit() else None


def _is_caller_fault(status: int, content: bytes) -> bool:
    return status in CLIENT_FAULTS and status != TIMED_OUT and NOT_A_NUMBER not in content


def _is_stream(answer: Answer) -> bool:
    media_type, _, _ = (answer.header("Content-Type") or "").partition(";")
    return media_type.strip().lower() == "text/event-stream"


def _stamped(answer: Answer, placement: Placement, *, is_whole: bool) -> dict[str, str]:
    told = {name: answer.header(name) for name in PASSED_BACK}
    headers = {name: value for name, value in told.items() if value is not None}
    version = str(placement.reservation.policy_version)
    headers[INSTANCE_HEADER] = placement.reservation.instance_id
    headers[VERSION_HEADER] = version
    if is_whole:
        headers[VERSIONS_HEADER] = answer.header(VERSIONS_HEADER) or version
    return headers
