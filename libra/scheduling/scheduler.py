"""The scheduler: one object that places every request of a run, our own and the gateway's.

Pipeline per request: ready at the wanted version -> KV capacity known (kv_tokens) -> admission
(breaker, saturation, occupancy) -> queue cap -> prefix affinity -> strategy. When a filter leaves
nobody, the request waits in a bounded queue with a deadline; it never goes to a server that is
not ready. Placing and giving back cost O(log n), independent of the strategy and metric.

Synchronous and single-threaded. Between two calls nothing changes: call `on_tick` when
`next_due_at` has come.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias, assert_never

from libra.errors import InvariantError
from libra.ids import Incarnation, InstanceId, PolicyVersion
from libra.scheduling.affinity import AffinityCounts, PrefixAffinity, is_kept
from libra.scheduling.expected_output import ExpectedOutput
from libra.scheduling.explanation import (
    Explanation,
    InstanceView,
    reason_in_words,
    view_of,
    views_in_order,
)
from libra.scheduling.fleet import Fleet
from libra.scheduling.ledger import Ledger
from libra.scheduling.load import LoadSnapshot, OwnLoad, RemoteLoad
from libra.scheduling.notice import Notice
from libra.scheduling.queue import WaitingQueue
from libra.scheduling.request import (
    Decision,
    FailureKind,
    RefusalReason,
    Refused,
    Reservation,
    Routed,
    RouteRequest,
    Ticket,
    Wait,
)
from libra.scheduling.slot import InstanceSpec, Slot
from libra.scheduling.standing import Standing

if TYPE_CHECKING:
    from libra.config.rollout import SchedulingConfig


Explained: TypeAlias = Callable[[RouteRequest, Explanation], None]


class Scheduler:
    """Places requests on instances. `now` is seconds on one monotonic clock."""

    def __init__(
        self,
        config: "SchedulingConfig",
        *,
        kv_capacity_by_tp: Mapping[int, int] | None = None,
        explained: Explained | None = None,
    ) -> None:
        """`kv_capacity_by_tp`: estimated KV capacity in tokens, from `libra.models.kv_capacity`.

        `explained` is told the reasons of every decision as it is taken, those to wait included.
        Each costs one pass over the fleet, so leave it out unless somebody reads them.
        """
        self._config = config
        self._explained = explained
        self._affinity = (
            PrefixAffinity(config.prefix_affinity_max_entries) if config.prefix_affinity else None
        )
        self._standing = Standing(config, kv_capacity_by_tp or {})
        self._fleet = Fleet(config, self._standing, self._affinity)
        self._ledger = Ledger()
        self._expected = ExpectedOutput()
        self._queue = WaitingQueue(config.queue_capacity)
        self._is_admitting = True

    # Requests

    def route(self, request: RouteRequest, now: float) -> Decision:
        """Place `request` now, queue it, or turn it away.

        A `Wait` holds a ticket whose `outcome` is set later, by any call that frees capacity; the
        caller gives up with `abandon`.
        """
        if now >= self._standing.next_due or self._queue.next_deadline <= now:
            self.on_tick(now)
        if not self._is_admitting:
            return Refused("draining", None)
        if request.deadline_at is not None and now >= request.deadline_at:
            return Refused("deadline", None)
        return self._place(request, now) or self._enqueue(request, now)

    def complete(self, reservation: Reservation, num_output_tokens: int | None, now: float) -> bool:
        """The whole answer arrived. False, and no effect, when it was given back before.

        None: nobody counted its tokens, so nothing is learned about lengths.
        """
        slot = self._ledger.release(reservation)
        if slot is None:
            return False
        if num_output_tokens is not None:
            self._expected.on_completed(reservation.category, num_output_tokens)
        if slot.breaker.is_calm or slot.is_retired:
            self._standing.on_load_fell(slot, now)
        else:
            self._on_answered(slot, now)
        if self._queue:
            self._dispatch(now)
        return True

    def fail(
        self,
        reservation: Reservation,
        kind: FailureKind,
        now: float,
        *,
        retry_after_s: float | None = None,
    ) -> bool:
        """End without a whole answer, by `kind`. False as in `complete`."""
        slot = self._ledger.release(reservation)
        if slot is None:
            return False
        if not slot.is_retired:
            self._blame(slot, reservation, kind, retry_after_s, now)
            self._refreshed(slot, now)
        return True

    def cancel(self, reservation: Reservation, now: float) -> bool:
        """End because the caller went away: no word about the instance. False as in `complete`."""
        slot = self._ledger.release(reservation)
        if slot is None:
            return False
        slot.breaker.on_cancelled(reservation.serial)
        self._refreshed(slot, now)
        return True

    def abandon(self, ticket: Ticket, now: float) -> None:
        """Forget a waiting request whose caller went away; a place it already got is given back."""
        if isinstance(ticket.outcome, Routed):
            self.cancel(ticket.outcome.reservation, now)
        else:
            self._queue.remove(ticket)

    def stop_admitting(self) -> None:
        """Turn away everything new and everything that waits; what is in flight goes on."""
        self._is_admitting = False
        while (ticket := self._queue.pop_any()) is not None:
            self._refuse(ticket, "draining")

    def is_open(self, reservation: Reservation) -> bool:
        """Tell whether `reservation` still holds its place."""
        return self._ledger.is_open(reservation)

    # Time

    def next_due_at(self) -> float:
        """When `on_tick` should be called next; inf when time alone changes nothing."""
        return min(self._standing.next_due, self._queue.next_deadline)

    def on_tick(self, now: float) -> None:
        """Let time-bound states and waiting deadlines end."""
        self._standing.advance(now)
        while (ticket := self._queue.pop_expired(now)) is not None:
            self._refuse(ticket, "deadline")
        if self._queue:
            self._dispatch(now)

    # Instances

    def observe_instance(self, spec: InstanceSpec, now: float) -> None:
        """What discovery sees. A known incarnation is no news, a new one an unplanned restart."""
        self._fleet.observe(spec, keep_prefixes=False, now=now)
        self._dispatch(now)

    def restart_instance(self, spec: InstanceSpec, now: float, *, is_planned: bool) -> None:
        """A new process answers under a known id; a planned one (a reload) keeps its prompts."""
        self._fleet.observe(spec, keep_prefixes=is_planned, now=now)
        self._dispatch(now)

    def set_ready(self, instance_id: InstanceId, is_ready: bool, now: float) -> None:
        """Health as the supervisor judges it. Unknown instances are ignored: they are gone."""
        self._fleet.set_ready(instance_id, is_ready, now)
        self._dispatch(now)

    def set_version(
        self, instance_id: InstanceId, version: PolicyVersion | None, now: float
    ) -> None:
        """The policy version the instance answers with; None: unknown, so not routable."""
        self._fleet.set_version(instance_id, version, now)
        self._dispatch(now)

    def set_version_floor(self, version: PolicyVersion, now: float) -> None:
        """Instances below `version` are stale from now on: no candidates for anyone."""
        self._standing.set_floor(version, now)
        self._dispatch(now)

    def drain_instance(self, instance_id: InstanceId, is_draining: bool, now: float) -> None:
        """No new requests while draining; watch `num_in_flight` for the end."""
        self._fleet.set_draining(instance_id, is_draining, now)
        self._dispatch(now)

    def remove_instance(self, instance_id: InstanceId) -> None:
        """Forget the instance; open reservations on it can still be given back, without effect."""
        self._fleet.remove(instance_id)

    # Load from outside

    def on_snapshot(self, instance_id: InstanceId, snapshot: LoadSnapshot, now: float) -> None:
        """One scrape. Late ones of an earlier incarnation, and repeated ones, are ignored."""
        mean = self._expected.mean_request_tokens
        self._fleet.on_snapshot(instance_id, snapshot, tokens_per_request=mean, now=now)
        self._dispatch(now)

    def on_kv_capacity_measured(self, instance_id: InstanceId, num_tokens: int, now: float) -> None:
        """What the server profiled at start-up."""
        self._fleet.set_measured_kv_tokens(instance_id, num_tokens, now)
        self._dispatch(now)

    def on_remote_load(
        self, loads: Mapping[tuple[InstanceId, Incarnation], RemoteLoad], now: float
    ) -> None:
        """The summed in-flight load of the other schedulers; what is absent is 0."""
        self._fleet.set_remote_load(loads, now)
        self._dispatch(now)

    @property
    def load_revision(self) -> int:
        """Grows with every change of `own_load`."""
        return self._ledger.revision

    def own_load(self) -> tuple[OwnLoad, ...]:
        """What this scheduler has in flight, exactly, for the others."""
        return self._fleet.own_load()

    # Views

    def num_in_flight(self, instance_id: InstanceId | None = None) -> int:
        """Open reservations on the current incarnation of an instance; on everything for None."""
        if instance_id is None:
            return len(self._ledger)
        slot = self._fleet.get(instance_id)
        return 0 if slot is None else slot.num_requests

    @property
    def queue_deadline_s(self) -> float:
        return self._config.queue_deadline_s

    @property
    def version_floor(self) -> PolicyVersion:
        return self._standing.floor

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def affinity_counts(self) -> AffinityCounts:
        return AffinityCounts() if self._affinity is None else self._affinity.counts

    @property
    def num_repeated_releases(self) -> int:
        """Releases of what was not open. More than a few mean a bug in a caller."""
        return self._ledger.num_repeated_releases

    def expected_output_tokens(self) -> dict[str, float]:
        """The learned output length by category."""
        return self._expected.means()

    def instances(self, now: float) -> tuple[InstanceView, ...]:
        """Every instance as routing sees it, in the order in which they came."""
        return tuple(view_of(slot, min_version=None, now=now) for slot in self._fleet.slots())

    def explain(self, request: RouteRequest, now: float) -> Explanation:
        """Where `request` would go at `now`, and why. Changes nothing; one pass over the fleet."""
        best = self._best_for(request)
        num_tokens = self._expected.request_tokens(request)
        sticky = self._sticky(request)
        is_sticky = (
            best is not None
            and sticky is not None
            and is_kept(sticky, best, num_tokens, request.min_version)
        )
        choice = sticky if is_sticky else best
        reason = reason_in_words(
            best,
            sticky,
            is_kept=is_sticky,
            avoided=request.avoided,
            wait_reason=self._standing.wait_reason(),
        )
        return Explanation(
            choice=None if choice is None else choice.instance_id,
            reason=reason,
            load_metric=self._config.load_metric,
            strategy=self._config.load_balance_strategy,
            expected_tokens=num_tokens,
            num_waiting=len(self._queue),
            instances=views_in_order(self._fleet.slots(), min_version=request.min_version, now=now),
        )

    def take_notices(self) -> tuple[Notice, ...]:
        """What has been worth saying since the last call, oldest first."""
        notices = tuple(self._standing.notices)
        self._standing.notices.clear()
        return notices

    # Placing

    def _place(self, request: RouteRequest, now: float) -> Routed | None:
        if self._explained is not None:
            self._explained(request, self.explain(request, now))
        best = self._best_for(request)
        if best is None:
            return None
        num_tokens = self._expected.request_tokens(request)
        affinity, prompt_id = self._affinity, request.prompt_id
        if affinity is not None and prompt_id is not None and not request.avoided:
            best = affinity.choose(
                prompt_id, best, num_tokens=num_tokens, min_version=request.min_version
            )
        reservation = self._ledger.reserve(best, request, num_tokens, now)
        self._expected.on_reserved(num_tokens)
        self._standing.on_picked(best, now)
        if not best.breaker.is_calm:
            best.breaker.on_routed(reservation.serial, now)
            self._standing.refresh(best, now)
        return Routed(best.instance_id, reservation)

    def _best_for(self, request: RouteRequest) -> Slot | None:
        """The most preferred candidate; one that the request avoids if there is no other."""
        order = self._standing.order
        best = order.first(request.min_version)
        if best is None or best.instance_id not in request.avoided:
            return best
        return order.first_but(request.avoided, request.min_version) or best

    def _sticky(self, request: RouteRequest) -> Slot | None:
        if self._affinity is None or request.prompt_id is None or request.avoided:
            return None
        return self._affinity.peek(request.prompt_id)

    def _enqueue(self, request: RouteRequest, now: float) -> Wait | Refused:
        reason = self._standing.wait_reason()
        if self._queue.is_full:
            return Refused("queue_full", reason)
        deadline_at = request.deadline_at
        if deadline_at is None:
            deadline_at = now + self._config.queue_deadline_s
        ticket = Ticket(self._ledger.next_serial(), request, now, deadline_at)
        self._queue.push(ticket)
        return Wait(reason, ticket)

    def _dispatch(self, now: float) -> None:
        """Place waiting requests, oldest first, while somebody can take them."""
        while self._queue:
            newest = self._standing.order.newest_version()
            ticket = None if newest is None else self._queue.oldest_for(newest)
            if ticket is None:
                return
            self._queue.remove(ticket)
            routed = self._place(ticket.request, now)
            if routed is None:
                raise InvariantError(f"no candidate at {newest}, which the order just named")
            _settle(ticket, routed)

    def _refuse(self, ticket: Ticket, reason: RefusalReason) -> None:
        _settle(ticket, Refused(reason, self._standing.wait_reason()))

    # Changes of one slot

    def _refreshed(self, slot: Slot, now: float) -> None:
        self._standing.refresh(slot, now)
        if self._queue:
            self._dispatch(now)

    def _blame(
        self,
        slot: Slot,
        reservation: Reservation,
        kind: FailureKind,
        retry_after_s: float | None,
        now: float,
    ) -> None:
        breaker = slot.breaker
        was_open = breaker.state(now) != "closed"
        match kind:
            case "client_error":
                breaker.on_answered()
            case "saturated":
                breaker.on_saturated(retry_after_s, now)
            case "fault":
                breaker.on_fault(reservation.serial, now)
            case _:
                assert_never(kind)
        self._standing.note_breaker(slot, was_open=was_open, now=now)

    def _on_answered(self, slot: Slot, now: float) -> None:
        was_open = slot.breaker.state(now) != "closed"
        slot.breaker.on_answered()
        self._standing.note_breaker(slot, was_open=was_open, now=now)
        self._standing.refresh(slot, now)


def _settle(ticket: Ticket, outcome: Routed | Refused) -> None:
    ticket.outcome = outcome
    if ticket.wake is not None:
        ticket.wake()
