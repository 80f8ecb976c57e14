"""A world that carries out a change's transitions, with faults.

It keeps the truth about processes, devices and requests from the orders alone.
"""

from collections import Counter
from collections.abc import Iterable
from random import Random

import msgspec

from libra.ids import InstanceId, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, TrainPlacement
from libra.pools.change_order import Rules
from libra.pools.ground import Ground, Hybrid, Server, Stage, hybrid_slots
from libra.pools.reconfiguration import Order, Reconfiguration
from libra.pools.transition import (
    AttachHybrid,
    AwaitVersion,
    AwaitWarm,
    DetachHybrid,
    Drain,
    HoldStep,
    ReleaseStep,
    ReshapeTraining,
    Sleep,
    Start,
    Stop,
    Transition,
    Undrain,
    Wake,
    Warm,
)

TIMEOUT_S = 100.0
NOT_THERE = (Stage.WARMING, Stage.WARM, Stage.ASLEEP, Stage.COOLING)
"""Stages in which a process has no device."""


def settled(plan: Plan, asleep: Iterable[InstancePlacement] = ()) -> Ground:
    serving = tuple(Server(it, Stage.SERVING) for it in plan.instances)
    return Ground(
        train=plan.train,
        servers=(*serving, *(Server(it, Stage.ASLEEP) for it in asleep)),
        hybrids=tuple(Hybrid(it, is_member=True) for it in plan.hybrids),
    )


class World:
    """Processes, devices and requests as they really are."""

    def __init__(
        self,
        old: Plan,
        rules: Rules,
        rng: Random,
        *,
        asleep: Iterable[InstancePlacement] = (),
    ) -> None:
        self.rng, self.rules, self.now = rng, rules, 0.0
        self.train = old.train
        self.coming_train: TrainPlacement | None = None
        self.stage: dict[InstanceId, Stage] = {}
        self.placement: dict[InstanceId, InstancePlacement] = {}
        self.requests: Counter[InstanceId] = Counter()
        self.num_queued = 0
        self.num_requests = 0
        self.hybrids: dict[ReplicaId, HybridPlacement] = {}
        self.members: set[ReplicaId] = set()
        self.warming: set[ReplicaId] = set()
        self.warm: set[ReplicaId] = set()
        """Replicas without devices, on their way up and there."""

        self.lost_slots: set[SlotId] = set()
        """Of replicas that do not end."""

        self.ids_used: list[str] = []
        self.is_hold_wanted = self.is_held = False
        for it in old.instances:
            self.place(it, Stage.SERVING)
        for it in old.hybrids:
            self.hybrids[it.replica_id] = it
            self.members.add(it.replica_id)
        for name in self.stage:
            self.requests[name] = rng.randrange(3)
        self.num_requests = self.requests.total()
        for it in asleep:
            self.place(it, Stage.ASLEEP)
        self.happenings: list[tuple] = []

    def place(self, it: InstancePlacement, stage: Stage) -> None:
        self.stage[it.instance_id] = stage
        self.placement[it.instance_id] = it
        self.check_devices()

    def check_devices(self) -> None:
        used = Counter((*self.train.slots, *self.lost_slots))
        if self.coming_train is not None:
            used.update(set(self.coming_train.slots) - set(self.train.slots))
        for name, stage in self.stage.items():
            if stage not in NOT_THERE:
                used.update(self.placement[name].slots)
        for it in self.hybrids.values():
            used.update(it.slots)
        assert not [slot for slot, count in used.items() if count > 1], used
        served = self.requests.total() + self.num_queued
        assert served == self.num_requests, "a request was lost"

    def give_back(self, name: InstanceId) -> None:
        self.num_queued += self.requests.pop(name, 0)

    def ground(self) -> Ground:
        """As a supervisor that comes after sees it: processes that answer, or do not yet."""
        alive = (Stage.STARTING, Stage.SERVING, Stage.DRAINING, Stage.DRAINED)
        return Ground(
            train=self.coming_train or self.train,
            servers=tuple(
                Server(
                    self.placement[name],
                    Stage.SERVING if stage is Stage.SERVING else Stage.STARTING,
                )
                for name, stage in self.stage.items()
                if stage in alive
            ),
        )

    def carry_out(self, ordered: tuple[Transition, ...]) -> None:
        for transition in ordered:
            self.do(transition)
            self.check_devices()

    def do(self, transition: Transition) -> None:  # noqa: C901, PLR0912, PLR0915 - a table
        match transition:
            case Warm(placements, replicas):
                for it in replicas:
                    assert it.replica_id not in self.ids_used, "a replica's name was used twice"
                    self.ids_used.append(it.replica_id)
                    self.warming.add(it.replica_id)
                    self.happenings.append(("replica warm", it.replica_id))
                for it in placements:
                    assert it.instance_id not in self.stage
                    self.place(it, Stage.WARMING)
                    self.happenings.append(("warm", it.instance_id))
            case Start(placements):
                for it in placements:
                    assert self.stage.get(it.instance_id) in (None, Stage.WARM)
                    self.place(it, Stage.STARTING)
                    self.happenings.append(("serving", it.instance_id))
            case Drain(ids, gives_back):
                serving = [n for n, stage in self.stage.items() if stage is Stage.SERVING]
                left = sum(self.placement[n].tp for n in serving if n not in ids)
                if set(ids) & set(serving):
                    assert left >= self.rules.min_rollout_gpus
                for name in ids:
                    if self.stage[name] is Stage.STARTING:
                        self.happenings = [h for h in self.happenings if h != ("serving", name)]
                    self.stage[name] = Stage.DRAINING
                    if gives_back:
                        self.give_back(name)
                    self.happenings.append(("drained", name))
            case Undrain(ids):
                for name in ids:
                    assert self.stage[name] in (Stage.DRAINING, Stage.DRAINED)
                    self.stage[name] = Stage.STARTING
                    self.happenings.append(("serving", name))
            case Stop(ids):
                for name in ids:
                    assert not self.requests[name], "ended with requests in flight"
                    is_cold = self.stage[name] in NOT_THERE
                    self.stage[name] = Stage.COOLING if is_cold else Stage.STOPPING
                    self.happenings.append(("gone", name))
            case Sleep(ids):
                for name in ids:
                    assert not self.requests[name], "put to sleep with requests in flight"
                    assert self.stage[name] in (Stage.DRAINED, Stage.FALLING_ASLEEP)
                    self.stage[name] = Stage.FALLING_ASLEEP
                    self.happenings.append(("asleep", name))
            case Wake(ids):
                for name in ids:
                    assert self.stage[name] is Stage.ASLEEP
                    self.place(self.placement[name], Stage.STARTING)
                    self.happenings.append(("serving", name))
            case HoldStep():
                self.is_hold_wanted = True
                self.happenings.append(("held", ""))
            case ReleaseStep():
                assert self.is_hold_wanted
                self.is_hold_wanted = self.is_held = False
            case ReshapeTraining(placement):
                assert self.is_held
                assert placement.slots
                self.coming_train = placement
                self.happenings.append(("trained", placement))
            case AttachHybrid(placements):
                for it in placements:
                    if it.replica_id in self.warm:
                        self.warm.remove(it.replica_id)
                    else:
                        assert it.replica_id not in self.ids_used, "a replica's name was used twice"
                        self.ids_used.append(it.replica_id)
                    self.hybrids[it.replica_id] = it
                    self.happenings.append(("joined", it.replica_id))
            case DetachHybrid(ids):
                for name in ids:
                    self.happenings.append(("left", name))
            case AwaitVersion() | AwaitWarm():
                pass

    def happen(self, change: Reconfiguration, what: str, name) -> tuple[Transition, ...]:  # noqa: C901, PLR0911, PLR0912, PLR0915
        now = self.now
        match what:
            case "warm":
                if self.stage.get(name) is not Stage.WARMING:
                    return ()
                self.stage[name] = Stage.WARM
                return change.on_warm(name, now=now)
            case "serving":
                if self.stage.get(name) is not Stage.STARTING:
                    return ()
                self.stage[name] = Stage.SERVING
                return change.on_serving(name, now=now)
            case "drained":
                if self.stage.get(name) is not Stage.DRAINING:
                    return ()
                # What was in flight has been answered.
                self.num_requests -= self.requests.pop(name, 0)
                self.stage[name] = Stage.DRAINED
                return change.on_drained(name, now=now)
            case "gone":
                if self.stage.get(name) not in (Stage.STOPPING, Stage.COOLING):
                    return ()
                del self.stage[name]
                return change.on_gone(name, now=now)
            case "asleep":
                if self.stage.get(name) is not Stage.FALLING_ASLEEP:
                    return ()
                self.stage[name] = Stage.ASLEEP
                return change.on_asleep(name, now=now)
            case "held":
                if not self.is_hold_wanted:
                    return ()
                self.is_held = True
                return change.on_step_held(now=now)
            case "trained":
                if self.coming_train != name:
                    return ()
                self.train, self.coming_train = name, None
                return change.on_training_ready(now=now)
            case "joined":
                if name not in self.hybrids:
                    return ()
                self.members.add(name)
                return change.on_hybrid_joined(name, now=now)
            case "replica warm":
                if name not in self.warming:
                    return ()
                self.warming.remove(name)
                self.warm.add(name)
                return change.on_hybrid_warm(name, now=now)
            case "left":
                self.warming.discard(name)
                self.warm.discard(name)
                self.hybrids.pop(name, None)
                self.members.discard(name)
                return change.on_hybrid_left(name, now=now)
        raise AssertionError(what)

    def strike(  # noqa: C901, PLR0911, PLR0912, PLR0915 - a table
        self, change: Reconfiguration, fault: str
    ) -> tuple[Transition, ...]:
        alive = [n for n, s in self.stage.items() if s in (Stage.SERVING, Stage.STARTING)]
        name = self.rng.choice(alive) if alive else None
        match fault:
            case "crash" if name is not None:
                self.give_back(name)
                self.stage[name] = Stage.STARTING
                self.happenings.append(("serving", name))
                return change.on_lost(name, now=self.now)
            case "give up" if name is not None:
                self.give_back(name)
                del self.stage[name]
                return change.on_gave_up(name, "3 restarts", now=self.now)
            case "unkillable":
                stopping = [n for n, s in self.stage.items() if s is Stage.STOPPING]
                # It stays where it is for ever: its slots are never free again.
                return change.on_unkillable(stopping[0], now=self.now) if stopping else ()
            case "stuck replica" if self.hybrids:
                # Its slots are never free again.
                replica_id = self.rng.choice(sorted(self.hybrids))
                lost = hybrid_slots(self.hybrids.pop(replica_id))
                self.lost_slots |= {slot for _, slot in lost}
                self.members.discard(replica_id)
                return change.on_hybrid_lost(replica_id, "hangs", now=self.now, lost=lost)
            case "sleep":
                # One that does not fall asleep is ended; one that sleeps may die.
                sleepers = (Stage.FALLING_ASLEEP, Stage.ASLEEP)
                found = [n for n, stage in self.stage.items() if stage in sleepers]
                if not found:
                    return ()
                del self.stage[found[0]]
                return change.on_gone(found[0], now=self.now)
            case "gang" if self.coming_train is not None:
                return change.on_training_failed("out of memory", now=self.now)
            case "replica" if self.hybrids or self.warming or self.warm:
                replica_id = self.rng.choice(sorted({*self.hybrids, *self.warming, *self.warm}))
                self.hybrids.pop(replica_id, None)
                self.warming.discard(replica_id)
                self.warm.discard(replica_id)
                self.members.discard(replica_id)
                return change.on_hybrid_lost(replica_id, "SIGKILL", now=self.now)
            case "hang":
                current = change.current
                if current is not None and self.happenings:
                    self.happenings.pop(self.rng.randrange(len(self.happenings)))
                return ()
            case _:
                return ()


def driven(world: World, change: Reconfiguration, faults: dict[int, str]) -> Reconfiguration:
    """Let things happen until the change ends; a crash of the supervisor gives another machine."""
    world.carry_out(change.begin(now=world.now))
    for step in range(2000):
        if change.result is not None:
            return change
        world.now += 1.0
        fault = faults.get(step)
        if fault == "supervisor":
            change = resumed(world, change)
            world.carry_out(change.begin(now=world.now))
        elif fault is not None:
            world.carry_out(world.strike(change, fault))
        elif world.happenings:
            what, name = world.happenings.pop(world.rng.randrange(len(world.happenings)))
            world.carry_out(world.happen(change, what, name))
        else:
            world.now += TIMEOUT_S
            world.carry_out(change.on_tick(now=world.now))
    raise AssertionError(f"no end: {change.current} on {change.ground}")


def resumed(world: World, change: Reconfiguration) -> Reconfiguration:
    """What the next supervisor does: adopt what runs, end the rest, go on from there."""
    for name, stage in list(world.stage.items()):
        if stage in (*NOT_THERE, Stage.FALLING_ASLEEP, Stage.STOPPING):
            if world.placement[name].slots and not _is_lost(change, world.placement[name]):
                world.give_back(name)
                del world.stage[name]
        elif stage is not Stage.SERVING:
            world.give_back(name)
            world.stage[name] = Stage.STARTING
    gone = set(world.hybrids)
    world.hybrids.clear()
    world.warming.clear()
    world.warm.clear()
    world.members.clear()
    world.is_hold_wanted = world.is_held = False
    if world.coming_train is not None:
        world.train, world.coming_train = world.coming_train, None
    world.happenings = [
        ("serving", name) for name, stage in world.stage.items() if stage is Stage.STARTING
    ]
    ground = msgspec.structs.replace(world.ground(), lost=change.ground.lost)
    order = change.order
    # Replicas die with their supervisor, and their names with them.
    fresh = [f"hybrid-{n}" for n in range(1000 + len(world.ids_used) * 10, 9000)]
    wanted = msgspec.structs.replace(
        order.wanted,
        hybrids=tuple(
            msgspec.structs.replace(it, replica_id=ReplicaId(fresh[k]))
            for k, it in enumerate(order.wanted.hybrids)
        ),
    )
    old = msgspec.structs.replace(
        order.old, hybrids=tuple(it for it in order.old.hybrids if it.replica_id not in gone)
    )
    old = msgspec.structs.replace(old, hybrids=())
    order = msgspec.structs.replace(order, wanted=wanted, old=old)
    return Reconfiguration(order, ground, world.rules, timeout_s=TIMEOUT_S, now=world.now)


def _is_lost(change: Reconfiguration, placement: InstancePlacement) -> bool:
    return any((placement.node, slot) in change.ground.lost for slot in placement.slots)


def begun(
    old: Plan, wanted: Plan, rules: Rules, asleep: Iterable[InstancePlacement] = ()
) -> Reconfiguration:
    order = Order(decision_id=1, reason="test", old=old, wanted=wanted)
    return Reconfiguration(order, settled(old, asleep), rules, timeout_s=TIMEOUT_S, now=0.0)
