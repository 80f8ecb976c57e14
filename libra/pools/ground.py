"""Who holds which slot while a plan is changed. Pure."""

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import Literal

import msgspec

from libra.errors import InvariantError
from libra.ids import InstanceId, ReplicaId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, Slot, TrainPlacement


class Stage(Enum):
    """Where one server is on its way into the plan, or out of it."""

    WARMING = "warming"
    """A process without a device comes up."""

    WARM = "warm"
    """It waits for a device."""

    STARTING = "starting"
    """It has its device, and does not serve (yet, or for a while)."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    FALLING_ASLEEP = "falling asleep"
    """It is giving its device's memory back."""

    ASLEEP = "asleep"
    """It is there for when its slots come back, and holds none of them."""

    STOPPING = "stopping"
    COOLING = "cooling"
    """It is ended before it had a device."""


WITHOUT_DEVICE = frozenset({Stage.WARMING, Stage.WARM, Stage.ASLEEP, Stage.COOLING})
ENDING = frozenset({Stage.STOPPING, Stage.COOLING})


class Server(msgspec.Struct, frozen=True):
    """One instance as the change sees it."""

    placement: InstancePlacement
    stage: Stage

    @property
    def instance_id(self) -> InstanceId:
        return self.placement.instance_id


class Hybrid(msgspec.Struct, frozen=True):
    """One hybrid replica on its way in, in, or on its way out."""

    placement: HybridPlacement
    is_member: bool = False
    waits: Literal[Stage.WARMING, Stage.WARM] | None = None
    """While it has no slots: how far its processes have come."""


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that holds slots at one moment; a change of it is another Ground."""

    train: TrainPlacement
    servers: tuple[Server, ...]
    hybrids: tuple[Hybrid, ...] = ()
    reshaping: TrainPlacement | None = None
    """What the gang is being started anew as; until it has its model both hold their slots."""

    is_hold_wanted: bool = False
    is_held: bool = False
    """The trainer stands at a step boundary and waits for the change."""

    is_core_gone: bool = False
    """No rank is left and no slot of the core is held: a node of it was lost."""

    lost: frozenset[Slot] = frozenset()
    """Slots of processes that cannot be ended; nobody may use them again."""

    def ids_in(self, *stages: Stage) -> tuple[InstanceId, ...]:
        return tuple(it.instance_id for it in self.servers if it.stage in stages)

    def find(self, instance_id: InstanceId) -> Server | None:
        return next((it for it in self.servers if it.instance_id == instance_id), None)

    @property
    def num_serving_gpus(self) -> int:
        return sum(it.placement.tp for it in self.servers if it.stage is Stage.SERVING)

    @property
    def owned(self) -> frozenset[Slot]:
        """Slots that somebody holds, lost ones included."""
        return frozenset(self._owners()) | self.lost

    @property
    def core_slots(self) -> frozenset[Slot]:
        """What the core holds, and what it will hold once it has been started anew."""
        held = frozenset[Slot]() if self.is_core_gone else core_slots(self.train)
        return held if self.reshaping is None else held | core_slots(self.reshaping)

    def check(self) -> None:
        """Raise InvariantError when a slot has two owners, or one that is lost has one."""
        owners = self._owners()
        twice = sorted(slot for slot, count in owners.items() if count > 1)
        if twice:
            raise InvariantError(f"slots with two owners: {twice}")
        if revived := sorted(self.lost & owners.keys()):
            raise InvariantError(f"lost slots are used: {revived}")

    def _owners(self) -> Counter[Slot]:
        owners = Counter(self.core_slots)
        for server in self.servers:
            if server.stage not in WITHOUT_DEVICE:
                owners.update(server_slots(server.placement))
        for hybrid in self.hybrids:
            if hybrid.waits is not None:
                continue
            owners.update(hybrid_slots(hybrid.placement))
        return owners

    # Another ground

    def staged(self, ids: Iterable[InstanceId], stage: Stage) -> "Ground":
        chosen = frozenset(ids)
        servers = tuple(
            Server(it.placement, stage) if it.instance_id in chosen else it for it in self.servers
        )
        return msgspec.structs.replace(self, servers=servers)

    def joined_by(self, placements: Iterable[InstancePlacement], stage: Stage) -> "Ground":
        """With these instances at `stage`, whether or not they were there."""
        coming = tuple(Server(it, stage) for it in placements)
        ids = {it.instance_id for it in coming}
        kept = tuple(it for it in self.servers if it.instance_id not in ids)
        return msgspec.structs.replace(self, servers=(*kept, *coming))

    def without(self, ids: Iterable[InstanceId]) -> "Ground":
        gone = frozenset(ids)
        kept = tuple(it for it in self.servers if it.instance_id not in gone)
        return msgspec.structs.replace(self, servers=kept)

    def replicas_in(self, stage: Stage) -> tuple[ReplicaId, ...]:
        """Those without slots that have come so far."""
        return tuple(it.placement.replica_id for it in self.hybrids if it.waits is stage)

    def with_hybrid(
        self,
        placement: HybridPlacement,
        *,
        is_member: bool,
        waits: Literal[Stage.WARMING, Stage.WARM] | None = None,
    ) -> "Ground":
        left = self.without_hybrid(placement.replica_id)
        hybrids = (*left.hybrids, Hybrid(placement, is_member, waits))
        return msgspec.structs.replace(left, hybrids=hybrids)

    def with_warm_hybrid(self, replica_id: ReplicaId) -> "Ground":
        """With the replica, if it has no slots yet, waiting for them."""
        found = next((it for it in self.hybrids if it.placement.replica_id == replica_id), None)
        if found is None or found.waits is None:
            return self
        return self.with_hybrid(found.placement, is_member=False, waits=Stage.WARM)

    def without_hybrid(self, replica_id: ReplicaId) -> "Ground":
        kept = tuple(it for it in self.hybrids if it.placement.replica_id != replica_id)
        return msgspec.structs.replace(self, hybrids=kept)


def core_slots(train: TrainPlacement) -> frozenset[Slot]:
    return frozenset((train.node_of_rank(rank), slot) for rank, slot in enumerate(train.slots))


def server_slots(placement: InstancePlacement) -> frozenset[Slot]:
    return frozenset((placement.node, slot) for slot in placement.slots)


def is_lent(placement: InstancePlacement, plan: Plan) -> bool:
    """Whether training has every slot of the instance under `plan`."""
    lent = core_slots(plan.train).union(*map(hybrid_slots, plan.hybrids))
    return server_slots(placement) <= lent


def hybrid_slots(placement: HybridPlacement) -> frozenset[Slot]:
    nodes = placement.nodes or (placement.node,) * len(placement.slots)
    return frozenset(zip(nodes, placement.slots, strict=True))


def plan_on(ground: Ground, plan: Plan) -> Plan:
    """What is there, as a plan: `plan` with the servers, the core and the members of `ground`."""
    stays = (Stage.STARTING, Stage.SERVING, Stage.DRAINING, Stage.DRAINED)
    return msgspec.structs.replace(
        plan,
        train=ground.reshaping or ground.train,
        instances=tuple(it.placement for it in ground.servers if it.stage in stays),
        hybrids=tuple(it.placement for it in ground.hybrids if it.is_member),
    )
