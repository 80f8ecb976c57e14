"""Bodies and headers that no well-meaning client sends, and large ones that some do."""

import asyncio
import io

import msgspec
import pytest

from fake_upstream import FakeUpstream
from gateways import running_gateway

pytestmark = pytest.mark.anyio
ASK = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 5}


@pytest.fixture
def anyio_backend():
    return "asyncio"


DEEP = b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
"""Nested deeper than any reader of JSON follows."""


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{", {}),
        (b"[1]", {}),
        (b"", {}),
        (b'{"max_tokens": 1' + b"0" * 6000 + b"}", {}),
        (DEEP, {}),
        (b"{}", {"X-Libra-Min-Version": "two"}),
        (b"{}", {"X-Libra-Min-Version": "1" * 5000}),
        (b"{}", {"Content-Encoding": "gzip"}),
    ],
)
async def test_what_cannot_be_understood_is_refused_before_any_engine(body, headers):
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        path = gateway.url + "/v1/completions"
        async with gateway.client.post(path, data=body, headers=headers) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "invalid_request_error"
        assert engine.bodies == []


async def ask_raw(gateway, *headers):
    """The whole answer to a request whose headers are any bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    body = msgspec.json.encode(ASK)
    lines = [
        b"POST /v1/completions HTTP/1.1", b"Host: gateway", b"Connection: close",
        b"Content-Length: %d" % len(body), *headers,
    ]  # fmt: skip
    writer.write(b"\r\n".join([*lines, b"", body]))
    answer = await reader.read()
    writer.close()
    return answer


async def test_names_that_are_no_text_are_passed_on_and_told_escaped():
    async with FakeUpstream() as engine, running_gateway(engine, queue_deadline_s=0.2) as gateway:
        names = (b"X-Request-Id: a\xff\xc3\xa9", b"X-Libra-Prompt-Id: \xff")
        assert (await ask_raw(gateway, *names)).startswith(b"HTTP/1.1 200")
        assert engine.headers[0]["X-Request-Id"] == "a\\udcff\\xe9"
        answer = await ask_raw(gateway, *names, b"X-Libra-Min-Version: 9")
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"request a\\\\udcff\\\\xe9 found no instance" in answer


async def test_a_large_body_passes():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        body = io.BytesIO(msgspec.json.encode(ASK | {"prompt": list(range(500_000))}))
        async with gateway.client.post(gateway.url + "/v1/completions", data=body) as answer:
            assert answer.status == 200
        assert len(engine.bodies[0]) > 2**21


async def test_a_body_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr("libra_supervisor.gateway.gateway.MAX_BODY_BYTES", 100)
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        status, _, answer = await gateway.post(ASK | {"prompt": [1] * 100})
        assert (status, engine.bodies) == (400, [])
        assert "exceeds 100 bytes" in answer["error"]["message"]
