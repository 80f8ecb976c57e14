"""The loop: takes events one by one, decides, begins effects. The only writer of control state."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing

from libra import clock
from libra_supervisor.events import Event, Ticked
from libra_supervisor.inbox import Inbox
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.control import Control
from libra_supervisor.loop.moment import Moment

TICK_S = 0.5


async def run_loop(
    inbox: Inbox[Event],
    control: Control,
    execute: Callable[[Command], None],
    *,
    note: Callable[[Event], None],
    on_stall: Callable[[float], Awaitable[None]] | None = None,
) -> None:
    """Handle events until the run ends (`Control.is_ending`); `note` hears each one first.

    There is a tick every `TICK_S`: after a longer pause `on_stall` is waited for before anything
    else, with the seconds that it took.
    """
    handled_at = clock.now()
    async with aclosing(inbox.events()) as coming:
        async for event in coming:
            stalled_s = clock.now() - handled_at
            if on_stall is not None and stalled_s > 2 * TICK_S:
                await on_stall(stalled_s)
            handled_at = clock.now()
            note(event)
            at = Moment(clock.now(), clock.wall_ns())
            for command in control.on_event(event, at):
                execute(command)
            if control.is_ending:
                return


async def tick(inbox: Inbox[Event]) -> None:
    """Post `Ticked` twice a second, so that deadlines are looked at when nothing else happens."""
    while True:
        await clock.sleep(TICK_S)
        await inbox.post(Ticked())
