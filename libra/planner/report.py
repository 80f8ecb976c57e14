"""What the planner found: its choice, what came next, and every branch it left."""

import msgspec

from libra.planner.layout import RolloutLayout
from libra.planner.memory import MemoryBudget
from libra.planner.pace import RolloutPace, TrainPace, step_seconds
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
    export_s: float
    """Writing weights, one step's share."""

    sync_s: float
    """Loading them on every instance, one step's share."""

    pace: RolloutPace
    """The same instances, as staleness binds them to training."""

    @property
    def rollout_s(self) -> float:
        """Rollout's time for one step if it never had to wait, standing still included."""
        return self.rollout.makespan_s / self.num_batches + self.pace.pause_s

    @property
    def train_s(self) -> float:
        """The trainer's time for one step: training, export, and what it waits for reloads."""
        return self._train_pace.busy_s

    @property
    def version_s(self) -> float:
        """From a complete batch until engines answer with what it taught."""
        return self._train_pace.version_s

    @property
    def _train_pace(self) -> TrainPace:
        return TrainPace(train_s=self.train.total_s, export_s=self.export_s, sync_s=self.sync_s)

    @property
    def step_s(self) -> float:
        """The slower side sets the pace, and each may have to wait for the other."""
        return step_seconds(self._train_pace, self.pace)


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
