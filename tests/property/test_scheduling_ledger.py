"""Any history of requests and instances: counts equal a model that is fed from the inputs only."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from fleets import request, scheduling, spec
from libra.ids import InstanceId, PolicyVersion
from libra.scheduling.request import Refused, Reservation, Routed, Ticket, Wait
from libra.scheduling.scheduler import Scheduler
from libra.scheduling.slow_start import DURATION_S

NAMES = st.sampled_from(["i0", "i1", "i2", "i3"])
VERSIONS = st.integers(0, 2)
CAP, QUEUE = 3, 5


@dataclass
class ModelInstance:
    incarnation: str
    version: int
    is_ready: bool = True
    is_draining: bool = False
    open_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens by reservation serial."""


class SchedulerMachine(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize(metric=st.sampled_from(["requests", "tokens"]), has_cap=st.booleans())
    def begin(self, metric, has_cap):
        self.metric, self.cap = metric, CAP if has_cap else 0
        self.scheduler = Scheduler(
            scheduling(
                load_metric=metric,
                max_in_flight_per_instance=self.cap,
                queue_capacity=QUEUE,
                queue_deadline_s=500.0,
            )
        )
        self.now, self.floor = 0.0, 0
        self.fleet: dict[str, ModelInstance] = {}
        self.waiting: dict[int, Ticket] = {}
        self.num_incarnations = 0
        self.owner_of: dict[int, ModelInstance] = {}

    # Model

    def candidates(self, min_version=None):
        wanted = max(self.floor, min_version or 0)
        return {
            name: model
            for name, model in self.fleet.items()
            if model.is_ready
            and not model.is_draining
            and model.version >= wanted
            and not (self.cap and len(model.open_tokens) >= self.cap)
        }

    def load(self, model):
        sizes = model.open_tokens.values()
        return sum(sizes) if self.metric == "tokens" else len(sizes)

    def note_placed(self, reservation: Reservation):
        model = self.fleet[reservation.instance_id]
        assert model.incarnation == reservation.incarnation
        assert model.version == reservation.policy_version
        assert reservation.serial not in self.owner_of
        model.open_tokens[reservation.serial] = reservation.num_tokens
        self.owner_of[reservation.serial] = model

    def collect(self):
        """Reservations of tickets that were placed since the last look."""
        placed = []
        for serial, ticket in tuple(self.waiting.items()):
            if ticket.outcome is None:
                continue
            del self.waiting[serial]
            if isinstance(ticket.outcome, Routed):
                self.note_placed(ticket.outcome.reservation)
                placed.append(ticket.outcome.reservation)
            else:
                assert ticket.outcome.reason == "deadline"
                assert ticket.deadline_at <= self.now
        return multiple(*placed)

    # Requests

    @rule(
        target=held,
        size=st.integers(1, 400),
        min_version=st.none() | VERSIONS,
    )
    def route(self, size, min_version):
        placed_before = self.collect()
        candidates = self.candidates(min_version)
        decision = self.scheduler.route(
            request(num_prompt_tokens=size, min_version=min_version), self.now
        )
        match decision:
            case Routed(instance, reservation):
                assert instance in candidates
                loads = {name: self.load(model) for name, model in candidates.items()}
                assert loads[instance] == min(loads.values())
                self.note_placed(reservation)
                return multiple(*placed_before.values, reservation)
            case Wait(_, ticket):
                assert not candidates
                self.waiting[ticket.serial] = ticket
            case Refused(reason, _):
                assert (reason, len(self.waiting), candidates) == ("queue_full", QUEUE, {})
        return placed_before

    @rule(
        target=held,
        reservation=consumes(held),
        how=st.sampled_from(["complete", "client_error", "cancel"]),
    )
    def release(self, reservation, how):
        model = self.owner_of.pop(reservation.serial)
        del model.open_tokens[reservation.serial]
        for is_first in (True, False):
            if how == "complete":
                released = self.scheduler.complete(reservation, 5, self.now)
            elif how == "cancel":
                released = self.scheduler.cancel(reservation, self.now)
            else:
                released = self.scheduler.fail(reservation, "client_error", self.now)
            assert released == is_first
        return self.collect()

    @rule(pick=st.integers(0, QUEUE))
    def abandon(self, pick):
        if self.waiting:
            serial = sorted(self.waiting)[pick % len(self.waiting)]
            self.scheduler.abandon(self.waiting.pop(serial), self.now)

    @rule(target=held, elapsed=st.floats(0.0, 400.0))
    def tick(self, elapsed):
        return self.tick_over(elapsed)

    def tick_over(self, elapsed):
        self.now += elapsed
        self.scheduler.on_tick(self.now)
        return self.collect()

    # Instances. Slow start adds to a newcomer's load, which the model leaves out; so it is over
    # before anything else happens.

    @rule(target=held, name=NAMES, version=VERSIONS, is_planned=st.booleans())
    def start(self, name, version, is_planned):
        self.num_incarnations += 1
        incarnation = f"n{self.num_incarnations}"
        self.fleet[name] = ModelInstance(incarnation, version)
        self.scheduler.restart_instance(
            spec(name, incarnation=incarnation, version=version), self.now, is_planned=is_planned
        )
        return self.tick_over(DURATION_S)

    @rule(name=NAMES)
    def rediscover(self, name):
        if name in self.fleet:
            known = self.fleet[name].incarnation
            self.scheduler.observe_instance(spec(name, incarnation=known, version=0), self.now)

    @rule(name=NAMES)
    def remove(self, name):
        self.fleet.pop(name, None)
        self.scheduler.remove_instance(InstanceId(name))

    @rule(target=held, name=NAMES, is_ready=st.booleans())
    def set_ready(self, name, is_ready):
        if name in self.fleet:
            self.fleet[name].is_ready = is_ready
        self.scheduler.set_ready(InstanceId(name), is_ready, self.now)
        return self.tick_over(DURATION_S)

    @rule(target=held, name=NAMES, is_draining=st.booleans())
    def drain(self, name, is_draining):
        if name in self.fleet:
            self.fleet[name].is_draining = is_draining
        self.scheduler.drain_instance(InstanceId(name), is_draining, self.now)
        return self.tick_over(DURATION_S)

    @rule(target=held, name=NAMES, version=VERSIONS)
    def set_version(self, name, version):
        if name in self.fleet:
            self.fleet[name].version = version
        self.scheduler.set_version(InstanceId(name), PolicyVersion(version), self.now)
        return self.tick_over(DURATION_S)

    @rule(target=held, floor=VERSIONS)
    def set_floor(self, floor):
        self.floor = floor
        self.scheduler.set_version_floor(PolicyVersion(floor), self.now)
        return self.tick_over(DURATION_S)

    # What always holds

    @invariant()
    def counts_equal_the_model(self):
        if not hasattr(self, "fleet"):
            return
        views = {view.instance_id: view for view in self.scheduler.instances(self.now)}
        assert views.keys() == self.fleet.keys()
        for name, model in self.fleet.items():
            assert views[name].own_requests == len(model.open_tokens)
            assert views[name].own_tokens == sum(model.open_tokens.values())
        assert self.scheduler.num_in_flight() == len(self.owner_of)

    @invariant()
    def nobody_waits_while_somebody_could_serve(self):
        if not hasattr(self, "fleet"):
            return
        for ticket in self.waiting.values():
            if ticket.outcome is None:
                assert not self.candidates(ticket.request.min_version)

    def teardown(self):
        if not hasattr(self, "fleet"):
            return
        self.collect()
        self.scheduler.stop_admitting()
        assert self.scheduler.num_waiting == 0
        assert self.scheduler.num_in_flight() == len(self.owner_of)


SchedulerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestScheduler = SchedulerMachine.TestCase
