"""Simulated instances behind the real scheduler.

The scheduler does not know how long a response will be. `length_bounds` simulate a router that
does: each TP degree then has a scheduler of its own, and a request's length chooses among them.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

import msgspec

from libra.config.rollout import SchedulingConfig
from libra.ids import Incarnation, InstanceId, NodeRank, PolicyVersion, RequestId
from libra.planner.plan import InstancePlacement
from libra.planner.rollout_cost import InstanceCost
from libra.scheduling.load import LoadSnapshot
from libra.scheduling.request import Refused, Reservation, Routed, RouteRequest, Ticket, Wait
from libra.scheduling.scheduler import Scheduler
from libra.scheduling.slot import InstanceSpec
from libra.simulate.engine import Engine, EngineRequest
from libra.simulate.timeline import Timeline

_ALL = 0
"""Key of the scheduler that has every instance."""


class LengthBound(msgspec.Struct, frozen=True, kw_only=True):
    """Responses of at least `shortest_tokens`, and below the bound before, go to degree `tp`."""

    shortest_tokens: int
    tp: int


class FleetEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Whom the fleet tells."""

    on_finished: Callable[[EngineRequest, InstanceId], None]
    on_refused: Callable[[EngineRequest, str], None]


class Instance:
    """One simulated server and the requests that the scheduler placed on it."""

    def __init__(self, placement: InstancePlacement, cost: InstanceCost) -> None:
        self.instance_id = placement.instance_id
        self.node: NodeRank = placement.node
        self.tp = placement.tp
        self.engine = Engine(cost)
        self.incarnation = Incarnation(f"{placement.instance_id}/0")
        self.reservation_of: dict[EngineRequest, Reservation] = {}
        self.armed_for = inf
        self.when_empty: Callable[[], None] | None = None
        self.when_drained: Callable[[], None] | None = None
        """Not None: it is not routed to, and ends with its last request."""


class FleetShape(msgspec.Struct, frozen=True, kw_only=True):
    """Which instances there are and what each can do; mappings are by TP degree."""

    placements: Sequence[InstancePlacement]
    cost_of: Mapping[int, InstanceCost]
    kv_capacity_of: Mapping[int, int]
    max_new_tokens: int
    length_bounds: tuple[LengthBound, ...] = ()


class Fleet:
    """Places requests, lets engines decode, and reports what finished."""

    def __init__(
        self,
        timeline: Timeline,
        shape: FleetShape,
        *,
        scheduling: SchedulingConfig,
        events: FleetEvents,
    ) -> None:
        self._timeline, self._events = timeline, events
        self._max_new_tokens = shape.max_new_tokens
        self._bounds = shape.length_bounds
        keys = {bound.tp for bound in self._bounds} or {_ALL}
        self._scheduler_of = {
            key: Scheduler(scheduling, kv_capacity_by_tp=shape.kv_capacity_of) for key in keys
        }
        self.instances = [Instance(placed, shape.cost_of[placed.tp]) for placed in shape.placements]
        self._cost_of = shape.cost_of
        self._reloading: set[InstanceId] = set()
        self._instance_of = {instance.instance_id: instance for instance in self.instances}
        for instance in self.instances:
            self._announce(instance, PolicyVersion(0))
        if scheduling.enable_metrics_feedback:
            self._poll(scheduling.metrics_poll_interval_s)

    def submit(self, request: EngineRequest) -> None:
        """Route a trajectory's one request."""
        now = self._timeline.now
        scheduler = self._scheduler_of[self._key(request)]
        decision = scheduler.route(
            RouteRequest(
                request_id=RequestId(request.trajectory_id),
                max_new_tokens=self._max_new_tokens,
                num_prompt_tokens=request.prompt_tokens,
                prompt_id=request.prompt_id,
            ),
            now,
        )
        match decision:
            case Routed():
                self._start(decision, request)
            case Refused(reason=reason):
                self._events.on_refused(request, reason)
            case Wait(ticket=ticket):
                ticket.wake = lambda: self._on_settled(ticket, request)
                self._timeline.at(ticket.deadline_at, lambda: scheduler.on_tick(self._timeline.now))

    def begin_reload(self, instance: Instance, *, drains: bool, done: Callable[[], None]) -> None:
        """Take `instance` out of routing; call `done` when it may load."""
        self._reloading.add(instance.instance_id)
        self._touch(instance)
        self._scheduler(instance).set_ready(instance.instance_id, False, self._timeline.now)
        if drains and not instance.engine.is_empty:
            instance.engine.close()
            instance.when_empty = done
        else:
            done()

    def load(self, instance: Instance, *, evicts: bool, keeps_tokens: bool) -> None:
        """Stop decoding; without `evicts` the requests keep their cache."""
        self._touch(instance)
        if evicts:
            instance.engine.evict(keeps_tokens=keeps_tokens)
        instance.engine.freeze()
        self._arm(instance)

    def finish_reload(self, instance: Instance, version: PolicyVersion) -> None:
        """Let the instance answer with `version`."""
        now = self._timeline.now
        self._touch(instance)
        self._reloading.discard(instance.instance_id)
        instance.engine.policy_version = version
        instance.engine.thaw()
        self._scheduler(instance).set_version(instance.instance_id, version, now)
        is_ready = instance.when_drained is None
        self._scheduler(instance).set_ready(instance.instance_id, is_ready, now)
        self._end_if_drained(instance)
        self._arm(instance)

    def commit(self, version: PolicyVersion) -> None:
        for scheduler in self._scheduler_of.values():
            scheduler.set_version_floor(version, self._timeline.now)

    def add(self, placement: InstancePlacement, version: PolicyVersion) -> None:
        """A server that has just come up with `version`."""
        instance = Instance(placement, self._cost_of[placement.tp])
        instance.engine.policy_version = version
        self.instances.append(instance)
        self._instance_of[instance.instance_id] = instance
        self._announce(instance, version)

    def retire(self, instance_id: InstanceId, *, drains: bool, done: Callable[[], None]) -> None:
        """End a server: with `drains` after its requests, else they begin anew elsewhere."""
        instance = self._instance_of[instance_id]
        self._touch(instance)
        self._scheduler(instance).set_ready(instance_id, False, self._timeline.now)
        instance.when_drained = done
        if not drains:
            self._give_back(instance)
        self._end_if_drained(instance)

    def _give_back(self, instance: Instance) -> None:
        given_back, instance.reservation_of = instance.reservation_of, {}
        instance.engine = Engine(self._cost_of[instance.tp])
        for request, reservation in given_back.items():
            self._scheduler(instance).cancel(reservation, self._timeline.now)
            request.generated, request.oldest_version, request.serial = 0.0, None, 0
            self.submit(request)

    def _end_if_drained(self, instance: Instance) -> None:
        """Not during a reload, which counts on every instance that it began with."""
        done = instance.when_drained
        if done is None or instance.reservation_of or instance.instance_id in self._reloading:
            return
        instance.when_drained, instance.armed_for = None, inf
        self.instances.remove(instance)
        del self._instance_of[instance.instance_id]
        self._scheduler(instance).remove_instance(instance.instance_id)
        done()

    def _scheduler(self, instance: Instance) -> Scheduler:
        return self._scheduler_of[instance.tp if self._bounds else _ALL]

    def _key(self, request: EngineRequest) -> int:
        if not self._bounds:
            return _ALL
        fitting = (b.tp for b in self._bounds if request.response_tokens >= b.shortest_tokens)
        return next(fitting, self._bounds[-1].tp)

    def _announce(self, instance: Instance, version: PolicyVersion) -> None:
        self._scheduler(instance).observe_instance(
            InstanceSpec(
                instance_id=instance.instance_id,
                incarnation=instance.incarnation,
                tp=instance.tp,
                policy_version=version,
                is_ready=True,
            ),
            self._timeline.now,
        )

    def _start(self, routed: Routed, request: EngineRequest) -> None:
        instance = self._instance_of[routed.instance]
        self._touch(instance)
        instance.reservation_of[request] = routed.reservation
        instance.engine.submit(request)
        self._arm(instance)

    def _on_settled(self, ticket: Ticket, request: EngineRequest) -> None:
        if isinstance(ticket.outcome, Routed):
            self._start(ticket.outcome, request)
        elif isinstance(ticket.outcome, Refused):
            self._events.on_refused(request, ticket.outcome.reason)

    def _touch(self, instance: Instance) -> None:
        """Bring the engine to the present and report what finished on the way."""
        finished = instance.engine.advance(self._timeline.now)
        for request in finished:
            reservation = instance.reservation_of.pop(request)
            self._scheduler(instance).complete(
                reservation, request.response_tokens, self._timeline.now
            )
            self._events.on_finished(request, instance.instance_id)
        if instance.when_empty is not None and instance.engine.is_empty:
            done, instance.when_empty = instance.when_empty, None
            done()
        self._end_if_drained(instance)

    def _arm(self, instance: Instance) -> None:
        """Wake up when the engine's next event is due; an alarm for another instant is void."""
        due_at = instance.engine.next_due_at()
        if due_at != instance.armed_for:
            instance.armed_for = due_at
            if due_at < inf:
                self._timeline.at(due_at, lambda: self._on_due(instance, due_at))

    def _on_due(self, instance: Instance, due_at: float) -> None:
        if instance.armed_for == due_at:
            instance.armed_for = inf
            self._touch(instance)
            self._arm(instance)

    def _poll(self, period_s: float) -> None:
        now = self._timeline.now
        for instance in self.instances:
            counts = instance.engine.counts()
            self._scheduler(instance).on_snapshot(
                instance.instance_id,
                LoadSnapshot(
                    incarnation=instance.incarnation,
                    sampled_at=now,
                    num_running=counts.num_running,
                    num_waiting=counts.num_waiting,
                    num_waiting_for_capacity=counts.num_waiting,
                    kv_use_fraction=counts.kv_use_fraction,
                    num_preemptions=counts.num_preemptions,
                ),
                now,
            )
        self._timeline.at(now + period_s, lambda: self._poll(period_s))
