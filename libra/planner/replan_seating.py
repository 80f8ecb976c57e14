"""Which slots a changed plan uses: the core stays where it is, and so does all that can."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice

import msgspec

from libra.ids import InstanceId, NodeRank, ReplicaId, SlotId
from libra.planner.groups import seats_of_groups
from libra.planner.matching import slots_of
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, Slot


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of the run."""

    num_gpus: int
    """That may be used at once."""

    gpus_per_node: int
    lost: frozenset[Slot] = frozenset()
    """Held by processes that do not end, or of nodes that are away."""

    crosses_nodes: bool = False
    """A tensor-parallel group of the trainer may lie on several nodes."""

    def slots(self) -> Iterator[Slot]:
        """Those that are not lost: from the first node on, as many as there may be in use."""
        every = (
            (NodeRank(k // self.gpus_per_node), SlotId(k % self.gpus_per_node)) for k in count()
        )
        yield from islice((slot for slot in every if slot not in self.lost), self.num_gpus)


def core_seats(plan: Plan, tp: int, num_gpus: int, room: Room) -> tuple[Slot, ...] | None:
    """Slots in rank order for another core: those that `plan` gives to its own go first.

    Then idle ones, and those of the last instances, of the core's first node before others. None
    when there are not so many for whole groups of `tp`.
    """
    train = plan.train
    own = [(train.node_of_rank(rank), slot) for rank, slot in enumerate(train.slots)]
    own = [slot for slot in own if slot not in room.lost]
    serving = {(it.node, slot) for it in plan.instances for slot in it.slots} - room.lost
    idle = sorted(everywhere(plan, room) - serving - set(own))
    others = sorted([*idle, *sorted(serving, reverse=True)], key=lambda it: it[0] != train.node)
    return seats_of_groups(tp, num_gpus, own + others, crosses_nodes=room.crosses_nodes)


def everywhere(plan: Plan, room: Room) -> set[Slot]:
    """Of the room, and what `plan` uses beyond it: where something is, it may stay."""
    return {*room.slots(), *slots_of(plan)} - room.lost


def seated(
    plan: Plan, tps: Sequence[int], *, num_replicas: int, replica_gpus: int, room: Room
) -> Plan | None:
    """`plan` with instances of these TP degrees and so many hybrid replicas beside its core.

    Instances and replicas of `plan` that are still wanted keep slots and name; names of others are
    provisional. None when node boundaries leave no room.
    """
    for keeps in (True, False):
        seats = _Seats(plan, room)
        try:
            hybrids = seats.hybrids(num_replicas, replica_gpus)
            instances = seats.instances(tps, keeps=keeps)
        except _NoRoomError:
            continue
        return msgspec.structs.replace(plan, instances=instances, hybrids=hybrids)
    return None


class _NoRoomError(Exception):
    """Somebody is left without slots."""


class _Seats:
    """Slots that nobody has taken yet."""

    def __init__(self, plan: Plan, room: Room) -> None:
        self._plan = plan
        core = {(plan.train.node_of_rank(k), slot) for k, slot in enumerate(plan.train.slots)}
        self._free = sorted(slot for slot in everywhere(plan, room) if slot not in core)
        self._crosses_nodes = room.crosses_nodes

    def hybrids(self, num_replicas: int, replica_gpus: int) -> tuple[HybridPlacement, ...]:
        kept = self._plan.hybrids[:num_replicas]
        for hybrid in kept:
            nodes = hybrid.nodes or (hybrid.node,) * len(hybrid.slots)
            self._take(zip(nodes, hybrid.slots, strict=True))
        names = _new_names("hybrid", (hybrid.replica_id for hybrid in self._plan.hybrids))
        added = [
            self._new_hybrid(ReplicaId(name), replica_gpus)
            for name, _ in zip(names, range(num_replicas - len(kept)), strict=False)
        ]
        return (*kept, *added)

    def _new_hybrid(self, replica_id: ReplicaId, num_gpus: int) -> HybridPlacement:
        """On the last node that holds it, beside the core; else on the last slots of all.

        Groups of tensor parallelism stay inside a node.
        """
        used = {(i.node, slot) for i in self._plan.instances for slot in i.slots}
        idle_last = sorted(self._free, key=lambda slot: (slot not in used, slot))
        nodes = sorted({node for node, _ in self._free}, reverse=True)
        on_one = [[s for s in reversed(idle_last) if s[0] == node] for node in nodes]
        tries = (
            seats_of_groups(
                self._plan.train.tp, num_gpus, chosen, crosses_nodes=self._crosses_nodes
            )
            for chosen in (*on_one, self._free[::-1])
        )
        found = next((seats for seats in tries if seats is not None), None)
        if found is None:
            raise _NoRoomError
        slots = sorted(found)
        self._take(slots)
        one_node = len({node for node, _ in slots}) == 1
        return HybridPlacement(
            replica_id=replica_id,
            slots=tuple(slot for _, slot in slots),
            node=slots[0][0],
            nodes=() if one_node else tuple(node for node, _ in slots),
        )

    def instances(self, tps: Sequence[int], *, keeps: bool) -> tuple[InstancePlacement, ...]:
        missing = sorted(tps, reverse=True)
        found: list[InstancePlacement] = []
        for instance in self._plan.instances if keeps else ():
            slots = [(instance.node, slot) for slot in instance.slots]
            if instance.tp in missing and set(slots) <= set(self._free):
                missing.remove(instance.tp)
                self._take(slots)
                found.append(instance)
        names = _new_names("vllm", (i.instance_id for i in self._plan.instances))
        found += [
            self._new_instance(InstanceId(name), tp)
            for name, tp in zip(names, missing, strict=False)
        ]
        return tuple(found)

    def _new_instance(self, instance_id: InstanceId, tp: int) -> InstancePlacement:
        for node in sorted({node for node, _ in self._free}):
            slots = [slot for slot in self._free if slot[0] == node][:tp]
            if len(slots) == tp:
                self._take(slots)
                return InstancePlacement(
                    instance_id=instance_id,
                    tp=tp,
                    slots=tuple(slot for _, slot in slots),
                    node=node,
                )
        raise _NoRoomError

    def _take(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot not in self._free:
                raise _NoRoomError
            self._free.remove(slot)


def _new_names(prefix: str, used: Iterable[str]) -> Iterator[str]:
    numbers = [int(name.rpartition("-")[2]) for name in used]
    return (f"{prefix}-{number}" for number in count(max(numbers, default=-1) + 1))
