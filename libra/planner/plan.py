"""The plan: which slots train, which slots serve, and how each side is cut up."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

from libra.config.run import RunConfig
from libra.errors import InfeasiblePlanError
from libra.ids import InstanceId, NodeRank, ReplicaId, SlotId

Slot: TypeAlias = tuple[NodeRank, SlotId]


class TrainPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """The core training pool. World size is tp x pp x cp x dp; EP lives inside it."""

    tp: int
    pp: int
    cp: int
    ep: int
    dp: int
    slots: tuple[SlotId, ...]
    """In rank order; entry k is a slot of the node that `node_of_rank(k)` names."""

    node: NodeRank = NodeRank(0)
    nodes: tuple[NodeRank, ...] = ()
    """Parallel to `slots` when ranks lie on several nodes; empty when all are on `node`."""

    micro_batch_size: int | None = None
    """Trajectories per pass if the planner chose it; None leaves the configured one."""

    def node_of_rank(self, rank: int) -> NodeRank:
        return self.nodes[rank] if self.nodes else self.node

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def layout(self) -> tuple[int, ...]:
        """What a gang is started with: another one needs another gang, other slots of it too."""
        return (self.tp, self.pp, self.cp, self.ep, self.dp, self.micro_batch_size or 0)


class InstancePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM server on `tp` slots of one node."""

    instance_id: InstanceId
    tp: int
    slots: tuple[SlotId, ...]
    """Empty for a server that somebody else runs, on devices that are none of ours."""

    node: NodeRank = NodeRank(0)


class HybridPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """One complete training replica on devices that rollout does without for a while."""

    replica_id: ReplicaId
    slots: tuple[SlotId, ...]
    """In the rank order of the replica's own grid; nobody else's in the same plan."""

    node: NodeRank = NodeRank(0)
    nodes: tuple[NodeRank, ...] = ()
    """Parallel to `slots` when ranks lie on several nodes; empty when all are on `node`."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable; a change of mind is another Plan."""

    strategy: str
    train: TrainPlacement
    """The core: what trains with or without hybrid replicas."""

    instances: tuple[InstancePlacement, ...]
    hybrids: tuple[HybridPlacement, ...] = ()

    @property
    def num_rollout_gpus(self) -> int:
        return sum(instance.tp for instance in self.instances)

    @property
    def num_hybrid_gpus(self) -> int:
        return sum(len(hybrid.slots) for hybrid in self.hybrids)


def with_hybrids_in_core(plan: Plan) -> Plan:
    """The same devices without hybrid replicas: each is one more data-parallel replica."""
    train, hybrids = plan.train, plan.hybrids
    grid = train.tp * train.pp * train.cp
    more = tuple(slot for hybrid in hybrids for slot in hybrid.slots)
    nodes = tuple(node for it in hybrids for node in it.nodes or (it.node,) * len(it.slots))
    is_on_one_node = not train.nodes and set(nodes) <= {train.node}
    own = train.nodes or (train.node,) * len(train.slots)
    # The ranks of a node follow each other.
    seats = sorted(zip((*own, *nodes), (*train.slots, *more), strict=True), key=lambda it: it[0])
    core = msgspec.structs.replace(
        train,
        dp=train.dp + len(more) // grid,
        slots=tuple(slot for _, slot in seats),
        node=seats[0][0],
        nodes=() if is_on_one_node else tuple(node for node, _ in seats),
    )
    return msgspec.structs.replace(plan, train=core, hybrids=())


def plan_in_words(plan: Plan) -> str:
    """`train 2 GPUs (TP 1, PP 1, CP 1, DP 2), rollout 2 GPUs (2 x TP 1)`."""
    train = plan.train
    degrees = Counter(instance.tp for instance in plan.instances)
    buckets = ", ".join(f"{count} x TP {tp}" for tp, count in sorted(degrees.items()))
    instances = f"{plan.num_rollout_gpus} GPUs ({buckets})" if buckets else "none"
    plural = "s" if len(plan.hybrids) > 1 else ""
    hybrids = f", {len(plan.hybrids)} hybrid replica{plural} on {plan.num_hybrid_gpus} GPUs"
    return (
        f"train {train.world_size} GPUs (TP {train.tp}, PP {train.pp}, CP {train.cp}, "
        f"DP {train.dp}){hybrids if plan.hybrids else ''}, "
        f"rollout {instances}"
    )


def places_in_words(plan: Plan) -> str:
    """A line for each of several nodes: `node 1: 2 ranks on slots 0, 1; vllm-3 on 2`.

    Empty where all is on one node.
    """
    train = plan.train
    slots_of: dict[NodeRank, dict[str, list[SlotId]]] = {}
    for rank, slot in enumerate(train.slots):
        slots_of.setdefault(train.node_of_rank(rank), {}).setdefault("ranks", []).append(slot)
    for it in plan.instances:
        if it.slots:
            slots_of.setdefault(it.node, {})[it.instance_id] = list(it.slots)
    if set(slots_of) <= {NodeRank(0)}:
        return ""
    return "".join(f"node {node}: {_shares(slots_of[node])}\n" for node in sorted(slots_of))


def _shares(slots_of: dict[str, list[SlotId]]) -> str:
    said = {
        name: f"{len(slots)} ranks on slots" if name == "ranks" else f"{name} on"
        for name, slots in slots_of.items()
    }
    return "; ".join(
        f"{said[name]} {', '.join(map(str, slots))}" for name, slots in slots_of.items()
    )


def slots_in_words(slots: Iterable[Slot]) -> str:
    """`0, 1`; where others than the first node have some, `0 of node 0, 2, 3 of node 1`."""
    chosen = list(slots)
    numbers_of = {
        node: ", ".join(str(slot) for its, slot in chosen if its == node) for node, _ in chosen
    }
    if set(numbers_of) <= {NodeRank(0)}:
        return "".join(numbers_of.values())
    return ", ".join(f"{numbers} of node {node}" for node, numbers in numbers_of.items())


def configured_plan(config: RunConfig) -> Plan:
    """The split that the configuration pins: rollout on the first slots, training after them.

    Raises InfeasiblePlanError when the pinned buckets do not use exactly `rollout_gpus`, or a
    minimum is not kept.
    """
    training, planner = config.training, config.global_resource_planner
    model_parallel = training.train_tp_size * training.train_pp_size * training.train_cp_size
    if training.train_gpus % model_parallel:
        raise InfeasiblePlanError(
            f"train_gpus {training.train_gpus} is not a multiple of TP x PP x CP = {model_parallel}"
        )
    is_ours = planner.runtime_manage_rollout_processes
    instances = tuple(_instances(config) if is_ours else _endpoints(config))
    num_rollout_gpus = sum(instance.tp for instance in instances)
    if is_ours and num_rollout_gpus != config.rollout.rollout_gpus:
        raise InfeasiblePlanError(
            f"heterogeneous_rollout.instances use {num_rollout_gpus} GPUs, "
            f"rollout_gpus is {config.rollout.rollout_gpus}"
        )
    if num_rollout_gpus < planner.min_rollout_gpus:
        raise InfeasiblePlanError(
            f"rollout_gpus {num_rollout_gpus} is below min_rollout_gpus {planner.min_rollout_gpus}"
        )
    if training.train_gpus < planner.min_train_gpus:
        raise InfeasiblePlanError(
            f"train_gpus {training.train_gpus} is below min_train_gpus {planner.min_train_gpus}"
        )
    num_taken = sum(len(instance.slots) for instance in instances)
    return Plan(
        strategy="configured",
        train=TrainPlacement(
            tp=training.train_tp_size,
            pp=training.train_pp_size,
            cp=training.train_cp_size,
            ep=training.train_ep_size,
            dp=training.train_gpus // model_parallel,
            slots=tuple(SlotId(num_taken + index) for index in range(training.train_gpus)),
        ),
        instances=instances,
    )


def _instances(config: RunConfig) -> Iterator[InstancePlacement]:
    next_slot = 0
    for index, tp in enumerate(_tp_degrees(config)):
        slots = tuple(SlotId(next_slot + offset) for offset in range(tp))
        next_slot += tp
        yield InstancePlacement(instance_id=InstanceId(f"vllm-{index}"), tp=tp, slots=slots)


def _endpoints(config: RunConfig) -> Iterator[InstancePlacement]:
    """Servers of others: on devices that are none of ours."""
    for index, endpoint in enumerate(config.heterogeneous_rollout.endpoints):
        yield InstancePlacement(instance_id=InstanceId(f"vllm-{index}"), tp=endpoint.tp, slots=())


def _tp_degrees(config: RunConfig) -> Iterator[int]:
    buckets = config.heterogeneous_rollout.instances
    if not buckets:
        yield from (1 for _ in range(config.rollout.rollout_gpus))
    for bucket in buckets:
        yield from (bucket.tp for _ in range(bucket.count))
