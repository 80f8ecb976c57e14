"""The scheduler: one object that places every request of a run, our own and the gateway's.

Pipeline per request: ready at the wanted version -> KV capacity known (kv_tokens) -> admission
(breaker, saturation, occupancy) -> queue cap -> prefix affinity -> strategy. When a filter leaves
nobody, the request waits in a bounded queue with a deadline; it never goes to a server that is
not ready. Placing and giving back cost O(log n), independent of the strategy and metric.

Synchronous and single-threaded. Between two calls nothing changes: call `on_tick` when
`next_due_at` has come.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from libra.errors import InvariantError
from libra.ids import Incarnation, InstanceId, PolicyVersion
from libra.scheduling.affinity import AffinityCounts, PrefixAffinity
from libra.scheduling.expected_output import ExpectedOutput
from libra.scheduling.fleet import Fleet
from libra.scheduling.ledger import Ledger
from libra.scheduling.load import NO_REMOTE_LOAD, LoadSnapshot, OwnLoad, RemoteLoad, observed_load
from libra.scheduling.notice import Notice, RestartSeen
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

if TYPE_CHECKING:
    from libra.config.rollout import SchedulingConfig

RESTART_TOLERANCE_S = 1.0
"""Start times of one process may differ by rounding in the exposition format."""


class Scheduler:
    """Places requests on instances. `now` is seconds on one monotonic clock."""

    def __init__(
        self, config: "SchedulingConfig", *, kv_capacity_by_tp: Mapping[int, int] | None = None
    ) -> None:
        """`kv_capacity_by_tp`: estimated KV capacity in tokens, from `libra.models.kv_capacity`."""
        self._config = config
        self._fleet = Fleet(config, kv_capacity_by_tp or {})
        self._ledger = Ledger()
        self._expected = ExpectedOutput()
        self._queue = WaitingQueue(config.queue_capacity)
        self._affinity = (
            PrefixAffinity(config.prefix_affinity_max_entries) if config.prefix_affinity else None
        )
        self._is_admitting = True

    # Requests

    def route(self, request: RouteRequest, now: float) -> Decision:
        """Place `request` now, queue it, or turn it away.

        A `Wait` holds a ticket whose `outcome` is set later, by any call that frees capacity; the
        caller gives up with `abandon`.
        """
        if now >= self._fleet.next_due or self._queue.next_deadline <= now:
            self.on_tick(now)
        if not self._is_admitting:
            return Refused("draining", None)
        return self._place(request, now) or self._enqueue(request, now)

    def complete(self, reservation: Reservation, num_output_tokens: int, now: float) -> bool:
        """End with a whole answer. False, and no effect, when it was given back before."""
        slot = self._ledger.release(reservation)
        if slot is None:
            return False
        self._expected.on_completed(reservation.category, num_output_tokens)
        if slot.breaker.is_calm:
            self._fleet.on_load_fell(slot, now)
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
        if kind == "client_error":
            self._on_answered(slot, now)
        elif kind == "saturated":
            slot.breaker.on_saturated(retry_after_s, now)
        else:
            was_open = slot.breaker.state(now) != "closed"
            slot.breaker.on_fault(reservation.serial, now)
            self._fleet.note_breaker(slot, was_open=was_open, now=now)
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
        return min(self._fleet.next_due, self._queue.next_deadline)

    def on_tick(self, now: float) -> None:
        """Let time-bound states and waiting deadlines end."""
        self._fleet.advance(now)
        if self._queue:
            self._dispatch(now)
        while (ticket := self._queue.pop_expired(now)) is not None:
            self._refuse(ticket, "deadline")

    # Instances

    def observe_instance(self, spec: InstanceSpec, now: float) -> None:
        """Take in what discovery sees: a known incarnation is no news, a new one is a restart."""
        slot = self._fleet.get(spec.instance_id)
        if slot is not None and slot.announced_incarnation == spec.incarnation:
            return
        if slot is not None:
            self._replace(slot, spec, keep_prefixes=False, now=now)
            return
        self._attach(self._fleet.add(spec, None, now))
        self._dispatch(now)

    def restart_instance(self, spec: InstanceSpec, now: float, *, is_planned: bool) -> None:
        """Let a new process answer under a known id; a planned one (a reload) keeps its prompts."""
        slot = self._fleet.get(spec.instance_id)
        if slot is None:
            self.observe_instance(spec, now)
        elif slot.announced_incarnation != spec.incarnation:
            self._replace(slot, spec, keep_prefixes=is_planned, now=now)

    def set_ready(self, instance_id: InstanceId, is_ready: bool, now: float) -> None:
        """Health as the supervisor judges it. Unknown instances are ignored: they are gone."""
        slot = self._fleet.get(instance_id)
        if slot is not None:
            slot.is_ready = is_ready
            self._refreshed(slot, now)

    def set_version(
        self, instance_id: InstanceId, version: PolicyVersion | None, now: float
    ) -> None:
        """Learn the version the instance answers with; None: unknown, so not routable."""
        slot = self._fleet.get(instance_id)
        if slot is not None:
            slot.learn_version(version)
            self._refreshed(slot, now)

    def set_version_floor(self, version: PolicyVersion, now: float) -> None:
        """Instances below `version` are stale from now on: no candidates for anyone."""
        self._fleet.set_floor(version, now)
        self._dispatch(now)

    def drain_instance(self, instance_id: InstanceId, is_draining: bool, now: float) -> None:
        """No new requests while draining; watch `num_in_flight` for the end."""
        slot = self._fleet.get(instance_id)
        if slot is not None:
            slot.is_draining = is_draining
            self._refreshed(slot, now)

    def remove_instance(self, instance_id: InstanceId) -> None:
        """Forget the instance; open reservations on it can still be given back, without effect."""
        slot = self._fleet.get(instance_id)
        if slot is not None:
            self._fleet.retire(slot)
            self._detach(slot)

    def num_in_flight(self, instance_id: InstanceId | None = None) -> int:
        """Open reservations on the current incarnation of an instance; on everything for None."""
        if instance_id is None:
            return len(self._ledger)
        slot = self._fleet.get(instance_id)
        return 0 if slot is None else slot.num_requests

    # Load from outside

    def on_snapshot(self, instance_id: InstanceId, snapshot: LoadSnapshot, now: float) -> None:
        """One scrape. Late ones of an earlier incarnation, and repeated ones, are ignored."""
        slot = self._fleet.get(instance_id)
        if slot is None or slot.announced_incarnation != snapshot.incarnation:
            return
        if _is_other_process(slot, snapshot):
            slot = self._replace_unannounced(slot, now)
        if snapshot.process_started_at_s is not None:
            slot.process_started_at_s = snapshot.process_started_at_s
        if snapshot.kv_capacity_tokens:
            slot.measured_kv_tokens = snapshot.kv_capacity_tokens
        if self._config.enable_metrics_feedback and slot.feedback.is_new(snapshot):
            self._count_snapshot(slot, snapshot, now)
        self._refreshed(slot, now)

    def on_kv_capacity_measured(self, instance_id: InstanceId, num_tokens: int, now: float) -> None:
        """Learn what the server profiled at start-up."""
        slot = self._fleet.get(instance_id)
        if slot is not None and num_tokens > 0:
            slot.measured_kv_tokens = num_tokens
            self._refreshed(slot, now)

    def on_remote_load(
        self, loads: Mapping[tuple[InstanceId, Incarnation], RemoteLoad], now: float
    ) -> None:
        """Learn the summed in-flight load of the other schedulers; what is absent is 0."""
        for slot in self._fleet.slots():
            remote = loads.get((slot.instance_id, slot.incarnation), NO_REMOTE_LOAD)
            if remote != slot.remote:
                slot.remote = remote
                self._fleet.refresh(slot, now)
        self._dispatch(now)

    def own_load(self) -> tuple[OwnLoad, ...]:
        """Return what this scheduler has in flight, exactly, for the others."""
        return tuple(
            OwnLoad(s.instance_id, s.incarnation, s.num_requests, s.num_tokens)
            for s in self._fleet.slots()
            if s.num_requests
        )

    # Views

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def affinity_counts(self) -> AffinityCounts:
        return AffinityCounts() if self._affinity is None else self._affinity.counts

    @property
    def num_repeated_releases(self) -> int:
        return self._ledger.num_repeated_releases

    def take_notices(self) -> tuple[Notice, ...]:
        """Hand over what has been worth saying since the last call, oldest first."""
        notices = tuple(self._fleet.notices)
        self._fleet.notices.clear()
        return notices

    # Placing

    def _place(self, request: RouteRequest, now: float) -> Routed | None:
        best = self._fleet.order.first(request.min_version)
        if best is None:
            return None
        num_tokens = self._expected.request_tokens(request)
        affinity, prompt_id = self._affinity, request.prompt_id
        if affinity is not None and prompt_id is not None:
            best = affinity.choose(
                prompt_id, best, num_tokens=num_tokens, min_version=request.min_version
            )
        reservation = self._ledger.reserve(best, request, num_tokens, now)
        self._expected.on_reserved(num_tokens)
        self._fleet.on_picked(best, now)
        if not best.breaker.is_calm:
            best.breaker.on_routed(reservation.serial, now)
            self._fleet.refresh(best, now)
        return Routed(best.instance_id, reservation)

    def _enqueue(self, request: RouteRequest, now: float) -> Wait | Refused:
        reason = self._fleet.wait_reason()
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
            newest = self._fleet.order.newest_version()
            ticket = None if newest is None else self._queue.oldest_for(newest)
            if ticket is None:
                return
            self._queue.remove(ticket)
            routed = self._place(ticket.request, now)
            if routed is None:
                raise InvariantError(f"no candidate at {newest}, which the order just named")
            _settle(ticket, routed)

    def _refuse(self, ticket: Ticket, reason: RefusalReason) -> None:
        _settle(ticket, Refused(reason, self._fleet.wait_reason()))

    # Changes of one slot

    def _refreshed(self, slot: Slot, now: float) -> None:
        self._fleet.refresh(slot, now)
        if self._queue:
            self._dispatch(now)

    def _on_answered(self, slot: Slot, now: float) -> None:
        was_open = slot.breaker.state(now) != "closed"
        slot.breaker.on_answered()
        self._fleet.note_breaker(slot, was_open=was_open, now=now)
        self._fleet.refresh(slot, now)

    def _count_snapshot(self, slot: Slot, snapshot: LoadSnapshot, now: float) -> None:
        observed = observed_load(
            self._config.load_metric,
            snapshot,
            kv_capacity_tokens=slot.kv_capacity_tokens,
            tokens_per_request=self._expected.mean_request_tokens,
        )
        local = self._fleet.local_load(slot)
        slot.feedback.on_snapshot(snapshot, local=local, observed=observed, now=now)

    def _replace_unannounced(self, slot: Slot, now: float) -> Slot:
        """Void counters, bias, prompts and version: the process changed under us."""
        self._fleet.notices.append(RestartSeen(slot.instance_id, slot.incarnation))
        spec = InstanceSpec(
            instance_id=slot.instance_id,
            incarnation=slot.announced_incarnation,
            tp=slot.tp,
            is_ready=slot.is_ready,
        )
        new = self._replace(slot, spec, keep_prefixes=False, now=now)
        new.incarnation = Incarnation(f"{slot.incarnation}'")
        new.is_draining = slot.is_draining
        self._fleet.refresh(new, now)
        return new

    def _replace(self, slot: Slot, spec: InstanceSpec, *, keep_prefixes: bool, now: float) -> Slot:
        self._fleet.retire(slot)
        if not keep_prefixes:
            self._detach(slot)
        new = self._fleet.add(spec, slot.prefix_key if keep_prefixes else None, now)
        new.feedback.on_process_started()
        self._attach(new)
        self._dispatch(now)
        return new

    def _attach(self, slot: Slot) -> None:
        if self._affinity is not None:
            self._affinity.attach(slot)

    def _detach(self, slot: Slot) -> None:
        if self._affinity is not None:
            self._affinity.detach(slot.prefix_key)


def _settle(ticket: Ticket, outcome: Routed | Refused) -> None:
    ticket.outcome = outcome
    if ticket.wake is not None:
        ticket.wake()


def _is_other_process(slot: Slot, snapshot: LoadSnapshot) -> bool:
    known, seen = slot.process_started_at_s, snapshot.process_started_at_s
    if known is not None and seen is not None:
        return abs(seen - known) > RESTART_TOLERANCE_S
    return slot.feedback.has_counter_fallen(snapshot)
