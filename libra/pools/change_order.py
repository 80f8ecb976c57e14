"""Which transition comes next: a function of what is there and of what is wanted. Pure.

Because nothing else is remembered, the rest of a change that was interrupted after any prefix, and
the way back from there, are made by the same rules. In order: end what is on its way out, or put it
to sleep; keep what stays after all; warm up what comes, if that is wanted, while everything else
goes on; detach replicas that go; change the core as soon as its slots are free; start, or wake up,
whatever has its slots; drain as many of those that go as the minimum allows; wait for what was
started; attach replicas. Each transition takes all that it can at once, which is a wave.
"""

from collections.abc import Iterator

import msgspec

from libra.ids import InstanceId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, Slot
from libra.pools.ground import (
    ENDING,
    WITHOUT_DEVICE,
    Ground,
    Server,
    Stage,
    core_slots,
    hybrid_slots,
    is_lent,
    server_slots,
)
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
    begun,
    ended,
)


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the order of a change depends on besides the two plans."""

    min_rollout_gpus: int
    """No drain leaves fewer GPUs serving."""

    warms_first: bool = False
    """Bring new processes up to where they need a device before anything is drained."""

    serves_first: bool = False
    """Drain nothing before everything new serves: new instances need slots of their own."""

    gives_back: bool = False
    """Do not wait for answers in flight when draining."""

    sleeps: bool = False
    """A server of which training gets every slot sleeps instead of ending."""

    untouched: frozenset[InstanceId] = frozenset()
    """Instances of both plans; the change does not wait for them to serve."""


class Stuck(msgspec.Struct, frozen=True):
    """The rules allow nothing more, and the target is not reached."""

    reason: str


def next_transition(ground: Ground, target: Plan, rules: Rules) -> Transition | Stuck | None:
    """None: the ground is what `target` says."""
    state = _State(ground, target, rules)
    for rule in (
        _end_leavers,
        _keep_stayers,
        _warm,
        _detach,
        _change_core,
        _start,
        _drain,
        _await,
        _attach,
    ):
        found = rule(state)
        if found is not None:
            return found
    return _why_stuck(state)


def transitions(ground: Ground, target: Plan, rules: Rules) -> tuple[Transition, ...] | Stuck:
    """The whole list, if everything goes well."""
    listed: list[Transition] = []
    while (found := next_transition(ground, target, rules)) is not None:
        if isinstance(found, Stuck):
            return found
        listed.append(found)
        ground = ended(begun(ground, found), found)
        ground.check()
    return tuple(listed)


class _State:
    """The questions that the rules ask."""

    def __init__(self, ground: Ground, target: Plan, rules: Rules) -> None:
        self.ground, self.target, self.rules = ground, target, rules
        self.wanted = {it.instance_id: it for it in target.instances}
        self.owned = ground.owned
        here = {it.instance_id: it for it in ground.servers}
        self.leaving = [it for it in ground.servers if it.instance_id not in self.wanted]
        self.staying = [it for it in ground.servers if it.instance_id in self.wanted]
        self.coming = [
            it
            for it in target.instances
            if it.instance_id not in here or here[it.instance_id].stage in WITHOUT_DEVICE
        ]

    @property
    def is_core_right(self) -> bool:
        ground = self.ground
        is_there = ground.reshaping is None and not ground.is_core_gone
        return is_there and ground.train == self.target.train

    @property
    def hybrids_to_come(self) -> tuple[HybridPlacement, ...]:
        here = {it.placement.replica_id for it in self.ground.hybrids if it.waits is None}
        return tuple(it for it in self.target.hybrids if it.replica_id not in here)

    @property
    def resting(self) -> set[InstanceId]:
        """Leavers that are to sleep until their slots come back."""
        if not self.rules.sleeps:
            return set()
        return {it.instance_id for it in self.leaving if is_lent(it.placement, self.target)}

    def late(self) -> list[InstanceId]:
        """Servers that this change started, and that do not serve yet."""
        return [
            it.instance_id
            for it in self.staying
            if it.stage is Stage.STARTING and it.instance_id not in self.rules.untouched
        ]


def _end_leavers(state: _State) -> Transition | None:
    # What does not serve any more may still have requests from when it did.
    undone = (Stage.DRAINING, Stage.STARTING)
    draining = [it.instance_id for it in state.leaving if it.stage in undone]
    if draining:
        return Drain(tuple(draining), state.rules.gives_back)
    resting = state.resting
    # Who has begun to fall asleep does so, whatever becomes of it then.
    falling = state.ground.ids_in(Stage.FALLING_ASLEEP)
    drained = [it.instance_id for it in state.leaving if it.stage is Stage.DRAINED]
    tired = (*falling, *(it for it in drained if it in resting))
    if tired:
        return Sleep(tired)
    stages = (*WITHOUT_DEVICE, *ENDING, Stage.DRAINED)
    doomed = [
        it.instance_id for it in state.leaving if it.stage in stages and not _rests(state, it)
    ]
    # A stayer whose end has begun comes back when its end is over.
    doomed += [it.instance_id for it in state.staying if it.stage in ENDING]
    return Stop(tuple(doomed)) if doomed else None


def _rests(state: _State, server: Server) -> bool:
    return server.stage is Stage.ASLEEP and server.instance_id in state.resting


def _keep_stayers(state: _State) -> Transition | None:
    stages = (Stage.DRAINING, Stage.DRAINED)
    kept = [it.instance_id for it in state.staying if it.stage in stages]
    return Undrain(tuple(kept)) if kept else None


def _warm(state: _State) -> Transition | None:
    if not state.rules.warms_first:
        return None
    cold = [it for it in state.coming if state.ground.find(it.instance_id) is None]
    known = {it.placement.replica_id for it in state.ground.hybrids}
    # A replica is a copy of the core, so of one that is there already and trains.
    has_core = state.is_core_right and not state.ground.is_hold_wanted
    replicas = state.hybrids_to_come if has_core else ()
    cold_replicas = [it for it in replicas if it.replica_id not in known]
    if cold or cold_replicas:
        return Warm(tuple(cold), tuple(cold_replicas))
    warming = state.ground.ids_in(Stage.WARMING)
    warming_replicas = state.ground.replicas_in(Stage.WARMING)
    if warming or warming_replicas:
        return AwaitWarm(warming, warming_replicas)
    return None


def _detach(state: _State) -> Transition | None:
    wanted = {it.replica_id for it in state.target.hybrids}
    ids = [it.placement.replica_id for it in state.ground.hybrids]
    gone = tuple(it for it in ids if it not in wanted or not state.is_core_right)
    return DetachHybrid(gone) if gone else None


def _change_core(state: _State) -> Transition | None:
    ground, train = state.ground, state.target.train
    if state.is_core_right:
        return ReleaseStep() if ground.is_hold_wanted else None
    if core_slots(train) & (state.owned - ground.core_slots):
        return None
    stands = ground.is_held or ground.reshaping or ground.is_core_gone
    return ReshapeTraining(train) if stands else HoldStep()


def _start(state: _State) -> Transition | None:
    ready = [it for it in state.coming if not server_slots(it) & state.owned]
    asleep = set(state.ground.ids_in(Stage.ASLEEP))
    woken = tuple(it.instance_id for it in ready if it.instance_id in asleep)
    if woken:
        return Wake(woken)
    return Start(tuple(ready)) if ready else None


def _drain(state: _State) -> Transition | None:
    if state.rules.serves_first and (state.coming or state.late()):
        return None
    spare_gpus = state.ground.num_serving_gpus - state.rules.min_rollout_gpus
    leavers = _in_order_of_use(state)
    handed_on = frozenset[Slot]().union(*map(server_slots, state.coming))
    waits_for_more = state.late() and any(
        it.placement.tp > spare_gpus and server_slots(it.placement) & handed_on for it in leavers
    )
    chosen: list[InstanceId] = []
    for server in leavers:
        # Where others come after a large one that cannot go yet, nobody leaves a gap before it.
        if waits_for_more and not server_slots(server.placement) & handed_on:
            continue
        if server.placement.tp <= spare_gpus:
            spare_gpus -= server.placement.tp
            chosen.append(server.instance_id)
    return Drain(tuple(chosen), state.rules.gives_back) if chosen else None


def _in_order_of_use(state: _State) -> list[Server]:
    """Those that hold what the first one to come needs go first."""
    order: dict[Slot, int] = {}
    for index, slots in enumerate(_needed(state)):
        for slot in slots:
            order.setdefault(slot, index)
    last = len(order)

    def use(server: Server) -> int:
        return min((order.get(slot, last) for slot in server_slots(server.placement)), default=last)

    return sorted((it for it in state.leaving if it.stage is Stage.SERVING), key=use)


def _needed(state: _State) -> Iterator[frozenset[Slot]]:
    yield core_slots(state.target.train)
    yield from (server_slots(it) for it in state.coming)
    yield from (hybrid_slots(it) for it in state.hybrids_to_come)


def _await(state: _State) -> Transition | None:
    late = state.late()
    if not late and any(it.stage is Stage.SERVING for it in state.leaving):
        # The minimum does not let them go: whoever else is on its way up is waited for.
        late = [it.instance_id for it in state.staying if it.stage is Stage.STARTING]
    return AwaitVersion(tuple(late)) if late else None


def _attach(state: _State) -> Transition | None:
    if not state.is_core_right:
        return None
    free = tuple(it for it in state.hybrids_to_come if not hybrid_slots(it) & state.owned)
    joining = tuple(
        it.placement
        for it in state.ground.hybrids
        if not it.is_member and it.waits is None and it.placement in state.target.hybrids
    )
    return AttachHybrid((*joining, *free)) if joining or free else None


def _why_stuck(state: _State) -> Stuck | None:
    remaining = [it for it in state.leaving if it.stage is Stage.SERVING]
    if remaining and state.rules.serves_first and state.coming:
        return Stuck(f"{_names(state.coming)} would need devices that nobody uses")
    if remaining:
        names = ", ".join(it.instance_id for it in remaining)
        return Stuck(
            f"{names} cannot go: {state.ground.num_serving_gpus} GPUs serve, and "
            f"{state.rules.min_rollout_gpus} have to"
        )
    if state.coming:
        return Stuck(f"the devices of {_names(state.coming)} are not free")
    if not state.is_core_right or state.hybrids_to_come:
        return Stuck("the devices that training would get are not free")
    return None


def _names(placements: list[InstancePlacement]) -> str:
    return ", ".join(it.instance_id for it in placements)
