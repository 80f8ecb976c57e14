"""Which TP degrees serve a sorted list of requests fastest. Exact, at any size.

This is what rollout could reach if lengths were known in advance; what a router that does not know
them reaches is in libra.planner.spread.

Requests are sorted by response length and cut into contiguous blocks, one per instance. A larger
block never costs less (`block_seconds`), so with a time limit T an instance should take as long a
block as it can, and what n GPUs can reach obeys

    reach(n) = max over tp of fit(tp, reach(n - tp), T)

where fit is the end of the longest block that starts there and keeps T: reaching further is never
worse. One pass is linear in GPUs x degrees. The smallest T that reaches the end is found by
bisection between T known to fail and the makespan of the best layout found; the search stops when
the next smaller float fails, so the result is the minimum, not an approximation of it.
"""

from collections.abc import Sequence
from math import inf, nextafter

import msgspec

from libra.errors import InfeasiblePlanError
from libra.planner.rollout_cost import InstanceCost, Workload, block_seconds

_CLOSE = 1e-7
"""Relative gap at which bisection gives way to asking for anything faster at all."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One instance, how many requests it serves, and how long that takes."""

    tp: int
    num_requests: int
    seconds: float


class RolloutLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The instances of one rollout side. By length: in request order, longest requests first."""

    blocks: tuple[Block, ...]

    @property
    def makespan_s(self) -> float:
        return max((block.seconds for block in self.blocks), default=0.0)

    @property
    def num_requests(self) -> int:
        return sum(block.num_requests for block in self.blocks)

    @property
    def num_gpus(self) -> int:
        return sum(block.tp for block in self.blocks)

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        return tuple(sorted((block.tp for block in self.blocks), reverse=True))


def layout_within(
    costs: Sequence[InstanceCost],
    work: Workload,
    *,
    num_gpus: int,
    limit_s: float,
    node_gpus: int = 0,
) -> RolloutLayout | None:
    """A layout of at most `num_gpus` GPUs, as few as possible, that ends within `limit_s`.

    None when there is none. With `node_gpus` above 0 the blocks lie on the GPUs in their order, and
    none crosses a node boundary: needed when a degree does not divide the node.
    """
    reach, taken_by = [0], [0]
    for gpus in range(num_gpus + 1):
        if gpus:
            room = (gpus - 1) % node_gpus + 1 if node_gpus else gpus
            fitting = [cost for cost in costs if cost.tp <= room]
            furthest, tp = _furthest(fitting, work, reach, limit_s)
            reach.append(furthest)
            taken_by.append(tp)
        if reach[gpus] == len(work):
            return _trace(costs, work, reach, taken_by)
    return None


def best_layout(
    costs: Sequence[InstanceCost],
    work: Workload,
    *,
    num_gpus: int,
    tolerance: float = 0.0,
    node_gpus: int = 0,
) -> RolloutLayout:
    """The layout of smallest makespan over every multiset of TP degrees within `num_gpus`.

    A `tolerance` above 0 shortens the search: the makespan may then exceed the minimum by that
    share of itself. `node_gpus` as in `layout_within`. Raises InfeasiblePlanError when no instance
    fits into `num_gpus`.
    """

    def within(limit_s: float) -> RolloutLayout | None:
        return layout_within(costs, work, num_gpus=num_gpus, limit_s=limit_s, node_gpus=node_gpus)

    best = within(inf)
    if best is None:
        raise InfeasiblePlanError(
            f"no rollout instance fits into {num_gpus} GPUs: TP degrees are "
            f"{sorted(cost.tp for cost in costs)}"
        )
    too_fast_s = 0.0
    while (just_faster_s := nextafter(best.makespan_s, 0.0)) > too_fast_s:
        if best.makespan_s - too_fast_s < tolerance * best.makespan_s:
            break
        middle_s = (too_fast_s + best.makespan_s) / 2
        is_close = best.makespan_s - too_fast_s <= _CLOSE * best.makespan_s
        limit_s = just_faster_s if is_close else middle_s
        found = within(limit_s)
        if found is None:
            too_fast_s = limit_s
        else:
            best = found
    return best


def _furthest(
    costs: Sequence[InstanceCost], work: Workload, reach: list[int], limit_s: float
) -> tuple[int, int]:
    """(reach, tp of the last instance) with one GPU more; tp 0 leaves that GPU unused."""
    gpus = len(reach)
    furthest, taken_by = reach[-1], 0
    for cost in costs:
        end = _fit(cost, work, reach[gpus - cost.tp], limit_s)
        if end > furthest:
            furthest, taken_by = end, cost.tp
    return furthest, taken_by


def _fit(cost: InstanceCost, work: Workload, begin: int, limit_s: float) -> int:
    """The largest end with block_seconds(begin, end) <= limit_s, by galloping, then bisection."""
    last, stride = len(work), 1
    fits = begin
    while (end := fits + stride) <= last and block_seconds(cost, work, begin, end) <= limit_s:
        fits, stride = end, stride * 2
    fails = min(end, last + 1)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if block_seconds(cost, work, begin, middle) <= limit_s:
            fits = middle
        else:
            fails = middle
    return fits


def _trace(
    costs: Sequence[InstanceCost], work: Workload, reach: list[int], taken_by: list[int]
) -> RolloutLayout:
    cost_of = {cost.tp: cost for cost in costs}
    blocks: list[Block] = []
    gpus = len(reach) - 1
    while gpus > 0:
        tp = taken_by[gpus]
        if tp == 0:
            gpus -= 1
            continue
        begin, end = reach[gpus - tp], reach[gpus]
        seconds = block_seconds(cost_of[tp], work, begin, end)
        blocks.append(Block(tp=tp, num_requests=end - begin, seconds=seconds))
        gpus -= tp
    return RolloutLayout(blocks=tuple(reversed(blocks)))
