"""What tells others about a run, for as long as it goes on, and decides nothing."""

from collections.abc import Awaitable, Callable
from typing import Final

from msgspec.structs import asdict

from libra import clock
from libra.scheduling.notice import BreakerClosed, FeedbackRestored, RestartSeen
from libra.scheduling.scheduler import Scheduler
from libra.tracing.log import get_log
from libra_supervisor.app.operator import Operator
from libra_supervisor.display.console import Display
from libra_supervisor.display.progress import plain_line
from libra_supervisor.events import Event, InstanceDoubted
from libra_supervisor.notify import Notifier

SHOW_PERIOD_S: Final = 0.5
NOTICE_PERIOD_S: Final = 1.0
NOTIFY_PERIOD_S: Final = 5.0
START_EXTENSION_S: Final = 60.0

_log = get_log()


async def show(display: Display, operator: Operator) -> None:
    while True:
        display.show(operator.progress())
        await clock.sleep(SHOW_PERIOD_S)


async def tell_systemd(notifier: Notifier, operator: Operator) -> None:
    while not operator.is_ready():
        notifier.extend_start(START_EXTENSION_S)
        notifier.status(operator.progress().waiting_for)
        await clock.sleep(NOTIFY_PERIOD_S)
    notifier.ready(operator.progress().waiting_for)
    while True:
        await clock.sleep(NOTIFY_PERIOD_S)
        notifier.status(plain_line(operator.progress()))


async def say_notices(scheduler: Scheduler, post: Callable[[Event], Awaitable[None]]) -> None:
    """Log what the scheduler finds worth saying once, and have doubts looked into."""
    while True:
        for notice in scheduler.take_notices():
            is_good = isinstance(notice, FeedbackRestored | BreakerClosed)
            say = _log.info if is_good else _log.warning
            say("scheduler_notice", kind=type(notice).__name__, **asdict(notice))
            if isinstance(notice, RestartSeen):
                await post(InstanceDoubted(notice.instance_id))
        await clock.sleep(NOTICE_PERIOD_S)
