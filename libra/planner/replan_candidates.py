"""Plans that the run could go over to, each with the step time that the model expects of it.

Rollout instances are searched beside the core as it is, with more or fewer hybrid replicas, and
with `libra.planner.search.plan` for a core of another layout. Where a change is not allowed its
plans are not looked at.
"""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from libra.config.run import RunConfig
from libra.errors import InfeasiblePlanError
from libra.planner.calibration import Calibration
from libra.planner.cost_models import CostModels, cost_models
from libra.planner.demand import Demand
from libra.planner.lending import fewest_rollout_gpus
from libra.planner.pace import TrainPace, step_seconds
from libra.planner.plan import Plan, Slot, TrainPlacement
from libra.planner.pricing import estimate_of, layout_of, pace_terms, train_work
from libra.planner.pruning import PruneLog
from libra.planner.replan_costs import SwitchKind
from libra.planner.replan_seating import Room, core_seats, seated
from libra.planner.rollout_cost import workload_of
from libra.planner.rollout_search import instance_costs
from libra.planner.rollout_side import RolloutSide
from libra.planner.search import plan as searched
from libra.planner.train_layout import TrainLayout

TrainingChanges: TypeAlias = Literal["none", "recorded", "made"]
"""What becomes of plans that change the training side."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A plan beside the one in force."""

    kind: SwitchKind
    plan: Plan
    step_s: float
    lasts_steps: float = inf
    """For how many it can stay in force; then the plan before comes back."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan may look like, from the configuration."""

    room: Room
    changes_rollout: bool
    training: TrainingChanges
    min_rollout_gpus: int
    min_rollout_gpus_beside_hybrids: int

    def fewest_rollout_gpus(self, *, num_replicas: int, serves_nothing: bool) -> int:
        return fewest_rollout_gpus(
            num_replicas=num_replicas,
            serves_nothing=serves_nothing,
            least=self.min_rollout_gpus,
            least_beside_hybrids=self.min_rollout_gpus_beside_hybrids,
        )


def bounds_of(
    config: RunConfig,
    *,
    num_gpus: int,
    gpus_per_node: int | None = None,
    lost: frozenset[Slot] = frozenset(),
) -> Bounds:
    """`num_gpus`: slots of the run, idle and lost ones included.

    `gpus_per_node`: of a run over several nodes; None: as many as described, else all on one.
    """
    planner, hardware = config.global_resource_planner, config.hardware
    training: TrainingChanges = "none"
    if planner.runtime_training_pool_plan_only:
        training = "recorded"
    elif planner.runtime_reconfigure_training:
        training = "made"
    described = hardware.gpus_per_node if hardware is not None else num_gpus
    per_node = gpus_per_node or described
    num_lost = sum(node * per_node + slot < num_gpus for node, slot in lost)
    return Bounds(
        room=Room(
            num_gpus=num_gpus - num_lost,
            gpus_per_node=per_node,
            lost=lost,
            crosses_nodes=planner.allow_cross_node_tp,
        ),
        changes_rollout=planner.runtime_manage_rollout_processes,
        training=training,
        min_rollout_gpus=planner.min_rollout_gpus,
        min_rollout_gpus_beside_hybrids=planner.elastic_hybrid_min_rollout_gpus,
    )


class CandidateSearch:
    """One look at all plans; `config` describes hardware and model."""

    def __init__(  # noqa: PLR0913 - what a search depends on
        self,
        config: RunConfig,
        plan: Plan,
        demand: Demand,
        book: Calibration,
        bounds: Bounds,
        *,
        why_not: Callable[[Plan], str],
        lead_steps: float = 0.0,
    ) -> None:
        """`why_not` says what keeps the run from going over to a plan; empty when nothing does.

        `lead_steps`: how long training could go on if nothing served.
        Raises ConfigError when hardware or model are not described.
        """
        self.left_out: list[str] = []
        """What `why_not` said, each only once."""

        self._why_not = why_not
        self._config, self._plan, self._demand, self._book = config, plan, demand, book
        self._bounds, self._lead_steps = bounds, lead_steps
        self._models: CostModels = cost_models(config, book)
        self._core = layout_of(plan.train, micro_batch_size=config.training.micro_batch_size)
        self._replica_gpus = replica_gpus(self._core)
        self._rollout = RolloutSide(
            costs=instance_costs(config, self._models, PruneLog(), most_gpus=bounds.room.num_gpus),
            work=workload_of(demand),
            one_batch=workload_of(replace(demand, num_batches=1)),
            terms=pace_terms(config, demand, self._models),
            node_gpus=self._models.rates.gpus_per_node,
            scheduling=config.heterogeneous_rollout.scheduling,
            lengths_known=False,
        )

    def candidates(self) -> Iterator[Candidate]:
        """The best for each number of replicas and another core; never the plan in force."""
        for num_replicas in self._replica_counts():
            found = self._beside(num_replicas)
            if found is not None:
                yield found
        if self._bounds.training != "none":
            yield from self._reshaped()

    def _replica_counts(self) -> Iterator[int]:
        """How many hybrid replicas there may be, what there is included.

        Their GPUs change sides in steps of the split's granularity.
        """
        present = len(self._plan.hybrids)
        if self._bounds.training == "none":
            yield present
            return
        left = self._bounds.room.num_gpus - self._core.num_gpus
        if not self._holds_replica():
            left = 0
        training = self._config.training
        mini_batch = training.mini_batch_size or training.batch_size
        step_gpus = self._config.global_resource_planner.allocation_granularity_gpus
        for count in range(max(present, left // self._replica_gpus) + 1):
            if count != present and count * self._replica_gpus % step_gpus:
                continue
            # Shards need not be equal, but every rank has to get something.
            dp = with_replicas(self._core, count, self._replica_gpus).dp
            if count in {0, present} or dp <= mini_batch:
                yield count

    def _holds_replica(self) -> bool:
        """A replica has an optimizer of its own: the core's data parallelism shards none of it."""
        alone = replace(self._core, dp=self._core.ep)
        return self._models.train_memory.budget(alone).fits

    def _beside(self, num_replicas: int) -> Candidate | None:
        """The best instances beside the core and so many replicas; None without another plan."""
        return self._on(self._plan, self._core, num_replicas, self._kind(num_replicas))

    def _on(
        self, base: Plan, core: TrainLayout, num_replicas: int, kind: SwitchKind
    ) -> Candidate | None:
        """The best instances beside the core of `base` and so many replicas of it."""
        num_gpus = self._bounds.room.num_gpus - core.num_gpus - num_replicas * replica_gpus(core)
        fewest = self._bounds.fewest_rollout_gpus(
            num_replicas=num_replicas, serves_nothing=not num_gpus
        )
        if num_gpus < fewest:
            return None

        def seat(tps: Sequence[int]) -> Plan | None:
            plan = seated(
                base,
                tps,
                num_replicas=num_replicas,
                replica_gpus=replica_gpus(core),
                room=self._bounds.room,
            )
            return plan if plan is not None and self._is_possible(plan) else None

        train = with_replicas(core, num_replicas, replica_gpus(core))
        train_s = self._models.train.cost(train, train_work(self._config, self._demand)).total_s
        if not num_gpus:
            return self._serving_nothing(seat(()), train_s, kind)
        try:
            layout, pace = self._rollout.best(
                num_gpus, train_s, has_room=lambda tps: seat(tps) is not None
            )
        except InfeasiblePlanError:
            return None
        plan = seat(layout.tp_degrees)
        if plan is None or plan.num_rollout_gpus < fewest or _is_same(plan, self._plan):
            return None
        return Candidate(
            kind=kind,
            plan=plan,
            step_s=step_seconds(self._rollout.train_pace(layout, train_s), pace),
        )

    def _serving_nothing(
        self, plan: Plan | None, train_s: float, kind: SwitchKind
    ) -> Candidate | None:
        """With every GPU of rollout lent, for as long as there is something to train on."""
        if plan is None or self._lead_steps < 1 or _is_same(plan, self._plan):
            return None
        pace = TrainPace(train_s=train_s, export_s=self._rollout.terms.export_s, sync_s=0.0)
        return Candidate(kind=kind, plan=plan, step_s=pace.busy_s, lasts_steps=self._lead_steps)

    def _is_possible(self, plan: Plan) -> bool:
        if _is_same(plan, self._plan):
            return True
        why = self._why_not(plan)
        if why and why not in self.left_out:
            self.left_out.append(why)
        return not why

    def _kind(self, num_replicas: int) -> SwitchKind:
        present = len(self._plan.hybrids)
        if num_replicas == present:
            return "rollout"
        return "to_training" if num_replicas > present else "to_rollout"

    def _reshaped(self) -> Iterator[Candidate]:
        """The planner's choice for the whole budget, when that is another core."""
        config = self._config
        num_rollout_gpus = self._bounds.room.num_gpus - config.training.train_gpus
        planner = replace(config.global_resource_planner, initial_allocation_strategy="grp")
        budget = replace(
            config,
            rollout=replace(config.rollout, rollout_gpus=num_rollout_gpus),
            global_resource_planner=planner,
        )
        try:
            report = searched(budget, demand=self._demand, calibration=self._book)
        except InfeasiblePlanError:
            return
        if report.choice.train == self._core:
            return
        train = self._reseated(report.plan.train)
        if train is None:
            return
        base = replace(self._plan, train=train, hybrids=())
        found = self._on(base, report.choice.train, 0, "reshape")
        if found is not None:
            yield found

    def _reseated(self, train: TrainPlacement) -> TrainPlacement | None:
        """The layout of `train` on slots that are there, where the core is now if they are."""
        slots = core_seats(self._plan, train.tp, train.world_size, self._bounds.room)
        if slots is None:
            return None
        nodes = tuple(node for node, _ in slots)
        return replace(
            train,
            slots=tuple(slot for _, slot in slots),
            node=nodes[0],
            nodes=() if len(set(nodes)) == 1 else nodes,
        )


def expected_step_s(config: RunConfig, plan: Plan, demand: Demand, models: CostModels) -> float:
    """Of a plan with at least one instance; its replicas count as more of the core's DP."""
    core = layout_of(plan.train, micro_batch_size=config.training.micro_batch_size)
    train = with_replicas(core, len(plan.hybrids), replica_gpus(core))
    tps = sorted((instance.tp for instance in plan.instances), reverse=True)
    return estimate_of(config, demand, models, train=train, tps=tps).step_s


def replica_gpus(core: TrainLayout) -> int:
    """Ranks of one complete replica: TP x EP x PP x CP."""
    return core.model_parallel_size * core.ep


def with_replicas(core: TrainLayout, num_replicas: int, gpus: int) -> TrainLayout:
    """The core as if the replicas were more of its data parallelism."""
    return replace(core, dp=core.dp + num_replicas * gpus // core.model_parallel_size)


def _is_same(one: Plan, other: Plan) -> bool:
    """Whether the same core and replicas train and the same instances serve."""
    if one.train.layout != other.train.layout:
        return False
    degrees = [sorted(i.tp for i in plan.instances) for plan in (one, other)]
    return degrees[0] == degrees[1] and len(one.hybrids) == len(other.hybrids)
