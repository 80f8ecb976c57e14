"""The control API's routes: status, metrics and a fixed list of verbs."""

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
from aiohttp import web

from libra.errors import LibraError, PeerError, RefusedError
from libra.wire.api import VERBS, StatusSnapshot, Verb, VerbReply, VerbRequest
from libra.wire.decoding import decoded_json

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY_BYTES = 64 * 1024


class ControlPort(Protocol):
    """What the API may ask the running control plane."""

    def status(self) -> StatusSnapshot: ...

    def is_ready(self) -> bool:
        """True once the run's first slot policy was met and until it stops."""

    def metrics_text(self) -> bytes:
        """The page in Prometheus' text format."""

    async def do(self, verb: Verb, request: VerbRequest) -> VerbReply: ...


def routes(control: ControlPort) -> list[web.RouteDef]:
    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_request: web.Request) -> web.Response:
        ready = control.is_ready()
        return web.Response(text="ready\n" if ready else "starting\n", status=200 if ready else 503)

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(
            body=control.metrics_text(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def status(_request: web.Request) -> web.Response:
        return _json(control.status())

    return [
        web.get("/healthz", healthz),
        web.get("/readyz", readyz),
        web.get("/metrics", metrics),
        web.get("/v1/status", status),
        *(web.post(f"/v1/{verb}", _verb_handler(control, verb)) for verb in VERBS),
    ]


def _verb_handler(control: ControlPort, verb: Verb) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        body = await request.read()
        try:
            parsed = decoded_json(body, VerbRequest) if body else VerbRequest()
        except PeerError as error:
            return _json(VerbReply(ok=False, message=f"bad request body: {error}"), status=400)
        try:
            reply = await control.do(verb, parsed)
        except LibraError as error:
            reply = VerbReply(ok=False, message=str(error))
            return _json(reply, status=503 if isinstance(error, RefusedError) else 500)
        return _json(reply, status=200 if reply.ok else 409)

    return handle


def _json(body: msgspec.Struct, *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), content_type="application/json", status=status
    )
