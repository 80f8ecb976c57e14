"""Rollout under a router that does not know how long a response will be.

Every instance then gets requests of every length: a fair sample of the sorted workload, the longest
included. How large a sample follows from `load_metric`: kv_tokens fills instances in proportion to
their KV capacity, requests and tokens give each instance as much as the next. The slowest degree
meets the longest request, so a mix pays only where it uses GPUs that the best degree leaves over:
each node takes as many instances of one degree as fit, and smaller ones in the rest, or nothing.
"""

from collections.abc import Iterator, Sequence

from libra.planner.layout import Block, RolloutLayout
from libra.planner.rollout_cost import InstanceCost, Workload, block_seconds


def spread_over(
    instances: Sequence[InstanceCost], work: Workload, *, by_capacity: bool
) -> RolloutLayout:
    """Given instances, largest TP first, each with its sample of the requests."""
    weight_of = {cost.tp: cost.capacity_tokens if by_capacity else 1 for cost in instances}
    whole = sum(weight_of[cost.tp] for cost in instances)
    block_of = {
        # The fullest of alike instances has what is left of a division, and sets the time.
        cost.tp: _block(cost, work, -(-len(work) * weight_of[cost.tp] // whole))
        for cost in {cost.tp: cost for cost in instances}.values()
    }
    ordered = sorted(instances, key=lambda cost: -cost.tp)
    return RolloutLayout(blocks=tuple(block_of[cost.tp] for cost in ordered))


def _block(cost: InstanceCost, work: Workload, num_requests: int) -> Block:
    sample = work.sample(num_requests)
    return Block(
        tp=cost.tp,
        num_requests=len(sample),
        seconds=block_seconds(cost, sample, 0, len(sample)),
    )


def spreads(
    costs: Sequence[InstanceCost], num_gpus: int, node_gpus: int
) -> Iterator[list[InstanceCost]]:
    """Ways to use at most `num_gpus`: one main degree, the rest of each node idle or filled.

    More GPUs never make the best of them slower by more than a remainder that another degree fills.
    """
    full, rest = divmod(num_gpus, node_gpus)
    nodes = [node_gpus] * full + ([rest] if rest else [])
    descending = sorted(costs, key=lambda cost: -cost.tp)
    for index, main in enumerate(descending):
        alone = [main] * sum(node // main.tp for node in nodes)
        filled = [cost for node in nodes for cost in _fill(descending[index:], node)]
        if alone:
            yield alone
        if len(filled) > len(alone):
            yield filled


def _fill(descending: Sequence[InstanceCost], room: int) -> Iterator[InstanceCost]:
    for cost in descending:
        count, room = divmod(room, cost.tp)
        yield from [cost] * count
