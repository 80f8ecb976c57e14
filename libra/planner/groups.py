"""Which slots the tensor-parallel groups of a core or a replica take: each group inside a node."""

from collections.abc import Iterable, Sequence

from libra.planner.plan import Slot


def seats_of_groups(
    tp: int, num_gpus: int, slots: Sequence[Slot], *, crosses_nodes: bool = False
) -> tuple[Slot, ...] | None:
    """`num_gpus` of `slots` in rank order, those that come first if it can be; None without room.

    The ranks of a node follow each other. With `crosses_nodes` a group may lie on several nodes,
    where it fits into none.
    """
    chosen: list[Slot] = []
    waiting: dict[int, list[Slot]] = {}
    for slot in slots:
        group = waiting.setdefault(slot[0], [])
        group.append(slot)
        if len(group) == tp and len(chosen) < num_gpus:
            chosen += group
            group.clear()
    if len(chosen) == num_gpus:
        return by_node(chosen)
    if crosses_nodes and num_gpus <= len(slots):
        return tuple(sorted(slots[:num_gpus]))
    return None


def by_node(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """The same, those of one node together, otherwise in the order that they had."""
    chosen = list(slots)
    nodes = list(dict.fromkeys(node for node, _ in chosen))
    return tuple(sorted(chosen, key=lambda slot: nodes.index(slot[0])))
