"""The order of what followers say, and who waits for it."""

import anyio
import pytest
import trio.testing

from libra import clock
from libra_supervisor.nodes.postbox import Postbox

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def test_who_waits_waits_for_what_was_put_in_before_and_for_nothing_after():
    heard, waited = [], []

    async def post(event):
        await clock.sleep(1.0)
        heard.append(event)

    async def wait(box):
        await box.until_passed_on()
        waited.append((clock.now(), tuple(heard)))

    async with anyio.create_task_group() as tasks:
        box = Postbox(post)
        tasks.start_soon(box.run)
        await wait(box)
        box.put(1)
        await clock.sleep(0.5)
        # Nothing waits any more, and the first is still being told.
        assert box.depth == 0
        tasks.start_soon(wait, box)
        await clock.sleep(0.1)
        box.put()
        box.put(2, 3)
        tasks.start_soon(wait, box)
        await clock.sleep(0.1)
        box.put(4)
        await clock.sleep(10.0)
        tasks.cancel_scope.cancel()
    assert heard == [1, 2, 3, 4]
    began = waited[0][0]
    assert [(round(at - began, 3), told) for at, told in waited] == [
        (0.0, ()), (1.0, (1,)), (3.0, (1, 2, 3))
    ]  # fmt: skip
