"""ASGI middleware around vLLM's API server: who may call what, and what answers carry.

Open to everybody who reaches the port: OPEN_ROUTES. Everything else, vLLM's development routes
above all, needs the run's token, from local users too. `/libra/reload`, `/libra/state` and
`/libra/requests` are answered here.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import msgspec

from libra import clock
from libra.errors import RejectedError
from libra.serving.answer_sender import AnswerSender
from libra.serving.engine import Engine, VllmEngine
from libra.serving.gate import Gate
from libra.serving.http import (
    App,
    Message,
    Receive,
    Scope,
    Send,
    answer_error,
    answer_json,
    has_token,
    header,
    path_of,
    read_body,
)
from libra.serving.identity import ServingIdentity, identity_from
from libra.serving.ledger import VersionLedger
from libra.serving.open_answers import OpenAnswers
from libra.serving.reload import GuardedReload
from libra.storage.manifests import why_not_as_verified
from libra.wire.instance import (
    INCARNATION_HEADER,
    INSTANCE_HEADER,
    OpenRequests,
    ReloadRequest,
)

COMPLETION_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions"})
OPEN_ROUTES = frozenset(
    {
        ("GET", "/health"),
        ("GET", "/ping"),
        ("GET", "/load"),
        ("GET", "/version"),
        ("GET", "/metrics"),
        ("GET", "/metrics/"),
        ("GET", "/v1/models"),
        ("GET", "/libra/state"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        *(("POST", route) for route in COMPLETION_ROUTES),
    }
)

WEIGHT_ROUTES = frozenset(
    {
        "/collective_rpc",
        "/sleep",
        "/wake_up",
        "/release_kv_cache_memory",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/weight_checker",
        "/scale_elastic_ep",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
"""Routes after which nobody can say which weights answer, until a guarded reload succeeds."""

SLEEP_ROUTE, WAKE_ROUTE = "/sleep", "/wake_up"

MAX_RELOAD_BYTES = 2**24
"""A transfer names every tensor: 100 bytes each, of models with 100 000."""

OK, BAD_REQUEST, UNAUTHORIZED, UNAVAILABLE = 200, 400, 401, 503
POLICY_VIOLATION = 1008


class GuardedServer:
    """The state of one server: gate, ledger, reload and open answers around its engine."""

    def __init__(
        self, identity: ServingIdentity, engine: Engine, gate: Gate, ledger: VersionLedger
    ) -> None:
        self.gate = gate
        self.ledger = ledger
        self.reload = GuardedReload(identity, engine, gate, ledger, monotonic=clock.now)
        self.answers = OpenAnswers()
        self._engine = engine

    async def open_requests(self) -> OpenRequests:
        counts = None if self.reload.is_replacing else await self._engine.count_tokens()
        return OpenRequests(num_tokens=self.answers.progress(counts))


def guarded_vllm(identity: ServingIdentity, engine_client: Any) -> GuardedServer:
    from vllm import SamplingParams  # noqa: PLC0415 - only where vLLM is

    probe_sampling = partial(
        SamplingParams, max_tokens=1, temperature=1.0, seed=0, prompt_logprobs=0, detokenize=False
    )
    gate, ledger = Gate(), VersionLedger(identity.served_version)
    engine = VllmEngine(engine_client, gate, ledger, probe_sampling=probe_sampling)
    return GuardedServer(identity, engine, gate, ledger)


Guard: TypeAlias = Callable[[ServingIdentity, Any], GuardedServer]
"""Makes the guarded server around an engine client."""


class LibraMiddleware:
    """vLLM builds it with `--middleware libra.serving.middleware.LibraMiddleware`."""

    def __init__(self, app: App, *, guard: Guard = guarded_vllm) -> None:
        self._app = app
        self._guard = guard
        # The one place in this process that reads what the supervisor said about it.
        self._identity = identity_from(os.environ)  # noqa: TID251
        self._server: GuardedServer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and not has_token(scope, self._identity.token):
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        elif scope["type"] == "http":
            await self._on_http(scope, receive, self._identified(send))
        else:
            await self._app(scope, receive, send)

    async def _on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope)
        is_open = (scope["method"], path) in OPEN_ROUTES
        if not is_open and not has_token(scope, self._identity.token):
            await answer_error(send, UNAUTHORIZED, f"{scope['method']} {path} needs the token")
            return
        server = self._guarded(scope)
        match scope["method"], path:
            case "GET", "/libra/state":
                await answer_json(send, await server.reload.state())
            case "GET", "/libra/requests":
                await answer_json(send, await server.open_requests())
            case "POST", "/libra/reload":
                await self._reload(server, receive, send)
            case "POST", route if route in COMPLETION_ROUTES:
                await self._complete(server, scope, receive, send)
            case _:
                await self._pass_on(server, scope, receive, send)

    async def _pass_on(
        self, server: GuardedServer, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Routes of vLLM itself. After those that touch weights nobody knows what would answer."""
        path = path_of(scope)
        if path in WEIGHT_ROUTES:
            server.ledger.void()
            server.gate.refuse(f"{path} was called")
        forward = partial(self._app, scope, receive, _followed(server, scope, send))
        if path == SLEEP_ROUTE:
            await server.reload.put_to_sleep(forward)
        else:
            await forward()

    async def _reload(self, server: GuardedServer, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, max_bytes=MAX_RELOAD_BYTES)
            request = msgspec.json.decode(body, type=ReloadRequest)
        except (RejectedError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
            await answer_error(send, BAD_REQUEST, f"not a reload request: {exc}")
            return
        await answer_json(send, await server.reload.reload(request))

    async def _complete(
        self, server: GuardedServer, scope: Scope, receive: Receive, send: Send
    ) -> None:
        refusal = server.gate.refusal
        if refusal is not None:
            await answer_error(send, UNAVAILABLE, refusal)
            return
        name = header(scope, b"x-request-id").decode("latin-1")
        with server.answers.answering(name) as record:
            await self._app(scope, receive, AnswerSender(send, record))

    def _guarded(self, scope: Scope) -> GuardedServer:
        if self._server is None:
            self._server = self._guard(self._identity, scope["app"].state.engine_client)
            self._doubt(self._server)
        return self._server

    def _doubt(self, server: GuardedServer) -> None:
        """Trust the engine no more if what it read is not what was verified minutes before."""
        identity = self._identity
        if identity.served_directory is not None and (
            why := why_not_as_verified(
                identity.served_directory, identity.served_manifest_hash, identity.served_stamps
            )
        ):
            server.ledger.lose()
            server.gate.refuse(why)

    def _identified(self, send: Send) -> Send:
        identity = [
            (INSTANCE_HEADER.lower().encode(), self._identity.instance_id.encode()),
            (INCARNATION_HEADER.lower().encode(), self._identity.incarnation.encode()),
        ]

        async def send_identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *identity]}
            await send(message)

        return send_identified


def _followed(server: GuardedServer, scope: Scope, send: Send) -> Send:
    """Note a call that wakes the engine up; one for a part of its memory leaves it asleep."""
    if path_of(scope) != WAKE_ROUTE or scope.get("query_string"):
        return send

    async def send_and_note(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == OK:
            server.reload.on_woken()
        await send(message)

    return send_and_note
