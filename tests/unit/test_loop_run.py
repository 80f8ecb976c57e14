"""The loop itself: one event after the other, and a look around after it stood still."""

import anyio
import pytest
import trio.testing

from libra import clock
from libra_supervisor.events import Ticked
from libra_supervisor.inbox import Inbox
from libra_supervisor.loop.run import run_loop, tick

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Counter:
    """Ends after so many events."""

    def __init__(self, most):
        self.left, self.handled_at = most, []

    is_ending = property(lambda self: not self.left)

    def on_event(self, _event, at):
        self.left -= 1
        self.handled_at.append(at.now)
        return ()


async def test_after_a_stall_the_look_around_comes_before_the_next_event():
    control, seen = Counter(12), []

    async def on_stall(stalled_s):
        seen.append((len(control.handled_at), stalled_s))

    def note(_event):
        if len(control.handled_at) == 5:
            trio.lowlevel.current_clock().jump(30.0)

    inbox = Inbox()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick, inbox)
        await run_loop(inbox, control, lambda _: None, note=note, on_stall=on_stall)
        tasks.cancel_scope.cancel()
    inbox.close()
    [(num_before, stalled_s)] = seen
    assert num_before == 6
    assert stalled_s >= 30.0


async def test_a_look_around_that_fails_keeps_the_event_from_being_handled():
    control, inbox = Counter(2), Inbox()

    async def on_stall(_stalled_s):
        raise ValueError("replaced")

    async with anyio.create_task_group() as tasks:

        async def late():
            await clock.sleep(5.0)
            await inbox.post(Ticked())

        tasks.start_soon(late)
        with pytest.raises(ValueError, match="replaced"):
            await run_loop(inbox, control, print, note=print, on_stall=on_stall)
    inbox.close()
    assert control.handled_at == []
