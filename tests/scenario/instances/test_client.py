"""InstanceClient against a fake server on real sockets."""

import contextlib
import os
import socket
import statistics

import anyio
import pytest
from aiohttp import web

from fake_vllm import FakeVllm, default_answer, default_probe
from libra import clock
from libra.errors import OverloadedError, PeerError, RefusedError, RejectedError
from libra.wire.instance import Sampling, VersionSpan
from libra_supervisor.instances import client as client_module
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.transport import CallLimits, ConnectionLostError
from reload_messages import reload_request

TOKEN = "secret"
SAMPLING = Sampling(max_new_tokens=8, seed=3)
PROMPT = [5, 6, 7]

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def server():
    async with FakeVllm(token=TOKEN) as server:
        yield server


@pytest.fixture
async def client(server):
    async with InstanceClient("vllm-0", server.url, token=TOKEN) as client:
        yield client


async def complete(client, sampling=SAMPLING):
    return await client.complete(PROMPT, sampling, request_id="r1")


async def test_a_completion_is_taken_verbatim_with_its_version(server, client):
    server.version = 4
    completion = await complete(client)
    body = server.completion_bodies[-1]
    assert completion.token_ids == tuple(default_answer(PROMPT, body, 4))
    assert completion.logprobs == tuple(-1.0 - (t % 10) / 10 for t in completion.token_ids)
    assert completion.version_spans == (VersionSpan(4, 0, 8),)
    assert (completion.finish_reason, completion.instance_id) == ("length", "vllm-0")
    assert completion.num_prompt_tokens == 3
    assert body["prompt"] == PROMPT
    assert body["return_token_ids"] is True
    assert body["vllm_xargs"] == {"libra_token_ids_only": 1}
    assert (body["logprobs"], body["seed"], body["max_tokens"]) == (0, 3, 8)


@pytest.mark.case("T-B58")
@pytest.mark.case("R-B92")
async def test_a_reload_in_the_middle_gives_two_spans(server, client):
    server.token_delay_s = 0.02
    async with anyio.create_task_group() as tasks:
        answers = []

        async def ask():
            answers.append(await complete(client))

        tasks.start_soon(ask)
        await clock.sleep(0.07)
        await client.reload(reload_request(), timeout_s=5.0)
    first, second = answers[0].version_spans
    assert (first.policy_version, second.policy_version) == (0, 7)
    assert 0 == first.start < first.end == second.start < second.end == 8


async def test_a_reload_is_acknowledged_and_shows_in_the_state(server, client):
    request = reload_request(probe_token_ids=(1, 2, 3))
    ack = await client.reload(request, timeout_s=5.0)
    assert (ack.error, ack.policy_version, ack.incarnation) == (None, 7, "vllm-0#1")
    assert ack.probe_logprobs == default_probe((1, 2, 3), 7)
    state = await client.state()
    assert (state.policy_version, state.manifest_hash) == (7, "hash-7")


async def test_a_wrong_token_is_the_callers_fault(server):
    async with InstanceClient("vllm-0", server.url, token="wrong") as client:
        with pytest.raises(RejectedError, match="401 while reloading v7: the token is wrong"):
            await client.reload(reload_request(), timeout_s=5.0)


@pytest.mark.case("R-B08")
@pytest.mark.case("R-B09")
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RejectedError),
        (404, RejectedError),
        (422, RejectedError),
        (408, PeerError),
        (429, OverloadedError),
        (503, OverloadedError),
        (500, PeerError),
        (502, PeerError),
    ],
)
async def test_who_is_to_blame_follows_from_the_status(server, client, status, kind):
    server.next_statuses.append(status)
    with pytest.raises(kind, match=f"vllm-0 answered {status} while completing r1: status"):
        await complete(client)
    assert (await complete(client)).finish_reason == "length"


async def test_unknown_weights_are_told_apart_from_overload(server, client):
    server.next_reloads.append("load_failed")
    ack = await client.reload(reload_request(), timeout_s=5.0)
    assert ack.error == "the load failed by switch"
    with pytest.raises(RefusedError, match="weights unknown") as error:
        await complete(client)
    assert not isinstance(error.value, OverloadedError)
    assert (await client.state()).policy_version is None


@pytest.mark.case("R-B13")
async def test_a_server_that_never_answers_is_given_up_at_the_first_byte_limit(server):
    limits = CallLimits(first_byte_s=0.05)
    async with InstanceClient(
        "vllm-0", server.url, token=TOKEN, completion_limits=limits
    ) as client:
        server.hang.add("/v1/completions")
        with pytest.raises(PeerError, match="did not answer while completing r1"):
            await complete(client)
        await client.health()


class Flood:
    """A server whose answers do not end: `piece` every `pause_s`."""

    def __init__(self, piece, *, pause_s):
        self.piece, self.pause_s = piece, pause_s

    async def __aenter__(self):
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_exc):
        await self._runner.cleanup()

    async def _answer(self, request):
        response = web.StreamResponse(headers={"X-Libra-Instance": "vllm-0"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(self.piece)
                await clock.sleep(self.pause_s)
        return response


@pytest.mark.case("R-B13", "R-B23")
async def test_a_page_that_trickles_ends_at_the_limit_of_the_whole():
    async with (
        Flood(b"# a\n", pause_s=0.05) as server,
        InstanceClient("vllm-0", server.url, token=TOKEN) as client,
    ):
        with anyio.fail_after(10), pytest.raises(PeerError, match="broke off its answer after"):
            await client.metrics_text(timeout_s=0.4)


async def test_a_page_without_end_is_given_up_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr(client_module, "SHORT_CALL", CallLimits(whole_s=5.0, max_bytes=100_000))
    async with (
        Flood(b"vllm:x 1\n" * 1000, pause_s=0.0) as server,
        InstanceClient("vllm-0", server.url, token=TOKEN) as client,
    ):
        with pytest.raises(PeerError, match="gave over 100000 bytes while checking its health"):
            await client.health()
        monkeypatch.setattr(client_module, "MAX_SHORT_BYTES", 200_000)
        with pytest.raises(PeerError, match="gave over 200000 bytes while giving its metrics"):
            await client.metrics_text(timeout_s=5.0)


@pytest.mark.case("R-B38")
async def test_an_answer_that_breaks_off_is_an_error_and_is_not_sent_again(server, client):
    await complete(client)
    server.reset_after_bytes = 30
    with pytest.raises(PeerError, match="broke off its answer after 30 bytes"):
        await complete(client)
    assert len(server.completion_bodies) == 2


async def test_nothing_listening_is_named_with_its_address():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        async with InstanceClient("vllm-0", url, token=TOKEN) as client:
            with pytest.raises(PeerError, match=f"vllm-0 at {url} did not answer"):
                await client.health()


@pytest.mark.case("R-B34")
async def test_a_stale_pooled_connection_is_replaced_once(server, client):
    await complete(client)
    server.drop_next = 1
    assert (await complete(client)).finish_reason == "length"
    assert len(server.completion_bodies) == 3
    await complete(client)
    server.drop_next = 2
    with pytest.raises(ConnectionLostError):
        await complete(client)
    assert len(server.completion_bodies) == 6


async def test_a_fresh_connection_that_is_dropped_is_not_tried_again(server, client):
    server.drop_next = 1
    with pytest.raises(ConnectionLostError):
        await complete(client)
    assert len(server.completion_bodies) == 1


async def test_a_reload_is_never_sent_twice(server, client):
    await client.state()
    server.next_reloads.append("reset")
    with pytest.raises(ConnectionLostError, match="while reloading v7"):
        await client.reload(reload_request(), timeout_s=5.0)
    assert server.calls.count(("POST", "/libra/reload")) == 1
    assert (await client.state()).policy_version == 7


@pytest.mark.case("R-B34")
async def test_a_server_that_closes_idle_connections_costs_no_request():
    async with (
        FakeVllm(token=TOKEN, idle_close_s=0.03) as server,
        InstanceClient("vllm-0", server.url, token=TOKEN) as client,
    ):
        for k in range(30):
            await complete(client)
            await clock.sleep(0.02 + 0.001 * (k % 20))


@pytest.mark.case("R-B14")
async def test_a_cancelled_call_stops_the_generation_at_once(server, client):
    server.token_delay_s = 0.01
    with anyio.move_on_after(0.05):
        await complete(client, Sampling(max_new_tokens=10_000))
    with anyio.fail_after(1):
        while server.num_running:
            await clock.sleep(0.005)
    assert server.num_aborted == 1


@pytest.mark.case("R-B36")
async def test_proxy_variables_do_not_divert_calls(server, client, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert os.environ["HTTP_PROXY"]  # noqa: TID251
    await client.health()
    await complete(client)


async def test_another_server_at_the_same_port_is_recognised(server):
    async with InstanceClient("vllm-1", server.url, token=TOKEN) as client:
        with pytest.raises(PeerError, match="belongs to vllm-0 and not to vllm-1"):
            await complete(client)


async def test_a_server_without_libra_is_recognised(server, client, monkeypatch):
    monkeypatch.setattr(server, "instance_id", "")
    with pytest.raises(PeerError, match="belongs to no instance of ours"):
        await client.health()


async def test_ipv6_loopback_works():
    if not socket.has_ipv6:
        pytest.fail("the machine has no IPv6")
    async with FakeVllm(token=TOKEN, host="::1") as server:
        assert server.url.startswith("http://[::1]:")
        async with InstanceClient("vllm-0", server.url, token=TOKEN) as client:
            await complete(client)


@pytest.mark.parametrize("text", ["", "{", '{"choices": []}', '{"choices": [{}], "usage": {}}'])
async def test_an_answer_that_is_no_completion_is_the_instances_fault(server, client, text):
    server._answer_body = lambda *_: text.encode()
    with pytest.raises(PeerError, match="no completion"):
        await complete(client)


async def test_metrics_come_as_text_and_hang_no_longer_than_asked(server, client):
    assert "vllm:num_requests_running" in await client.metrics_text(timeout_s=1.0)
    server.hang.add("/metrics")
    with pytest.raises(PeerError, match="while giving its metrics"):
        await client.metrics_text(timeout_s=0.05)


@pytest.mark.case("R-B15")
async def test_many_mixed_failures_leave_no_connection_behind(server, client):
    server.token_delay_s = 0.001
    outcomes = []

    async def ask(k):
        if k % 5 == 0:
            server.next_statuses.append(500 if k % 2 else 429)
        try:
            with anyio.move_on_after(0.004 if k % 7 == 0 else 5.0) as scope:
                await client.complete(PROMPT, SAMPLING, request_id=f"r{k}")
                outcomes.append("answered")
            if scope.cancelled_caught:
                outcomes.append("cancelled")
        except (PeerError, OverloadedError) as error:
            outcomes.append(type(error).__name__)

    async with anyio.create_task_group() as tasks:
        for k in range(200):
            tasks.start_soon(ask, k)
    assert statistics.mode(outcomes) == "answered"
    assert len(outcomes) == 200
    assert client._transport._http.num_busy == 0
    with anyio.fail_after(2):
        while server.num_running:
            await clock.sleep(0.005)


async def test_a_server_tells_which_requests_it_works_on_and_how_far_each_is(server, client):
    server.token_delay_s = 0.01
    sampling = Sampling(max_new_tokens=10_000)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(complete, client, sampling)
        while (told := await client.open_requests()).get("r1", 0) < 3:
            await clock.sleep(0.01)
        assert set(told) == {"r1"}
        tasks.cancel_scope.cancel()
    with anyio.fail_after(10):
        while await client.open_requests():
            await clock.sleep(0.01)


async def test_a_server_is_put_to_sleep_and_woken_up_with_the_token(server, client):
    await client.sleep(timeout_s=5.0)
    assert (await client.state()).is_asleep
    with pytest.raises(RefusedError):
        await complete(client)
    await client.wake_up(timeout_s=5.0)
    assert not (await client.state()).is_asleep
    assert [it for it in server.calls if it[0] == "POST" and "complet" not in it[1]] == [
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
    ]
    async with InstanceClient("vllm-0", server.url, token="wrong") as stranger:
        with pytest.raises(RejectedError, match="401"):
            await stranger.sleep(timeout_s=5.0)


async def test_a_server_that_does_not_sleep_or_wake_in_time_is_an_error(server, client):
    server.hang = {"/sleep"}
    server.fails = {"/wake_up"}
    with pytest.raises(PeerError, match="did not answer while answering /sleep"):
        await client.sleep(timeout_s=0.2)
    with pytest.raises(PeerError, match="out of memory"):
        await client.wake_up(timeout_s=5.0)
