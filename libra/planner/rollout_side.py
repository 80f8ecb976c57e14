"""The rollout half of a split: instances for a number of GPUs, and what they need for the work."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

import msgspec

from libra.config.rollout import SchedulingConfig
from libra.errors import InfeasiblePlanError
from libra.planner.layout import RolloutLayout, best_layout, layout_within
from libra.planner.pace import RolloutPace, TrainPace, step_seconds
from libra.planner.rollout_cost import InstanceCost, Workload
from libra.planner.spread import spread_over, spreads

_WASTE: Final = 1.10
"""Over what is trained on. Batches are made of the groups that end first, so where rollout sets the
pace long ones are passed over and dropped as stale: 4 to 15 % of the trajectories, simulated
(docs/decisions/0008-planner-cost-model.md)."""

_ONE_BATCH_TOLERANCE = 1e-3
_ALIKE = 1.005
"""Step times this close are not told apart."""


class PaceTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What binds rollout to training, apart from the instances."""

    num_batches: int
    max_staleness: float
    export_s: float
    """One step's share of writing weights."""

    pause_s_of: Callable[[Sequence[int]], float]
    """One step's pause of the slowest of instances with these TP degrees."""

    sync_s_of: Callable[[Sequence[int]], float]
    """One step's share of the reload of them all."""


class RolloutSide(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of the degrees that may serve, and the requests that are in flight together."""

    costs: Sequence[InstanceCost]
    work: Workload
    """Of all batches in flight together."""

    one_batch: Workload
    terms: PaceTerms
    node_gpus: int
    scheduling: SchedulingConfig
    lengths_known: bool
    """The longest requests go to the instances that the layout means them for."""

    def best(
        self,
        num_gpus: int,
        train_s: float,
        *,
        has_room: Callable[[Sequence[int]], bool],
        tolerance: float = 0.0,
    ) -> tuple[RolloutLayout, RolloutPace]:
        """The instances of the shortest step beside a training of `train_s`.

        `has_room` says whether instances of these TP degrees find a place on the nodes; without
        known lengths, as many are left out as it takes. Raises InfeasiblePlanError when no instance
        fits into `num_gpus`.
        """
        if self.lengths_known:
            layout = self.by_length(num_gpus, tolerance=tolerance)
            one = layout
            if self.terms.num_batches > 1:
                one = best_layout(
                    self.costs,
                    self.one_batch,
                    num_gpus=num_gpus,
                    tolerance=_ONE_BATCH_TOLERANCE,
                    node_gpus=self._layout_node_gpus,
                )
            return layout, self._pace(layout, one.makespan_s)
        found = [
            (layout, self._pace(layout, self._spread(instances, self.one_batch).makespan_s))
            for spread in spreads(self.costs, num_gpus, self.node_gpus)
            if (instances := _placeable(spread, has_room))
            for layout in (self._spread(instances, self.work),)
        ]
        if not found:
            raise InfeasiblePlanError(
                f"no rollout instance fits into {num_gpus} GPUs: TP degrees are "
                f"{sorted(cost.tp for cost in self.costs)}"
            )
        step_s_of = [step_seconds(self.train_pace(layout, train_s), pace) for layout, pace in found]
        limit_s = min(step_s_of) * _ALIKE
        # Where training sets the pace, late groups and what replaces stale ones should come soon.
        alike = [both for both, step_s in zip(found, step_s_of, strict=True) if step_s <= limit_s]
        return min(alike, key=lambda both: (both[1].one_batch_s, both[0].num_gpus))

    def train_pace(self, layout: RolloutLayout, train_s: float) -> TrainPace:
        """A training of `train_s` that publishes to the layout's instances."""
        sync_s = self.terms.sync_s_of(layout.tp_degrees)
        return TrainPace(train_s=train_s, export_s=self.terms.export_s, sync_s=sync_s)

    def _spread(self, instances: Sequence[InstanceCost], work: Workload) -> RolloutLayout:
        by_capacity = self.scheduling.load_metric == "kv_tokens"
        return spread_over(instances, work, by_capacity=by_capacity)

    def _pace(self, layout: RolloutLayout, one_batch_s: float) -> RolloutPace:
        return RolloutPace(
            one_batch_s=one_batch_s,
            all_batches_s=layout.makespan_s,
            num_batches=self.terms.num_batches,
            max_staleness=self.terms.max_staleness,
            waste_factor=1.0 if self.lengths_known else waste_factor(self.terms.max_staleness),
            pause_s=self.terms.pause_s_of(layout.tp_degrees),
        )

    def by_length(self, num_gpus: int, *, tolerance: float = 0.0) -> RolloutLayout:
        """The layout if lengths were known, whether or not they are. Raises as `best`."""
        return best_layout(
            self.costs,
            self.work,
            num_gpus=num_gpus,
            tolerance=tolerance,
            node_gpus=self._layout_node_gpus,
        )

    def keeps_pace(self, num_gpus: int, limit_s: float) -> bool:
        """Whether the requests end within `limit_s` on `num_gpus` if lengths are known."""
        found = layout_within(
            self.costs,
            self.work,
            num_gpus=num_gpus,
            limit_s=limit_s,
            node_gpus=self._layout_node_gpus,
        )
        return found is not None

    @property
    def _layout_node_gpus(self) -> int:
        """Degrees that divide the node always find a place; only others are laid out in order."""
        divides = all(self.node_gpus % cost.tp == 0 for cost in self.costs)
        return 0 if divides else self.node_gpus


def waste_factor(max_staleness: float) -> float:
    """Rollout's work over what is trained on. Nothing grows stale on-policy, or without syncs."""
    return _WASTE if 0 < max_staleness < inf else 1.0


def _placeable(
    instances: Sequence[InstanceCost], has_room: Callable[[Sequence[int]], bool]
) -> Sequence[InstanceCost]:
    """The most of them that find a place, largest TP first."""
    largest_first = sorted(instances, key=lambda cost: -cost.tp)
    while largest_first and not has_room([cost.tp for cost in largest_first]):
        largest_first.pop()
    return largest_first
