"""One change of the plan, from its first transition to its last. Pure.

    change = Reconfiguration(order, ground, terms, now=now)
    transitions = change.begin(now=now)        # carry them out; then, as things happen:
    transitions = change.on_serving(id, now=now)
    ...
    change.result                              # set when nothing is left to do

Going forward, a wait that takes longer than its limit, or an instance that cannot come up, turns
the change round: from then on the same rules lead to the plan before. On the way back requests in
flight are not waited for, and what fails there is given up: the plan in force is then what is left.
The invariant (no slot has two owners, no drain leaves too few GPUs serving) is checked after every
transition.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from libra.errors import InvariantError
from libra.ids import InstanceId, ReplicaId
from libra.planner.matching import slots_of
from libra.planner.plan import Plan, Slot
from libra.pools.change_order import Rules, Stuck, next_transition
from libra.pools.ground import WITHOUT_DEVICE, Ground, Stage, is_lent, plan_on, server_slots
from libra.pools.transition import (
    PHASE_OF,
    Drain,
    ReleaseStep,
    Stop,
    Transition,
    Undrain,
    begun,
    in_words,
    is_over,
)

Ending: TypeAlias = Literal["done", "rolled_back", "failed"]
"""The plan wanted is in force; the one before is, and serves; what is left of the one before is."""

Cause: TypeAlias = Literal["decision", "node_lost", "node_back", "starved", "replica_lost"]
"""Somebody decided that another plan is better, a node made it necessary or possible, nothing
served and the run could not go on without a server, or a replica left its devices to nobody."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done; kept in state.json until it is."""

    decision_id: int
    reason: str
    old: Plan
    """In force before."""

    wanted: Plan
    """Matched with `old`."""

    is_turned: bool = False
    """Lead back to `old`."""

    turned_by: str = ""
    cause: Cause = "decision"
    has_way_back: bool = True
    """False: `old` cannot be in force again, since a node of it is gone, or is of no use, since
    nothing serves under it."""

    begun_wall_ns: int = 0
    is_resumed: bool = False
    """An earlier supervisor began it."""

    transitions: tuple[str, ...] = ()
    """In words, of earlier supervisors."""

    phases: dict[str, float] = {}
    """What those of them took that were over."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a change ended."""

    outcome: Ending

    reason: str
    plan: Plan
    """In force from now on."""

    total_s: float
    stalled_s: float
    phases: dict[str, float]
    transitions: tuple[str, ...]


class Reconfiguration:
    """The machine. Every `on_<event>` returns the transitions to carry out next, in order."""

    def __init__(
        self, order: Order, ground: Ground, rules: Rules, *, timeout_s: float, now: float
    ) -> None:
        """`timeout_s` limits each wait."""
        self.order = order
        self.ground = ground
        self.result: Result | None = None
        both = {it.instance_id for it in order.old.instances}
        both &= {it.instance_id for it in order.wanted.instances}
        self._rules = msgspec.structs.replace(rules, untouched=frozenset(both))
        self._timeout_s = timeout_s
        self._begun_at = now
        self._current: Transition | None = None
        self._current_since = now
        self._held_since: float | None = None
        self._stalled_s = 0.0
        self._phases = dict(order.phases)
        self._words = list(order.transitions)
        self._target = order.old if order.is_turned else order.wanted
        self._is_whole = True
        """Nothing of the target had to be given up."""

    @property
    def untouched(self) -> frozenset[InstanceId]:
        """Instances of both plans."""
        return self._rules.untouched

    @property
    def current(self) -> Transition | None:
        """What is waited for."""
        return self._current

    @property
    def order_so_far(self) -> Order:
        """For whoever has to go on with it."""
        return msgspec.structs.replace(
            self.order, transitions=tuple(self._words), phases=dict(self._phases)
        )

    def begin(self, *, now: float) -> tuple[Transition, ...]:
        self.ground.check()
        return self._advance(now)

    # What happens

    def on_warm(self, instance_id: InstanceId, *, now: float) -> tuple[Transition, ...]:
        return self._moved(instance_id, Stage.WARMING, Stage.WARM, now)

    def on_serving(self, instance_id: InstanceId, *, now: float) -> tuple[Transition, ...]:
        """It may be routed to at the committed version."""
        return self._moved(instance_id, Stage.STARTING, Stage.SERVING, now)

    def on_lost(self, instance_id: InstanceId, *, now: float) -> tuple[Transition, ...]:
        """It does not serve any more and may come back: its process died, or hangs.

        One that is being drained has nothing in flight then, which is said like any other end.
        """
        return self._moved(instance_id, Stage.SERVING, Stage.STARTING, now)

    def on_drained(self, instance_id: InstanceId, *, now: float) -> tuple[Transition, ...]:
        """Nothing is in flight there."""
        return self._moved(instance_id, Stage.DRAINING, Stage.DRAINED, now)

    def on_asleep(self, instance_id: InstanceId, *, now: float) -> tuple[Transition, ...]:
        """It has given its devices back, and is there for later."""
        return self._moved(instance_id, Stage.FALLING_ASLEEP, Stage.ASLEEP, now)

    def on_gone(self, instance_id: InstanceId, *, now: float) -> tuple[Transition, ...]:
        """It has ended, and its devices are free."""
        self.ground = self.ground.without((instance_id,))
        return self._advance(now)

    def on_unkillable(self, instance_id: InstanceId, *, now: float) -> tuple[Transition, ...]:
        """It does not end: whatever needs the slots that it has cannot be."""
        server = self.ground.find(instance_id)
        if server is None:
            return ()
        if server.stage in WITHOUT_DEVICE:
            return self.on_gone(instance_id, now=now)  # it stands in nobody's way
        lost = self.ground.lost | server_slots(server.placement)
        self.ground = msgspec.structs.replace(self.ground.without((instance_id,)), lost=lost)
        return self._failed(f"{instance_id} cannot be ended", now)

    def on_gave_up(
        self, instance_id: InstanceId, reason: str, *, now: float
    ) -> tuple[Transition, ...]:
        """Its restart budget is spent; its devices are free."""
        if self.ground.find(instance_id) is None:
            return ()
        self.ground = self.ground.without((instance_id,))
        if not self.order.is_turned and instance_id not in self._rules.untouched:
            if instance_id in _ids(self.order.wanted):
                return self._failed(f"{instance_id} was given up: {reason}", now)
            return self._advance(now)
        # Neither way brings it back.
        self._is_whole = self._is_whole and instance_id not in _ids(self._target)
        self._drop_instance(instance_id)
        return self._advance(now)

    def on_step_held(self, *, now: float) -> tuple[Transition, ...]:
        """The trainer stands at a step boundary."""
        if self.ground.is_hold_wanted and not self.ground.is_held:
            self.ground = msgspec.structs.replace(self.ground, is_held=True)
            self._held_since = now
        return self._advance(now)

    def on_step_going(self, *, now: float) -> tuple[Transition, ...]:
        """The trainer does not stand: a gang that was starting has gone on to its next boundary."""
        if not self.ground.is_held or self.ground.reshaping is not None:
            return ()
        self._note_release(now)
        self.ground = msgspec.structs.replace(self.ground, is_held=False)
        return self._advance(now)

    def on_training_ready(self, *, now: float) -> tuple[Transition, ...]:
        """The gang has its model in the layout it was started with."""
        train = self.ground.reshaping or self.ground.train
        self.ground = msgspec.structs.replace(
            self.ground, train=train, reshaping=None, is_core_gone=False
        )
        return self._advance(now)

    def on_training_failed(self, reason: str, *, now: float) -> tuple[Transition, ...]:
        """The gang was lost while it was being started anew; it is started again."""
        if self.ground.reshaping is None or self.order.is_turned or not self.order.has_way_back:
            return ()
        return self._failed(f"the trainer did not come up: {reason}", now)

    def on_hybrid_warm(self, replica_id: ReplicaId, *, now: float) -> tuple[Transition, ...]:
        """Its processes wait for their devices."""
        self.ground = self.ground.with_warm_hybrid(replica_id)
        return self._advance(now)

    def on_hybrid_joined(self, replica_id: ReplicaId, *, now: float) -> tuple[Transition, ...]:
        for hybrid in self.ground.hybrids:
            if hybrid.placement.replica_id == replica_id:
                self.ground = self.ground.with_hybrid(hybrid.placement, is_member=True)
        return self._advance(now)

    def on_hybrid_left(
        self, replica_id: ReplicaId, *, now: float, lost: frozenset[Slot] = frozenset()
    ) -> tuple[Transition, ...]:
        """It has ended, and its devices are free but for `lost`, which its processes keep."""
        self._take_out(replica_id, lost)
        return self._advance_without(replica_id, lost, now)

    def on_hybrid_lost(
        self,
        replica_id: ReplicaId,
        reason: str,
        *,
        now: float,
        lost: frozenset[Slot] = frozenset(),
    ) -> tuple[Transition, ...]:
        """It has ended unasked. Its name is never used again, so no plan can have it."""
        was_new = replica_id in {it.replica_id for it in self.order.wanted.hybrids}
        was_new &= replica_id not in {it.replica_id for it in self.order.old.hybrids}
        self._take_out(replica_id, lost)
        self._drop(lambda plan: _without_hybrid(plan, replica_id))
        if was_new and not self.order.is_turned and self.result is None:
            return self._failed(f"{replica_id} was lost: {reason}", now)
        return self._advance_without(replica_id, lost, now)

    def excuse(self, *, now: float) -> None:
        """Nobody can be late now: a node that the change needs is away."""
        self._current_since = now

    def on_starved(self, reason: str, *, now: float) -> tuple[Transition, ...]:
        """The run needs a server at once, and the plan wanted has none."""
        if self.order.is_turned or not self.order.has_way_back or self.result is not None:
            return ()
        return self._failed(reason, now)

    def on_tick(self, *, now: float) -> tuple[Transition, ...]:
        """Turn round, or give up on the way back, when a wait takes too long."""
        current = self._current
        if current is None or now - self._current_since < self._timeout_s:
            return ()
        reason = f"{in_words(current)}: not over within {self._timeout_s:g} s"
        if self.order.is_turned and isinstance(current, Stop):
            present = [it for it in current.instance_ids if self.ground.find(it) is not None]
            for instance_id in present[:1]:
                return self.on_unkillable(instance_id, now=now)
        return self._failed(reason, now)

    # Steps

    def _moved(
        self,
        instance_id: InstanceId,
        before: Stage,
        after: Stage,
        now: float,
    ) -> tuple[Transition, ...]:
        server = self.ground.find(instance_id)
        if server is None or server.stage is not before:
            return ()
        self.ground = self.ground.staged((instance_id,), after)
        return self._advance(now)

    def _advance(self, now: float) -> tuple[Transition, ...]:
        """Order whatever comes next, until there is something to wait for."""
        ordered: list[Transition] = []
        while self.result is None:
            if self._current is not None:
                if not is_over(self.ground, self._current):
                    break
                self._close(now)
            found = next_transition(self.ground, self._target, self._rules)
            if isinstance(found, Stuck):
                ordered += self._failed(found.reason, now)
            elif found is None:
                self._end(now)
            else:
                self._order(found, now)
                ordered.append(found)
        return tuple(ordered)

    def _take_out(self, replica_id: ReplicaId, lost: frozenset[Slot]) -> None:
        ground = self.ground.without_hybrid(replica_id)
        self.ground = msgspec.structs.replace(ground, lost=ground.lost | lost)

    def _advance_without(
        self, replica_id: ReplicaId, lost: frozenset[Slot], now: float
    ) -> tuple[Transition, ...]:
        if self.result is None and lost & set(slots_of(self._target)):
            return self._failed(f"{replica_id} cannot be ended", now)
        return self._advance(now)

    def _order(self, transition: Transition, now: float) -> None:
        self._check_minimum(transition)
        if isinstance(transition, ReleaseStep):
            self._note_release(now)
        self.ground = begun(self.ground, transition)
        self.ground.check()
        self._words.append(in_words(transition))
        self._current, self._current_since = transition, now

    def _check_minimum(self, transition: Transition) -> None:
        if not isinstance(transition, Drain):
            return
        chosen = [it for it in self.ground.servers if it.instance_id in transition.instance_ids]
        taken = sum(it.placement.tp for it in chosen if it.stage is Stage.SERVING)
        left = self.ground.num_serving_gpus - taken
        if taken and left < self._rules.min_rollout_gpus:
            raise InvariantError(
                f"{in_words(transition)} would leave {left} GPUs serving, "
                f"{self._rules.min_rollout_gpus} have to"
            )

    def _close(self, now: float) -> None:
        """The current transition is over, or is not waited for any more."""
        if self._current is not None:
            phase = PHASE_OF[type(self._current)]
            spent_s = now - self._current_since
            self._phases[phase] = self._phases.get(phase, 0.0) + spent_s
        self._current = None

    def _note_release(self, now: float) -> None:
        if self._held_since is not None:
            self._stalled_s += now - self._held_since
            self._held_since = None

    def _failed(self, reason: str, now: float) -> tuple[Transition, ...]:
        """Turn round; on the way back, go on with what is left, or end."""
        self._close(now)
        if self.order.is_turned or not self.order.has_way_back:
            return self._gave_up(reason, now)
        self.order = msgspec.structs.replace(self.order, is_turned=True, turned_by=reason)
        self._rules = msgspec.structs.replace(
            self._rules, warms_first=False, serves_first=False, gives_back=True
        )
        # A replica that has left, or is about to, cannot come back under its name.
        here = {it.placement.replica_id for it in self.ground.hybrids if it.is_member}
        hybrids = tuple(it for it in self.order.old.hybrids if it.replica_id in here)
        self._target = msgspec.structs.replace(self.order.old, hybrids=hybrids)
        self._drop_lost()
        return self._advance(now)

    def _drop_lost(self) -> None:
        lost = [it for it in self._target.instances if server_slots(it) & self.ground.lost]
        for placement in lost:
            self._is_whole = False
            self._drop_instance(placement.instance_id)

    def _gave_up(self, reason: str, now: float) -> tuple[Transition, ...]:
        target = self._target
        self._is_whole = False
        self._drop_lost()
        if target != self._target:
            return self._advance(now)
        last: list[Transition] = []
        if kept := self.ground.ids_in(Stage.DRAINING, Stage.DRAINED):
            last.append(Undrain(kept))
        if self.ground.is_hold_wanted:
            last.append(ReleaseStep())
        plan = plan_on(self.ground, self._target)
        # Nobody leads back to those whose slots training does not get.
        asleep = [it for it in self.ground.servers if it.stage is Stage.ASLEEP]
        if idle := tuple(it.instance_id for it in asleep if not is_lent(it.placement, plan)):
            last.append(Stop(idle))
        for transition in last:
            self._order(transition, now)
            self._close(now)
        plan = plan_on(self.ground, self._target)
        if self.order.is_turned:
            reason = f"{self.order.turned_by}; on the way back: {reason}"
        self._finish("failed", reason, plan, now)
        return tuple(last)

    def _end(self, now: float) -> None:
        if not self.order.is_turned:
            self._finish("done", self.order.reason, self._target, now)
            return
        outcome: Ending = "rolled_back" if self._is_whole else "failed"
        self._finish(outcome, self.order.turned_by, self._target, now)

    def _finish(self, outcome: Ending, reason: str, plan: Plan, now: float) -> None:
        self.result = Result(
            outcome=outcome,
            reason=reason,
            plan=plan,
            total_s=now - self._begun_at,
            stalled_s=self._stalled_s,
            phases=self._phases,
            transitions=tuple(self._words),
        )

    def _drop_instance(self, instance_id: InstanceId) -> None:
        self._drop(lambda plan: _without_instance(plan, instance_id))

    def _drop(self, change: Callable[[Plan], Plan]) -> None:
        """Take out of every plan what no plan can have any more."""
        self._target = change(self._target)
        self.order = msgspec.structs.replace(
            self.order, old=change(self.order.old), wanted=change(self.order.wanted)
        )


def _ids(plan: Plan) -> set[InstanceId]:
    return {it.instance_id for it in plan.instances}


def _without_instance(plan: Plan, instance_id: InstanceId) -> Plan:
    kept = tuple(it for it in plan.instances if it.instance_id != instance_id)
    return msgspec.structs.replace(plan, instances=kept)


def _without_hybrid(plan: Plan, replica_id: ReplicaId) -> Plan:
    kept = tuple(it for it in plan.hybrids if it.replica_id != replica_id)
    return msgspec.structs.replace(plan, hybrids=kept)
