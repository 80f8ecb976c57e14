"""The rollout half of a split: instances for a number of GPUs, and what they need for the work."""

from collections.abc import Sequence

import msgspec

from libra.config.rollout import SchedulingConfig
from libra.errors import InfeasiblePlanError
from libra.planner.layout import RolloutLayout, best_layout, layout_within
from libra.planner.rollout_cost import InstanceCost, Workload
from libra.planner.spread import best_spread


class RolloutSide(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of the degrees that may serve, and the requests that are in flight together."""

    costs: Sequence[InstanceCost]
    work: Workload
    node_gpus: int
    scheduling: SchedulingConfig
    lengths_known: bool
    """The longest requests go to the instances that the layout means them for."""

    def best(self, num_gpus: int, *, tolerance: float = 0.0) -> RolloutLayout:
        """Raises InfeasiblePlanError when no instance fits into `num_gpus`."""
        if self.lengths_known:
            return self.by_length(num_gpus, tolerance=tolerance)
        layout = best_spread(
            self.costs,
            self.work,
            num_gpus=num_gpus,
            node_gpus=self.node_gpus,
            by_capacity=self.scheduling.load_metric == "kv_tokens",
        )
        if layout is None:
            raise InfeasiblePlanError(
                f"no rollout instance fits into {num_gpus} GPUs: TP degrees are "
                f"{sorted(cost.tp for cost in self.costs)}"
            )
        return layout

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
        """Whether the requests end within `limit_s` on `num_gpus`."""
        if not self.lengths_known:
            return self.best(num_gpus).makespan_s <= limit_s
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
