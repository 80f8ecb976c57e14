"""Requests in the phase trace: how long each waited for a place, and was on its instance."""

from collections.abc import Generator
from contextlib import contextmanager

import msgspec

from libra import clock
from libra.ids import InstanceId
from libra.scheduling.request import Reservation, RouteRequest
from libra.tracing.lanes import Lanes
from libra.tracing.span import Phase, SpanWriter


class Routed(msgspec.Struct, frozen=True):
    """A request on an instance."""

    request: RouteRequest
    instance_id: InstanceId
    lane: int
    placed_at: float


class RequestTrace:
    """Spans `queue_wait` and `route`; without a writer it does nothing."""

    def __init__(self, spans: SpanWriter | None) -> None:
        self._spans = spans
        self._queue = Lanes("queue")
        self._lanes_of: dict[InstanceId, Lanes] = {}

    @contextmanager
    def waiting(self, request: RouteRequest) -> Generator[None]:
        """Record the block as the request's wait, however it ends."""
        if self._spans is None:
            yield
            return
        lane, began_at = self._queue.take(), clock.monotonic()
        try:
            yield
        finally:
            self._queue.give_back(lane)
            self._spans.record(
                Phase.QUEUE_WAIT,
                began_at,
                clock.monotonic(),
                track=self._queue.track(lane),
                request=request.request_id,
            )

    def on_placed(self, request: RouteRequest, reservation: Reservation) -> Routed | None:
        if self._spans is None:
            return None
        instance_id = reservation.instance_id
        lanes = self._lanes_of.setdefault(instance_id, Lanes(instance_id))
        return Routed(request, instance_id, lanes.take(), clock.monotonic())

    def on_ended(self, routed: Routed | None) -> None:
        if self._spans is None or routed is None:
            return
        lanes = self._lanes_of[routed.instance_id]
        lanes.give_back(routed.lane)
        self._spans.record(
            Phase.ROUTE,
            routed.placed_at,
            clock.monotonic(),
            track=lanes.track(routed.lane),
            request=routed.request.request_id,
            prompt_tokens=routed.request.num_prompt_tokens,
        )
