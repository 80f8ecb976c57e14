"""Who may call what of a guarded server."""

import json

import msgspec
import pytest

from guarded_app import TOKEN
from libra.serving.middleware import MAX_RELOAD_BYTES, WEIGHT_ROUTES

pytestmark = pytest.mark.anyio

DEVELOPMENT_ROUTES = [
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/abort_requests"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/update_weight_version"),
    ("POST", "/init_weight_transfer_engine"),
    ("GET", "/server_info"),
    ("GET", "/is_sleeping"),
    ("POST", "/invocations"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/v1/responses"),
    ("GET", "/openapi.json"),
    ("POST", "/no/such/route"),
    *(("POST", route) for route in sorted(WEIGHT_ROUTES)),
]


@pytest.mark.parametrize(("method", "path"), DEVELOPMENT_ROUTES)
async def test_what_is_not_open_needs_the_token(app, method, path):
    for token in (None, "wrong", TOKEN + "x", TOKEN[:-1], ""):
        answer = await app.call(method, path, token=token)
        assert answer.status == 401
        assert answer.headers["x-libra-instance"] == "vllm-0"
    assert app.inner.seen == []
    assert (await app.call(method, path, token=TOKEN)).status == 200
    assert app.inner.seen == [(method, path)]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/tokenize")],
)
async def test_what_everybody_needs_is_open(app, method, path):
    assert (await app.call(method, path)).status == 200


async def test_a_path_that_only_looks_open_is_not(app):
    for path in ("/health/", "//pause", "/v1/completions/render", "/metrics/../pause", "/HEALTH"):
        assert (await app.call("GET", path)).status == 401


async def test_reload_needs_the_token_and_a_request_of_the_right_shape(app, running):
    body = msgspec.json.encode(app.request_for(1))
    async with running():
        assert (await app.call("POST", "/libra/reload", body=body)).status == 401
        for bad in (b"", b"{", b"[]", b"\xff", body[:-1]):
            answer = await app.call("POST", "/libra/reload", body=bad, token=TOKEN)
            assert answer.status == 400
        too_long = [b" " * 2**19] * (MAX_RELOAD_BYTES // 2**19 + 1)
        answer = await app.call("POST", "/libra/reload", chunks=too_long, token=TOKEN)
        assert answer.status == 400
        assert "longer than" in answer.json["error"]["message"]
    assert app.engine.calls == []


async def test_websockets_need_the_token(app):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await app(scope, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_state_is_small_and_needs_no_token(app, running):
    async with running():
        answer = await app.call("GET", "/libra/state")
    assert json.loads(answer.body) == {
        "instance_id": "vllm-0",
        "incarnation": "vllm-0-a",
        "run_id": "run-1",
        "policy_version": 0,
        "is_paused": False,
        "manifest_hash": None,
        "is_asleep": False,
    }
