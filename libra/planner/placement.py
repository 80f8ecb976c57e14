"""Which slots of which nodes a split uses. No tensor-parallel group crosses a node it fits into."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from libra.ids import InstanceId, NodeRank, SlotId
from libra.planner.plan import InstancePlacement, Plan, Slot, TrainPlacement
from libra.planner.train_layout import TrainLayout


def place(
    train: TrainLayout, rollout_tps: Sequence[int], *, num_gpus: int, gpus_per_node: int
) -> Plan | None:
    """Training on the last nodes, instances on the first, largest TP first.

    None when node boundaries leave no room for one of them. Powers of two always fit when they
    divide the node.
    """
    nodes = _nodes(num_gpus, gpus_per_node)
    ranks = _train_slots(train, nodes)
    if ranks is None:
        return None
    instances: list[InstancePlacement] = []
    for index, tp in enumerate(sorted(rollout_tps, reverse=True)):
        node = next((n for n, free in enumerate(nodes) if len(free) >= tp), None)
        if node is None:
            return None
        slots, nodes[node] = tuple(nodes[node][:tp]), nodes[node][tp:]
        instances.append(
            InstancePlacement(
                instance_id=InstanceId(f"vllm-{index}"), tp=tp, slots=slots, node=NodeRank(node)
            )
        )
    one_node = len({node for node, _ in ranks}) == 1
    return Plan(
        strategy="grp",
        train=TrainPlacement(
            tp=train.tp,
            pp=train.pp,
            cp=train.cp,
            ep=train.ep,
            dp=train.dp,
            slots=tuple(slot for _, slot in ranks),
            node=ranks[0][0],
            nodes=() if one_node else tuple(node for node, _ in ranks),
            micro_batch_size=train.micro_batch_size,
        ),
        instances=tuple(instances),
    )


def spread_over_nodes(plan: Plan, *, gpus_per_node: int) -> Plan | None:
    """The same split with a node for every rank and instance; None when one has no room.

    Servers of others, which have no slots here, stay as they are.
    """
    train = plan.train
    own = [instance for instance in plan.instances if instance.slots]
    layout = TrainLayout(
        tp=train.tp,
        pp=train.pp,
        cp=train.cp,
        ep=train.ep,
        dp=train.dp,
        micro_batch_size=train.micro_batch_size or 1,
    )
    placed = place(
        layout,
        [instance.tp for instance in own],
        num_gpus=sum(instance.tp for instance in own) + train.world_size,
        gpus_per_node=gpus_per_node,
    )
    if placed is None:
        return None
    told = msgspec.structs.replace(placed.train, micro_batch_size=train.micro_batch_size)
    instances = placed.instances if own else plan.instances
    return msgspec.structs.replace(placed, strategy=plan.strategy, train=told, instances=instances)


def free_slots(placed: Plan, num_gpus: int, gpus_per_node: int) -> list[int]:
    """How many slots of each node nobody uses."""
    free = [len(node) for node in _nodes(num_gpus, gpus_per_node)]
    for rank in range(len(placed.train.slots)):
        free[placed.train.node_of_rank(rank)] -= 1
    for instance in placed.instances:
        free[instance.node] -= instance.tp
    return free


def _nodes(num_gpus: int, gpus_per_node: int) -> list[list[SlotId]]:
    """Free slots per node; the last node may be smaller."""
    return [
        [SlotId(slot) for slot in range(min(gpus_per_node, num_gpus - first))]
        for first in range(0, num_gpus, gpus_per_node)
    ]


def _train_slots(train: TrainLayout, nodes: list[list[SlotId]]) -> list[Slot] | None:
    """Takes the slots of every rank out of `nodes`, whole TP groups from the last node on."""
    if train.tp > len(nodes[0]):
        return _whole_nodes(train, nodes)
    groups: list[list[Slot]] = []
    missing = train.num_gpus // train.tp
    for node in reversed(range(len(nodes))):
        taken = min(missing, len(nodes[node]) // train.tp)
        keep = len(nodes[node]) - taken * train.tp
        slots, nodes[node] = nodes[node][keep:], nodes[node][:keep]
        groups[:0] = (
            [(NodeRank(node), slot) for slot in slots[first : first + train.tp]]
            for first in range(0, len(slots), train.tp)
        )
        missing -= taken
    return None if missing else list(_flat(groups))


def _whole_nodes(train: TrainLayout, nodes: list[list[SlotId]]) -> list[Slot] | None:
    """A TP group larger than a node: consecutive slots over node boundaries, from the end."""
    everything = [(NodeRank(node), slot) for node, slots in enumerate(nodes) for slot in slots]
    if train.num_gpus > len(everything):
        return None
    taken = everything[len(everything) - train.num_gpus :]
    for node in nodes:
        node.clear()
    for node_rank, slot in everything[: len(everything) - train.num_gpus]:
        nodes[node_rank].append(slot)
    return taken


def _flat(groups: Iterable[list[Slot]]) -> Iterator[Slot]:
    for group in groups:
        yield from group
