"""A wanted plan in terms of the one in force: what stays is named, and lies, as it does now.

An instance of the same TP degree is the same instance, wherever the planner drew it: devices of one
node are alike, so the new plan is moved onto the slots of the old one until as many instances as
possible stay untouched. What is new gets an id that the run has never used.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from libra.ids import InstanceId, NodeRank, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, Slot


def matched(
    old: Plan,
    new: Plan,
    *,
    next_number: int,
    spare: Iterable[Slot] = (),
    keeps_instances: bool = True,
    asleep: Sequence[InstancePlacement] = (),
) -> Plan:
    """`new` with the ids and slots of `old` wherever both have the same.

    Ids of what is new count up from `next_number`. `spare` are further slots, free now, that new
    instances may use. Without `keeps_instances` every instance is a new one, on the slots of one
    that goes where the degrees allow it. Plans over several nodes keep the slots of `new`, but for
    new instances that find spare ones; there only what lies on the same slots is the same.

    `asleep` are instances outside of `old` that wait for their slots: an instance that comes is one
    of them where its degree and free slots allow it, unless every instance is a new one.
    """
    names, more = _Names(next_number), tuple(spare)
    waiting = list(asleep) if keeps_instances else []
    if _nodes_of(old) | _nodes_of(new) == {NodeRank(0)}:
        here = [it for it in waiting if not it.node]
        free = (
            *(slot for node, slot in more if not node),
            *(slot for it in here for slot in it.slots),
        )
        slots = _Slots(old, new, free)
        return _moved(old, new, names, slots, here, keeps_instances=keeps_instances)
    return _renamed(old, new, names, waiting, more, keeps_instances=keeps_instances)


def next_number_after(plan: Plan) -> int:
    """The first number above those in the plan's ids."""
    ids = [*(it.instance_id for it in plan.instances), *(it.replica_id for it in plan.hybrids)]
    numbers = [int(number) for it in ids if (number := it.rpartition("-")[2]).isdecimal()]
    return max(numbers, default=-1) + 1


def slots_of(plan: Plan) -> list[tuple[NodeRank, SlotId]]:
    """Every slot that the plan uses, as often as it does."""
    train = plan.train
    return [
        *((train.node_of_rank(rank), slot) for rank, slot in enumerate(train.slots)),
        *((it.node, slot) for it in plan.instances for slot in it.slots),
        *(
            (it.nodes[index] if it.nodes else it.node, slot)
            for it in plan.hybrids
            for index, slot in enumerate(it.slots)
        ),
    ]


class _Names:
    """Ids that were never used."""

    def __init__(self, next_number: int) -> None:
        self._next = next_number

    def instance(self) -> InstanceId:
        return InstanceId(f"vllm-{self._take()}")

    def replica(self) -> ReplicaId:
        return ReplicaId(f"hybrid-{self._take()}")

    def _take(self) -> int:
        number, self._next = self._next, self._next + 1
        return number


class _Slots:
    """Slots of one node that nobody has taken yet; those that nobody holds now go first."""

    def __init__(self, old: Plan, new: Plan, spare: Sequence[SlotId]) -> None:
        self._held = held = {slot for _, slot in slots_of(old)}
        wanted = {slot for _, slot in slots_of(new)}
        self._free = sorted(held | wanted | set(spare), key=lambda slot: (slot in held, slot))

    def claim(self, slots: Iterable[SlotId]) -> tuple[SlotId, ...]:
        claimed = tuple(slots)
        self._free = [slot for slot in self._free if slot not in claimed]
        return claimed

    def are_free(self, slots: Iterable[SlotId]) -> bool:
        return set(slots) <= set(self._free)

    def take(self, count: int, *, rather: Sequence[SlotId] = ()) -> tuple[SlotId, ...]:
        """`count` slots: `rather` if nobody holds one of them, else the first that are free."""
        if len(rather) == count and set(rather) <= set(self._free) - self._held:
            return self.claim(rather)
        return self.claim(sorted(self._free[:count]))


def _moved(
    old: Plan,
    new: Plan,
    names: _Names,
    slots: _Slots,
    asleep: list[InstancePlacement],
    *,
    keeps_instances: bool,
) -> Plan:
    is_same_core = old.train.layout == new.train.layout
    claimed = slots.claim(old.train.slots[: new.train.world_size])
    kept_hybrids = _kept_hybrids(old, new) if is_same_core else ()
    for hybrid in kept_hybrids:
        slots.claim(hybrid.slots)
    stays = _staying(old, new)
    for instance in stays:
        slots.claim(instance.slots)
    more = slots.take(new.train.world_size - len(claimed))
    sizes = [len(it.slots) for it in new.hybrids[len(kept_hybrids) :]]
    hybrids = [HybridPlacement(replica_id=names.replica(), slots=slots.take(n)) for n in sizes]
    if not keeps_instances:
        stays = [msgspec.structs.replace(it, instance_id=names.instance()) for it in stays]
    new_ones: list[InstancePlacement] = []
    woken: list[InstancePlacement] = []
    for it in _coming(old, new):
        found = next((s for s in asleep if s.tp == it.tp and slots.are_free(s.slots)), None)
        if found is None:
            new_ones.append(it)
        else:
            asleep.remove(found)
            slots.claim(found.slots)
            woken.append(found)
    started = [
        InstancePlacement(
            instance_id=names.instance(), tp=it.tp, slots=slots.take(it.tp, rather=it.slots)
        )
        for it in new_ones
    ]
    comes = (*woken, *started)
    train = msgspec.structs.replace(new.train, slots=(*claimed, *more))
    return msgspec.structs.replace(
        new, train=train, instances=(*stays, *comes), hybrids=(*kept_hybrids, *hybrids)
    )


def _staying(old: Plan, new: Plan) -> list[InstancePlacement]:
    """Of every degree as many as both plans have, first those that the new core spares."""
    places = {slot for _, slot in slots_of(new)} - {s for it in new.instances for s in it.slots}
    room = Counter(it.tp for it in new.instances)
    chosen: set[InstanceId] = set()
    for instance in sorted(old.instances, key=lambda it: bool(places & set(it.slots))):
        if room[instance.tp]:
            room[instance.tp] -= 1
            chosen.add(instance.instance_id)
    return [it for it in old.instances if it.instance_id in chosen]


def _coming(old: Plan, new: Plan) -> Iterator[InstancePlacement]:
    """The instances of `new` beyond those that stay, largest first: they are hardest to place."""
    known = Counter(it.tp for it in old.instances)
    for instance in sorted(new.instances, key=lambda it: -it.tp):
        if known[instance.tp]:
            known[instance.tp] -= 1
        else:
            yield instance


def _kept_hybrids(old: Plan, new: Plan) -> tuple[HybridPlacement, ...]:
    return old.hybrids[: len(new.hybrids)]


def _renamed(
    old: Plan,
    new: Plan,
    names: _Names,
    asleep: list[InstancePlacement],
    spare: Sequence[Slot],
    *,
    keeps_instances: bool,
) -> Plan:
    known = {(it.node, it.tp, it.slots): it.instance_id for it in (*asleep, *old.instances)}
    held, taken = set(slots_of(old)), set(slots_of(new))
    instances = []
    for it in new.instances:
        same = known.get((it.node, it.tp, it.slots)) if keeps_instances else None
        if same is not None:
            instances.append(msgspec.structs.replace(it, instance_id=same))
            continue
        placed = _on_spare(it, held, [slot for slot in spare if slot not in taken])
        taken |= {(placed.node, slot) for slot in placed.slots}
        instances.append(msgspec.structs.replace(placed, instance_id=names.instance()))
    # Replicas of a core that starts anew end with the one before.
    kept = old.hybrids if old.train == new.train else ()
    replicas = {(it.node, it.nodes, it.slots): it.replica_id for it in kept}
    hybrids = tuple(
        msgspec.structs.replace(
            it, replica_id=replicas.get((it.node, it.nodes, it.slots)) or names.replica()
        )
        for it in new.hybrids
    )
    return msgspec.structs.replace(new, instances=tuple(instances), hybrids=hybrids)


def _on_spare(
    instance: InstancePlacement, held: Collection[Slot], spare: Sequence[Slot]
) -> InstancePlacement:
    """On slots of a node that nobody holds, its own node's rather than another's, if there are."""
    if not any((instance.node, slot) in held for slot in instance.slots):
        return instance
    for node in sorted({node for node, _ in spare}, key=lambda it: (it != instance.node, it)):
        slots = [slot for its, slot in spare if its == node][: instance.tp]
        if len(slots) == instance.tp:
            return msgspec.structs.replace(instance, node=node, slots=tuple(slots))
    return instance


def _nodes_of(plan: Plan) -> set[NodeRank]:
    return {node for node, _ in slots_of(plan)}
