"""What the planner found: its choice, what came next, and every branch it left."""

import msgspec

from libra.planner.layout import RolloutLayout
from libra.planner.memory import MemoryBudget
from libra.planner.plan import Plan
from libra.planner.pruning import Pruned
from libra.planner.train_cost import TrainCost
from libra.planner.train_layout import TrainLayout


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What the cost model expects of one training step."""

    train: TrainCost
    train_budget: MemoryBudget
    rollout: RolloutLayout
    """Its times are for `num_batches` steps' requests together."""

    num_batches: int = 1
    publish_s: float = 0.0
    """Export and reload, one step's share: the trainer waits for them."""

    pause_s: float = 0.0
    """The slowest instance's share of a reload, in which it stands still."""

    @property
    def rollout_s(self) -> float:
        """Rollout's time for one step, standing still included."""
        return self.rollout.makespan_s / self.num_batches + self.pause_s

    @property
    def train_s(self) -> float:
        """Training's time for one step, until the engines have its weights."""
        return self.train.total_s + self.publish_s

    @property
    def step_s(self) -> float:
        """Training and rollout go on side by side: the slower sets the pace."""
        return max(self.train_s, self.rollout_s)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to use the GPUs."""

    train: TrainLayout
    rollout_tps: tuple[int, ...]
    """Descending."""

    estimate: Estimate | None = None
    """None when hardware or model are not described (`configured` only)."""


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's answer. `plan` places `choice` on slots."""

    plan: Plan
    choice: Option
    runners_up: tuple[Option, ...]
    pruned: tuple[Pruned, ...]
    demand: str
    by_length: RolloutLayout | None = None
    """The chosen split's fastest instances if every request's length were known in advance; None
    with a configured split."""

    notes: tuple[str, ...] = ()
    """What an operator should know about the figures."""
