"""Turns the scheduler's `Wait` into something a task can await: the one place where tasks wait."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from math import isinf
from typing import TYPE_CHECKING, Never, TypeVar

import anyio
import msgspec

from libra import clock
from libra.errors import (
    DrainingError,
    LibraError,
    OverloadedError,
    PeerError,
    RefusedError,
    RejectedError,
)
from libra.ids import InstanceId, RequestId
from libra.scheduling.request import Refused, Reservation, Routed, RouteRequest, Ticket
from libra.tracing.span import SpanWriter
from libra_supervisor.gateway.request_trace import RequestTrace

if TYPE_CHECKING:
    from libra.scheduling.scheduler import Scheduler

T = TypeVar("T")

TICK_S = 0.25
"""Longest delay before a state that ends by time alone is noticed while requests wait."""


class SaturatedError(OverloadedError):
    """An instance answered 429 or 503: it lives and asks for a pause."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Placement:
    """A place on one instance; whoever holds it says how the request ended."""

    def __init__(self, scheduler: "Scheduler", reservation: Reservation) -> None:
        self._scheduler = scheduler
        self.reservation = reservation
        self.is_pinned = False
        """Part of the answer is out: the request cannot be asked elsewhere any more."""

    def pin(self) -> None:
        """Part of the answer is about to go out."""
        self.is_pinned = True

    def complete(self, num_output_tokens: int | None) -> None:
        """End with a whole answer of that many tokens; None: nobody counted them."""
        self._scheduler.complete(self.reservation, num_output_tokens, clock.now())

    def fail(self, error: LibraError) -> None:
        """End without a whole answer; the error's kind says whether the instance is to blame.

        RejectedError: the request was wrong. RefusedError: the instance is full. PeerError: it
        broke. Any other counts as cancelled.
        """
        now = clock.now()
        match error:
            case RejectedError():
                self._scheduler.fail(self.reservation, "client_error", now)
            case SaturatedError():
                self._scheduler.fail(
                    self.reservation, "saturated", now, retry_after_s=error.retry_after_s
                )
            case RefusedError():
                self._scheduler.fail(self.reservation, "saturated", now)
            case PeerError():
                self._scheduler.fail(self.reservation, "fault", now)
            case _:
                self._scheduler.cancel(self.reservation, now)


class WaitingRoom:
    """Places for tasks. `run` must be alive for as long as anybody may wait."""

    def __init__(self, scheduler: "Scheduler", *, spans: SpanWriter | None = None) -> None:
        """`spans` gets each request's wait and its time on the instance."""
        self._scheduler = scheduler
        self._trace = RequestTrace(spans)
        self._somebody_waits = anyio.Event()
        self._at: dict[InstanceId, dict[Placement, anyio.CancelScope]] = {}
        self._place_of: dict[RequestId, InstanceId | None] = {}

    @asynccontextmanager
    async def place(self, request: RouteRequest) -> AsyncGenerator[Placement]:
        """A place for `request`, waited for if need be, given back however the block ends.

        A block that raises a LibraError ends as `Placement.fail` says; one that ends in any other
        way without `complete` counts as cancelled. Raises OverloadedError when the queue is full
        or the deadline passes, DrainingError when the run is stopping.
        """
        reservation = await self._reserve(request)
        routed = self._trace.on_placed(request, reservation)
        placement = Placement(self._scheduler, reservation)
        try:
            yield placement
        except LibraError as error:
            if self._scheduler.is_open(reservation):
                placement.fail(error)
            raise
        finally:
            if self._scheduler.is_open(reservation):
                self._scheduler.cancel(reservation, clock.now())
            self._trace.on_ended(routed)

    async def serve(self, request: RouteRequest, do: Callable[[Placement], Awaitable[T]]) -> T:
        """Place `request` and `do` it there; place it again when the engine refuses it as full.

        All within one deadline, but for a request that was taken back (`give_back`), which begins
        anew. What else `do` raises ends the request as in `place`.
        """
        if request.deadline_at is None:
            request = self._with_deadline(request)
        try:
            while True:
                is_placed = False
                self._place_of[request.request_id] = None
                try:
                    async with self.place(request) as placement:
                        is_placed = True
                        self._place_of[request.request_id] = placement.reservation.instance_id
                        with self._scope_of(placement) as scope, scope:
                            return await do(placement)
                except RefusedError:
                    if not is_placed:
                        raise
                else:
                    request = self._with_deadline(request)
        finally:
            self._place_of.pop(request.request_id, None)

    def places(self) -> dict[RequestId, InstanceId | None]:
        """Where every request of `serve` is; None: it waits for a place."""
        return dict(self._place_of)

    def place_of(self, request_id: RequestId) -> InstanceId | None:
        """Where a request of `serve` is; None: it waits for a place, or is over."""
        return self._place_of.get(request_id)

    def give_back(self, instance_id: InstanceId) -> int:
        """Take back what `serve` has placed there, to be placed anew; returns how many those are.

        The instance must not be routed to any more. Requests of which part of the answer is out
        stay where they are.
        """
        taken = [s for p, s in self._at.get(instance_id, {}).items() if not p.is_pinned]
        for scope in taken:
            scope.cancel()
        return len(taken)

    def _with_deadline(self, request: RouteRequest) -> RouteRequest:
        deadline_at = clock.now() + self._scheduler.queue_deadline_s
        return msgspec.structs.replace(request, deadline_at=deadline_at)

    @contextmanager
    def _scope_of(self, placement: Placement) -> Iterator[anyio.CancelScope]:
        """What `give_back` cancels."""
        there = self._at.setdefault(placement.reservation.instance_id, {})
        there[placement] = scope = anyio.CancelScope()
        try:
            yield scope
        finally:
            del there[placement]
            if not there:
                self._at.pop(placement.reservation.instance_id, None)

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
        now = clock.now()
        match self._scheduler.route(request, now):
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
            with self._trace.waiting(ticket.request):
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
