"""What is left of a plan when machines are gone: servers where they are, a core that fits. Pure.

The answer depends on the plan of the whole run and on what is gone, never on what was gone before:
so a run that lost two nodes and got one back is where it would be if it had lost only the other.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from libra.config.run import RunConfig
from libra.ids import InstanceId, NodeRank
from libra.planner.calibration import Calibration
from libra.planner.cost_models import cost_models
from libra.planner.demand import prior_demand
from libra.planner.groups import seats_of_groups
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, Slot, TrainPlacement
from libra.planner.pricing import layout_of, train_work
from libra.planner.train_layout import TrainLayout
from libra.planner.train_search import TrainSearch

_LAYOUTS_BY_COUNT: Final = 4

Layouts: TypeAlias = Callable[[int], Iterable[TrainLayout]]
"""Layouts of the core on at most so many GPUs, the one to take first."""


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """What nobody may use."""

    nodes: frozenset[NodeRank] = frozenset()
    slots: frozenset[Slot] = frozenset()
    """Further ones, of nodes that are there."""

    instances: frozenset[InstanceId] = frozenset()
    """Given up: their slots are free, and they are not started again."""

    def has(self, slots: Iterable[Slot]) -> bool:
        """Whether one of the slots is gone."""
        return any(node in self.nodes or (node, slot) in self.slots for node, slot in slots)


class Lack(msgspec.Struct, frozen=True):
    """Nothing fits."""

    reason: str


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a smaller plan has to respect."""

    min_rollout_gpus: int
    layouts: Callable[[TrainPlacement], Layouts]
    """Of a core in the place of this one."""

    why_not: Callable[[Plan], str]
    """What keeps the run from a plan; empty when nothing does."""

    crosses_nodes: bool = False
    """A tensor-parallel group may lie on several nodes."""


def plan_without(home: Plan, gone: Gone, terms: Terms) -> Plan | Lack:
    """`home` on what is left: instances keep name and slots, a core that lost a slot is cut anew.

    Without replicas: those of a core that goes on are there or are not, and others end. The core
    takes their slots, and those of instances, of the last ones first, only where nothing fits
    beside them, and leaves `min_rollout_gpus`.
    """
    lent = [slot for it in home.hybrids for slot in _slots_of(it) if not gone.has((slot,))]
    home = msgspec.structs.replace(home, hybrids=())
    kept = [it for it in home.instances if not gone.has(_slots_of(it))]
    kept = [it for it in kept if it.instance_id not in gone.instances]
    core = list(zip(_nodes_of(home.train), home.train.slots, strict=True))
    if not gone.has(core):
        return msgspec.structs.replace(home, instances=tuple(kept))
    free = [slot for slot in core if not gone.has((slot,))] + lent
    first_reason = ""
    while True:
        found = _with_core(home, kept, free, terms)
        if isinstance(found, Plan):
            return found
        first_reason = first_reason or found.reason
        num_left = sum(it.tp for it in kept[:-1])
        if not kept or num_left < terms.min_rollout_gpus:
            return Lack(first_reason)
        free += _slots_of(kept.pop())


def is_same(one: Plan, other: Plan) -> bool:
    """Whether the same core trains and the same servers serve; replicas come and go."""
    return one.train == other.train and set(one.instances) == set(other.instances)


def smaller_dp(train: TrainPlacement, *, micro_batch_size: int) -> Layouts:
    """The same model parallelism with as much data parallelism as fits.

    `micro_batch_size` is the configured one.
    """
    whole = layout_of(train, micro_batch_size=micro_batch_size)

    def layouts(most_gpus: int) -> Iterator[TrainLayout]:
        for dp in range(min(train.dp, most_gpus // whole.model_parallel_size), 0, -1):
            yield msgspec.structs.replace(whole, dp=dp)

    return layouts


def fastest(config: RunConfig, train: TrainPlacement, book: Calibration) -> Layouts:
    """The planner's layouts by their step time; those that need too much memory are none.

    Experts stay spread over as many ranks: their optimizer states cannot be cut anew.
    Raises ConfigError when hardware or model are not described.
    """
    models, work = cost_models(config, book), train_work(config, prior_demand(config))

    def layouts(most_gpus: int) -> Iterator[TrainLayout]:
        fewest = max(1, config.global_resource_planner.min_train_gpus)
        counts = range(fewest, most_gpus + 1)
        search = TrainSearch(config, models=models, work=work, gpu_counts=counts)
        found = [it for n in counts for it in search.best(n, num_best=_LAYOUTS_BY_COUNT)]
        for candidate in sorted(found, key=lambda it: (it.cost.total_s, it.layout)):
            if candidate.layout.ep == train.ep:
                yield candidate.layout

    return layouts


def _with_core(
    home: Plan, kept: Sequence[InstancePlacement], free: Sequence[Slot], terms: Terms
) -> Plan | Lack:
    reason = f"no layout of the trainer fits on {len(free)} GPUs"
    for layout in terms.layouts(home.train)(len(free)):
        seats = _seats(layout, free, crosses_nodes=terms.crosses_nodes)
        if seats is None:
            reason = f"{layout} finds no nodes with {layout.tp} free GPUs for each of its groups"
            continue
        train = _placed(layout, seats)
        plan = msgspec.structs.replace(home, train=train, instances=tuple(kept))
        why = terms.why_not(plan)
        if not why:
            return plan
        reason = f"{layout}: {why}"
    return Lack(reason)


def _seats(
    layout: TrainLayout, free: Sequence[Slot], *, crosses_nodes: bool
) -> tuple[Slot, ...] | None:
    """Slots in rank order, whole TP groups in as few nodes as possible."""
    count = Counter(node for node, _ in free)
    fullest_first = sorted(free, key=lambda slot: (-count[slot[0]], slot[0]))
    found = seats_of_groups(layout.tp, layout.num_gpus, fullest_first, crosses_nodes=crosses_nodes)
    return None if found is None else tuple(sorted(found, key=lambda slot: slot[0]))


def _placed(layout: TrainLayout, seats: Sequence[Slot]) -> TrainPlacement:
    nodes = tuple(node for node, _ in seats)
    return TrainPlacement(
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        dp=layout.dp,
        slots=tuple(slot for _, slot in seats),
        node=nodes[0],
        nodes=() if len(set(nodes)) == 1 else nodes,
        micro_batch_size=layout.micro_batch_size,
    )


def _nodes_of(train: TrainPlacement) -> tuple[NodeRank, ...]:
    return train.nodes or (train.node,) * len(train.slots)


def _slots_of(placement: InstancePlacement | HybridPlacement) -> list[Slot]:
    nodes = (placement.node,) * len(placement.slots)
    if isinstance(placement, HybridPlacement) and placement.nodes:
        nodes = placement.nodes
    return list(zip(nodes, placement.slots, strict=True))
