"""What a server tells about the completions it is working on. Virtual time, fake engine."""

import anyio
import pytest

from libra import clock

pytestmark = pytest.mark.anyio


async def test_each_named_request_is_told_with_its_tokens_until_it_is_answered(app, running):
    async with running() as tasks:

        async def ask():
            await app.complete(max_tokens=100, request_id="g1/s0")

        tasks.start_soon(ask)
        await clock.sleep(0.105)
        assert await app.open_requests() == {"g1/s0": 10}
        await clock.sleep(0.2)
        assert await app.open_requests() == {"g1/s0": 30}
        await clock.sleep(1.0)
        assert await app.open_requests() == {}


async def test_the_choices_of_a_request_are_counted_together_and_unnamed_ones_are_not_told(
    app, running
):
    async with running() as tasks:

        async def ask(request_id):
            await app.complete(max_tokens=100, n=3, prompts=[[1], [2]], request_id=request_id)

        tasks.start_soon(ask, "g1/s0")
        tasks.start_soon(ask, None)
        await clock.sleep(0.105)
        # One prompt after the other, as the fake application hands them over.
        assert await app.open_requests() == {"g1/s0": 30}


async def test_a_request_that_is_on_its_way_into_the_engine_is_told(app, running):
    app.engine.add_s = 0.5
    async with running() as tasks:

        async def ask():
            await app.complete(max_tokens=100, request_id="g1/s0")

        tasks.start_soon(ask)
        await clock.sleep(0.2)
        assert await app.open_requests() == {"g1/s0": 0}


@pytest.mark.case("T-B54")
async def test_a_request_that_the_engine_lost_is_told_no_more(app, running):
    async with running() as tasks:

        async def ask(request_id):
            await app.complete(max_tokens=1000, request_id=request_id)

        tasks.start_soon(ask, "lost")
        await clock.sleep(0.05)
        tasks.start_soon(ask, "kept")
        await clock.sleep(0.05)
        del app.engine.requests[next(iter(app.engine.requests))]
        await clock.sleep(1.0)
        assert set(await app.open_requests()) == {"kept"}


async def test_a_reload_loses_no_request_neither_one_that_runs_nor_one_at_the_gate(app, running):
    app.engine.load_s = 2.0
    async with running() as tasks:

        async def ask(request_id):
            await app.complete(max_tokens=1000, request_id=request_id)

        tasks.start_soon(ask, "runs")
        await clock.sleep(0.205)
        assert await app.open_requests() == {"runs": 20}
        tasks.start_soon(app.reload, 1)
        await clock.sleep(0.3)
        tasks.start_soon(ask, "waits")
        for _ in range(4):
            await clock.sleep(0.4)
            with anyio.fail_after(0.1):  # while it loads, the engine itself answers nothing
                assert await app.open_requests() == {"runs": 20, "waits": 0}
        await clock.sleep(0.5)
        told = await app.open_requests()
        assert told["runs"] > told["waits"] > 0


async def test_only_the_supervisor_is_told(app):
    assert (await app.call("GET", "/libra/requests")).status == 401
