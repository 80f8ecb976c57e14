"""What the guard of a server makes of /sleep and /wake_up."""

import anyio
import pytest

from guarded_app import TOKEN
from libra import clock

pytestmark = pytest.mark.anyio


async def call(app, path, **how):
    return await app.call("POST", path, token=TOKEN, **how)


async def test_nothing_is_loaded_into_a_sleeping_engine(app, running):
    async with running():
        await app.reload(1)
        await call(app, "/sleep")
        app.engine.calls.clear()
        refused = await app.reload(2)
        touched = list(app.engine.calls)
        asleep = await app.state()
        completion = await app.complete()
        await call(app, "/wake_up")
        woken = await app.state()
        too_early = await app.complete()
        ack = await app.reload(2)
        answered = await app.complete()
    assert "sleeps" in refused.error
    assert touched == []
    assert (asleep["is_asleep"], asleep["policy_version"]) == (True, None)
    assert completion.status == too_early.status == 503
    assert (woken["is_asleep"], woken["policy_version"]) == (False, None)
    assert ack.error is None
    assert answered.status == 200


@pytest.mark.parametrize("how", ["fails", "in part"])
async def test_an_engine_that_has_not_all_of_its_memory_again_still_sleeps(app, running, how):
    async with running():
        await call(app, "/sleep")
        if how == "fails":
            app.inner.statuses["/wake_up"] = 500
            await call(app, "/wake_up")
        else:
            await call(app, "/wake_up", query=b"tags=weights")
        assert (await app.state())["is_asleep"]
        assert "sleeps" in (await app.reload(1)).error


async def test_a_call_to_sleep_waits_for_a_reload_to_end(app, running):
    acks = []

    async def load():
        acks.append(await app.reload(1))

    async with running():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await clock.sleep(0.1)
            await call(app, "/sleep")
            assert acks, "the engine was put to sleep while it loaded weights"
        assert acks[0].error is None
        assert (await app.state())["is_asleep"]
