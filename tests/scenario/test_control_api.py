import os
import socket
import stat

import aiohttp
import anyio
import pytest

from libra.config.supervision import ApiConfig
from libra.errors import OverloadedError, SiteError
from libra.wire.api import StatusSnapshot, VerbReply
from libra_supervisor.api import access
from libra_supervisor.api.access import read_or_make_token
from libra_supervisor.api.server import api_server, is_loopback
from libra_supervisor.process.peer import peer_uid

TOKEN = "the token"
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


class FakeControl:
    """Answers every verb and remembers it."""

    def __init__(self):
        self.ready = False
        self.done = []

    def status(self):
        return StatusSnapshot(
            run_id="r",
            run_directory="/runs/r",
            pid=os.getpid(),
            phase="collecting",
            step=3,
            total_steps=None,
            policy_version=3,
            waiting_for="rollouts",
            reward_mean=0.5,
            num_running=4,
            num_buffered=0,
            uptime_s=1.0,
            eta_s=None,
            plan="",
            last_decision="",
            children=(),
            oldest_wait="",
        )

    def is_ready(self):
        return self.ready

    def metrics_text(self):
        return b"libra_step 3\n"

    async def do(self, verb, request):
        if verb == "reload":
            raise OverloadedError("a reload is in progress")
        self.done.append((verb, request.target, request.now))
        return VerbReply(ok=verb != "drain", message=verb)


def unix_client(path):
    return aiohttp.ClientSession("http://libra", connector=aiohttp.UnixConnector(str(path)))


@pytest.fixture
async def control():
    return FakeControl()


async def test_the_unix_socket_is_private_and_takes_the_fixed_verbs(tmp_path, control):
    path = tmp_path / "control.sock"
    async with api_server(control, config=ApiConfig(), socket_path=path, token=TOKEN) as port:
        assert port is None
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with unix_client(path) as client:
            async with client.get("/v1/status") as answer:
                assert (await answer.json())["step"] == 3
            async with client.get("/readyz") as answer:
                assert answer.status == 503
            async with client.post("/v1/stop", data=b'{"now": true}') as answer:
                assert await answer.json() == {"ok": True, "message": "stop"}
            async with client.post("/v1/drain", data=b'{"target": "vllm-0"}') as answer:
                assert answer.status == 409
            async with client.post("/v1/reload") as answer:
                assert answer.status == 503
    assert control.done == [("stop", "", True), ("drain", "vllm-0", False)]
    assert not path.exists()


@pytest.mark.case("R-B102")
@pytest.mark.case("R-B101")
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/__class__", b"", 404),
        ("/v1/stop.__init__", b"", 404),
        ("/v1/stop", b"\x80\x04\x95pickle", 400),
        ("/v1/stop", b'{"target": 5}', 400),
        ("/v1/stop", b'{"eval": "1"}', 400),
        ("/v1/explain", b'{"num_prompt_tokens": -1}', 400),
        ("/v1/explain", b'{"max_new_tokens": 1' + b"0" * 30 + b"}", 400),
        ("/v1/stop", b'{"target": "' + b"x" * 70_000 + b'"}', 413),
    ],
)
async def test_nothing_but_the_listed_verbs_with_small_typed_bodies(
    tmp_path, control, path, body, status
):
    socket_path = tmp_path / "c.sock"
    async with (
        api_server(control, config=ApiConfig(), socket_path=socket_path, token=TOKEN),
        unix_client(socket_path) as client,
        client.post(path, data=body) as answer,
    ):
        assert answer.status == status
    assert control.done == []


async def test_control_verbs_over_tcp_always_need_the_token(tmp_path, control):
    config = ApiConfig(api_port=0)
    async with (
        api_server(control, config=config, socket_path=tmp_path / "c", token=TOKEN) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        for header, status in ((None, 401), ("Bearer nope", 401), (f"Bearer {TOKEN}", 200)):
            headers = {} if header is None else {"Authorization": header}
            async with client.post("/v1/stop", headers=headers) as answer:
                assert answer.status == status
        async with client.get("/metrics") as answer:
            assert await answer.text() == "libra_step 3\n"
        async with client.get("/v1/status") as answer:
            assert answer.status == 401


@pytest.mark.case("R-B102")
async def test_what_comes_over_tcp_is_as_small_and_its_token_may_be_any_bytes(tmp_path, control):
    config = ApiConfig(api_port=0)
    async with api_server(control, config=config, socket_path=tmp_path / "c", token=TOKEN) as port:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        body = b'{"target": "' + b"x" * 70_000 + b'"}'
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
            client.post("/v1/drain", data=body, headers=headers) as answer,
        ):
            assert answer.status == 413
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(
                b"POST /v1/stop HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
            )
            assert (await stream.receive()).startswith(b"HTTP/1.1 401 ")
    assert control.done == []


@pytest.mark.case("R-B102")
async def test_another_user_is_refused_at_the_unix_socket(tmp_path, control, monkeypatch):
    monkeypatch.setattr(access, "peer_uid", lambda _socket: os.getuid() + 1)
    path = tmp_path / "c"
    async with (
        api_server(control, config=ApiConfig(), socket_path=path, token=TOKEN),
        unix_client(path) as client,
        client.post("/v1/stop") as answer,
    ):
        assert answer.status == 403
    assert control.done == []


async def test_a_port_in_use_is_named_with_its_key(tmp_path, control):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ApiConfig(api_port=port)
        with pytest.raises(SiteError, match=f"api_port {port} on 127.0.0.1"):
            async with api_server(control, config=config, socket_path=tmp_path / "c", token=TOKEN):
                pass


async def test_a_run_directory_with_a_long_path_still_gets_its_socket(tmp_path, control):
    folder = tmp_path / ("d" * 150)
    folder.mkdir()
    async with api_server(
        control, config=ApiConfig(), socket_path=folder / "control.sock", token=TOKEN
    ):
        assert (folder / "control.sock").is_socket()


def test_a_token_is_made_once_and_refused_when_others_can_read_it(tmp_path):
    path = tmp_path / "token"
    token = read_or_make_token(path)
    assert read_or_make_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(SiteError, match="chmod 600"):
        read_or_make_token(path)
    path.chmod(0o600)
    path.write_text("")
    with pytest.raises(SiteError, match="empty"):
        read_or_make_token(path)


def test_the_peer_of_a_unix_socket_is_known_by_its_user_id():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_uid(ours) == os.getuid()


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("h", False)]
)
def test_only_loopback_addresses_count_as_local(host, expected):
    assert is_loopback(host) is expected
