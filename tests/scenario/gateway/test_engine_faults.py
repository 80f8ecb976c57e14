"""Engines that answer badly, break off or are full: who is blamed, and what the client is told."""

import socket
from contextlib import AsyncExitStack, ExitStack, contextmanager

import anyio
import pytest

from fake_upstream import FakeUpstream
from gateways import eventually, running_gateway
from libra import clock
from libra_supervisor.gateway.upstream import PhaseLimits

pytestmark = pytest.mark.anyio
ASK = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 5}


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.parametrize("status", [301, 408, 500, 501, 504])
async def test_what_an_engine_did_not_answer_well_is_its_fault_and_never_504(status):
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.refuses_always = status
        for _ in range(3):
            answered, headers, _ = await gateway.post(ASK)
            assert (answered, headers["X-Should-Retry"]) == (502, "false")
        assert [type(n).__name__ for n in gateway.scheduler.take_notices()] == ["BreakerOpened"]


@pytest.mark.case("R-B09")
async def test_an_engine_says_itself_how_long_it_wants_to_be_left_alone():
    async with AsyncExitStack() as stack:
        full, free = [await stack.enter_async_context(FakeUpstream(f"i{k}")) for k in range(2)]
        gateway = await stack.enter_async_context(running_gateway(full, free))
        full.next_statuses.append(503)
        full.retry_after = "4"
        for _ in range(2):
            assert (await gateway.post(ASK))[0] == 200
        gateway.scheduler.on_tick(clock.now() + 2.0)
        views = {v.instance_id: v.removed_by for v in gateway.scheduler.instances(clock.now())}
        assert views == {"i0": "saturated", "i1": None}


@pytest.mark.case("R-B34", "R-B40")
async def test_a_reused_connection_that_breaks_after_the_engine_worked_is_not_stale(monkeypatch):
    monkeypatch.setattr("libra_supervisor.gateway.upstream.STALE_WITHIN_S", 0.2)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeUpstream(f"i{k}")) for k in range(2)]
        gateway = await stack.enter_async_context(running_gateway(*engines))
        for _ in engines:
            assert (await gateway.post(ASK))[0] == 200
        engines[0].is_hanging = engines[1].is_hanging = True
        async with anyio.create_task_group() as tg:

            async def ask():
                status, headers, _ = await gateway.post(ASK)
                assert (status, headers["X-Should-Retry"]) == (502, "false")

            tg.start_soon(ask)
            await eventually(lambda: any(engine.num_running for engine in engines))
            await clock.sleep(0.3)
            (working,) = (engine for engine in engines if engine.num_running)
            for engine in engines:
                engine.is_hanging = False
            await working.die()
        assert sum(len(engine.bodies) for engine in engines) == 3


@pytest.mark.case("R-B40")
async def test_a_fresh_connection_that_is_dropped_is_not_tried_again():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.drops_all = True
        status, headers, _ = await gateway.post(ASK)
        assert (status, headers["X-Should-Retry"], len(engine.bodies)) == (502, "false", 1)


@contextmanager
def port_that_accepts_nobody():
    """A listener whose queue is full: the kernel does not answer further connections."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.mark.case("R-B13")
async def test_an_engine_that_does_not_take_the_connection_costs_the_connect_limit_only():
    with port_that_accepts_nobody() as port:
        silent, alive = FakeUpstream("i0"), FakeUpstream("i1")
        silent.port = port
        async with alive, running_gateway(silent, alive, limits=PhaseLimits(connect_s=0.3)) as it:
            with anyio.fail_after(20):
                seen = [(await it.post(ASK))[1]["X-Libra-Instance"] for _ in range(6)]
            assert seen == ["i1"] * 6


@pytest.mark.case("R-B38")
async def test_streams_that_break_off_in_a_row_open_the_engines_breaker():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.reset_after_tokens = 2
        for _ in range(3):
            path = gateway.url + "/v1/completions"
            async with gateway.client.post(path, json=ASK | {"stream": True}) as answer:
                await answer.read()
        assert [type(n).__name__ for n in gateway.scheduler.take_notices()] == ["BreakerOpened"]


@pytest.mark.case("R-B90", "R-B92")
async def test_every_version_that_the_engine_names_is_passed_on():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.versions = "3,4"
        _, headers, _ = await gateway.post(ASK)
        assert headers["X-Libra-Policy-Version"] == "0"  # as it was when the request was placed
        assert headers["X-Libra-Policy-Versions"] == "3,4"


@pytest.mark.case("R-B13")
async def test_a_client_that_reads_slowly_is_not_the_engines_silence():
    async with (
        FakeUpstream() as engine,
        running_gateway(engine, limits=PhaseLimits(idle_s=0.3)) as gateway,
    ):
        engine.num_tokens, engine.padding = 2000, "x" * 10_000
        path = gateway.url + "/v1/completions"
        async with gateway.client.post(path, json=ASK | {"stream": True}) as answer:
            await clock.sleep(1.0)  # far more is under way than all buffers hold
            assert engine.num_running == 1
            content = await answer.read()
        assert content.count(b"\n\n") == 2002
        assert content.endswith(b"data: [DONE]\n\n")


async def test_answers_are_asked_for_uncompressed_whatever_the_client_takes():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        await gateway.post(ASK, Accept_Encoding="gzip, deflate")
        assert engine.headers[0]["Accept-Encoding"] == "identity"
