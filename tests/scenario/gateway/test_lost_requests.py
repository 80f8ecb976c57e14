"""A request that its engine lost: what a client of the gateway sees, and after how long."""

from random import Random

import anyio
import pytest

from fake_upstream import FakeUpstream
from fake_vllm import FakeVllm
from gateways import running_gateway
from libra import clock
from libra.errors import RejectedError
from libra_supervisor.instances import request_watch
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.request_watch import RequestWatch

pytestmark = pytest.mark.anyio
ASK = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 5}
SILENCE_S = 0.6


@pytest.fixture
def anyio_backend():
    return "asyncio"


class World:
    """One engine that is asked ten times in the silence that it is allowed."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(request_watch, "PERIOD_S", SILENCE_S / 10)
        self.watch = RequestWatch(rng=Random(1))

    def patience_with(self, _instance_id, request_id):
        return self.watch.patience(request_id, silence_s=SILENCE_S)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


class TellingClient:
    def __init__(self, names=(), error=None):
        self.names, self.error = names, error

    async def open_requests(self):
        if self.error is not None:
            raise self.error
        return dict.fromkeys(self.names, 0)


@pytest.mark.case("T-B54", "R-B40")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_lost_request_ends_as_one_that_an_engine_failed(world, is_stream):
    async with (
        FakeUpstream() as engine,
        running_gateway(engine, patience_with=world.patience_with) as gateway,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(world.watch.run, TellingClient())
        engine.is_hanging = True
        status, headers, answer = await gateway.post(ASK | {"stream": is_stream}, X_Request_Id="q7")
        assert (status, headers["X-Should-Retry"]) == (502, "false")
        assert answer["error"]["message"] == f"q7 was lost: no sign of it for {SILENCE_S} s"
        assert gateway.scheduler.num_in_flight() == 0
        with anyio.fail_after(5):
            while engine.num_running:
                await clock.sleep(0.01)
        assert len(engine.bodies) == 1
        tasks.cancel_scope.cancel()


@pytest.mark.case("T-B77")
async def test_an_answer_may_take_long_while_the_engine_says_that_it_has_the_request(world):
    async with (
        FakeVllm("i0") as server,
        InstanceClient("i0", server.url, token=server.token) as client,
        FakeUpstreamAt(server.url) as engine,
        running_gateway(engine, patience_with=world.patience_with) as gateway,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(world.watch.run, client)
        server.token_delay_s = SILENCE_S / 2
        began = clock.now()
        # One client names its requests alike, the other not at all.
        statuses = []
        async with anyio.create_task_group() as asking:

            async def ask(**headers):
                statuses.append((await gateway.post(ASK, **headers))[0])

            asking.start_soon(lambda: ask(X_Request_Id="same"))
            asking.start_soon(lambda: ask(X_Request_Id="same"))
            asking.start_soon(ask)
        assert statuses == [200, 200, 200]
        assert clock.now() - began > 2 * SILENCE_S
        assert ("GET", "/libra/requests") in server.calls
        tasks.cancel_scope.cancel()


async def test_an_engine_that_cannot_tell_is_not_taken_to_have_lost_anything(world):
    async with (
        FakeUpstream() as engine,
        running_gateway(engine, patience_with=world.patience_with) as gateway,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(world.watch.run, TellingClient(error=RejectedError("404")))
        engine.token_delay_s = SILENCE_S / 2
        assert (await gateway.post(ASK))[0] == 200
        tasks.cancel_scope.cancel()


class FakeUpstreamAt:
    """What `running_gateway` needs of an engine that somebody else runs."""

    def __init__(self, url):
        self.name, self.url = "i0", url

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_exc):
        return None
