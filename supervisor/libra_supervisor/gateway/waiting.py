"""Turns the scheduler's `Wait` into something a task can await: the one place where tasks wait."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from math import isinf
from typing import TYPE_CHECKING, Never

import anyio

from libra import clock
from libra.errors import DrainingError, OverloadedError
from libra.scheduling.request import Refused, Reservation, Routed, RouteRequest, Ticket

if TYPE_CHECKING:
    from libra.scheduling.scheduler import Scheduler

TICK_S = 0.25
"""Longest delay before a state that ends by time alone is noticed while requests wait."""


class Placement:
    """A place on one instance; ended by `complete` or `fail`, else cancelled by its owner."""

    def __init__(self, scheduler: "Scheduler", reservation: Reservation) -> None:
        self._scheduler = scheduler
        self.reservation = reservation

    def complete(self, num_output_tokens: int) -> None:
        """End with a whole answer of that many tokens."""
        self._scheduler.complete(self.reservation, num_output_tokens, clock.now())

    def fail_by_client(self) -> None:
        """End with a 4xx: the request was bad, the instance works."""
        self._scheduler.fail(self.reservation, "client_error", clock.now())

    def fail_by_saturation(self, retry_after_s: float | None) -> None:
        """End with a 429 or 503: the instance lives and asks for a pause."""
        self._scheduler.fail(
            self.reservation, "saturated", clock.now(), retry_after_s=retry_after_s
        )

    def fail_by_instance(self) -> None:
        """End with a 5xx, a broken connection or a timeout."""
        self._scheduler.fail(self.reservation, "fault", clock.now())


class WaitingRoom:
    """Places for tasks. `run` must be alive for as long as anybody may wait."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._somebody_waits = anyio.Event()

    @asynccontextmanager
    async def place(self, request: RouteRequest) -> AsyncGenerator[Placement]:
        """Hold a place for `request`, waited for if need be, given back however the block ends.

        Raises OverloadedError when the queue is full or the deadline passes, DrainingError when
        the run is stopping. A block that ends without `complete` or `fail` counts as cancelled.
        """
        reservation = await self._reserve(request)
        try:
            yield Placement(self._scheduler, reservation)
        finally:
            if self._scheduler.is_open(reservation):
                self._scheduler.cancel(reservation, clock.now())

    async def run(self) -> Never:
        """Let time-bound states end while requests wait."""
        while True:
            if self._scheduler.num_waiting == 0:
                self._somebody_waits = anyio.Event()
                await self._somebody_waits.wait()
            due_at = self._scheduler.next_due_at()
            soon = clock.now() + TICK_S
            await clock.sleep_until(soon if isinf(due_at) else min(due_at, soon))
            self._scheduler.on_tick(clock.now())

    async def _reserve(self, request: RouteRequest) -> Reservation:
        match self._scheduler.route(request, clock.now()):
            case Routed(_, reservation):
                return reservation
            case Refused() as refused:
                raise as_error(request, refused, waited_s=0.0)
            case wait:
                return await self._wait_for(wait.ticket)

    async def _wait_for(self, ticket: Ticket) -> Reservation:
        woken = anyio.Event()
        ticket.wake = woken.set
        self._somebody_waits.set()
        try:
            await woken.wait()
        except BaseException:
            # Cancelled, perhaps after a place was found: it must not stay taken.
            self._scheduler.abandon(ticket, clock.now())
            raise
        outcome = ticket.outcome
        if isinstance(outcome, Routed):
            return outcome.reservation
        waited_s = clock.now() - ticket.enqueued_at
        raise as_error(ticket.request, outcome, waited_s=waited_s)


def as_error(
    request: RouteRequest, refused: Refused | None, *, waited_s: float
) -> OverloadedError | DrainingError:
    """Turn a refusal into what the caller raises."""
    who = f"request {request.request_id}"
    if refused is None or refused.reason == "draining":
        return DrainingError(f"{who} is not accepted: the run is stopping")
    cause = refused.waiting_for or "a place"
    if refused.reason == "queue_full":
        return OverloadedError(f"{who} is refused: the waiting queue is full ({cause})")
    return OverloadedError(f"{who} found no instance within {waited_s:.1f} s ({cause})")
