"""The split, the training layout and the rollout instances of smallest step time.

minimise max(T_train, T_rollout) per step over the split of N GPUs. T_train includes the export of
weights, T_rollout the pause of a reload and what rollout waits for the trainer's versions
(libra.planner.pace). Training counts that are no faster than
a smaller one are dropped; after that more training GPUs make T_train fall and T_rollout rise.
"""

from collections.abc import Iterator, Sequence
from math import inf

import msgspec

from libra.config.run import RunConfig
from libra.errors import InfeasiblePlanError
from libra.planner.calibration import Calibration, book_of
from libra.planner.cost_models import CostModels, cost_models, described
from libra.planner.demand import Demand, prior_demand
from libra.planner.layout import RolloutLayout
from libra.planner.pace import RolloutPace, step_seconds
from libra.planner.placement import free_slots, place
from libra.planner.plan import Plan, configured_plan
from libra.planner.pricing import estimate_of, layout_of, pace_terms, train_work
from libra.planner.pruning import Pruned, PruneLog
from libra.planner.report import Estimate, Option, PlanReport
from libra.planner.rollout_cost import workload_of
from libra.planner.rollout_search import instance_costs
from libra.planner.rollout_side import RolloutSide
from libra.planner.train_layout import TrainLayout
from libra.planner.train_search import TrainCandidate, TrainSearch

_RUNNER_UP_TOLERANCE = 1e-3
"""Runners-up are for reading: their rollout times may be this far above the minimum, relative."""

_ALIKE = 1.02
"""Step times this close are within what the model can tell apart."""

_NUM_BESIDE = 2
"""Splits solved on either side of the best one."""

_NUM_TRIED = 24
"""Splits tried at first, evenly spaced."""

_REASONS_SHOWN = 12


def plan(
    config: RunConfig,
    *,
    demand: Demand | None = None,
    calibration: Calibration | None = None,
    excluded: frozenset[TrainLayout] = frozenset(),
    lengths_known: bool = False,
) -> PlanReport:
    """The plan that `initial_allocation_strategy` asks for.

    `demand` defaults to the configured prior; `excluded` layouts failed their recompute probe.
    `lengths_known` plans for a router that sends the longest requests to the widest instances,
    which the scheduler does not do: it is for comparison.
    Raises ConfigError when `grp` lacks a description of hardware or model, InfeasiblePlanError when
    no split works; its message holds the reasons.
    """
    demand = demand or prior_demand(config)
    if config.global_resource_planner.initial_allocation_strategy == "configured":
        return _configured(config, demand, calibration)
    hardware, arch = described(config)
    book = calibration or book_of(hardware, arch)
    search = _Search(
        config,
        demand,
        cost_models(config, book),
        choices=_Choices(excluded=excluded, lengths_known=lengths_known),
    )
    return search.report()


class _Choices(msgspec.Struct, frozen=True, kw_only=True):
    """What narrows or widens one search."""

    excluded: frozenset[TrainLayout]
    lengths_known: bool


class _Search:
    """One planning run; its fields are what every step of it reads."""

    def __init__(
        self,
        config: RunConfig,
        demand: Demand,
        models: CostModels,
        *,
        choices: _Choices,
    ) -> None:
        self._config, self._demand, self._models = config, demand, models
        self._num_gpus = config.training.train_gpus + config.rollout.rollout_gpus
        self._log = PruneLog()
        most_rollout_gpus = self._num_gpus - config.global_resource_planner.min_train_gpus
        self._rollout = RolloutSide(
            costs=instance_costs(config, models, self._log, most_gpus=most_rollout_gpus),
            work=workload_of(demand),
            one_batch=workload_of(msgspec.structs.replace(demand, num_batches=1)),
            terms=pace_terms(config, demand, models),
            node_gpus=models.rates.gpus_per_node,
            scheduling=config.heterogeneous_rollout.scheduling,
            lengths_known=choices.lengths_known,
        )
        self._train = TrainSearch(
            config,
            models=models,
            work=train_work(config, demand),
            gpu_counts=self._gpu_counts(),
            excluded=choices.excluded,
        )

    def report(self) -> PlanReport:
        self._check_size()
        candidates = self._falling_candidates()
        if not candidates:
            raise InfeasiblePlanError(self._why("no training layout is feasible"))
        best = self._best_split(candidates)
        first, last = max(0, best - _NUM_BESIDE), min(len(candidates), best + 1 + _NUM_BESIDE)
        solved = [
            self._placed(candidates[i], exact=best - 1 <= i <= best) for i in range(first, last)
        ]
        placed = [both for both in solved if both is not None]
        if not placed:
            raise InfeasiblePlanError(self._why("no split keeps TP groups inside nodes"))
        choice, plan_of_choice = _best(placed)
        others = [option for option, _ in placed if option is not choice]
        others += self._other_layouts(choice)
        return PlanReport(
            plan=plan_of_choice,
            choice=choice,
            runners_up=tuple(sorted(others, key=_step_s)),
            pruned=self._pruned(),
            demand=self._demand.source,
            by_length=self._rollout.by_length(self._num_gpus - choice.train.num_gpus),
            notes=self._notes(plan_of_choice),
        )

    def _check_size(self) -> None:
        available = self._models.rates.gpus_per_node * self._models.rates.nodes
        if self._num_gpus > available:
            raise InfeasiblePlanError(
                f"train_gpus + rollout_gpus is {self._num_gpus}; hardware describes {available} "
                f"GPUs ({self._models.rates.nodes} nodes)"
            )
        if not self._rollout.costs:
            raise InfeasiblePlanError(self._why("no rollout instance is feasible"))
        if not self._gpu_counts():
            planner = self._config.global_resource_planner
            raise InfeasiblePlanError(
                f"{self._num_gpus} GPUs cannot be split in steps of "
                f"{planner.allocation_granularity_gpus} with at least {planner.min_train_gpus} for "
                f"training and {planner.min_rollout_gpus} for rollout"
            )

    def _gpu_counts(self) -> list[int]:
        """Training sizes that the granularity and the minima allow, ascending."""
        planner = self._config.global_resource_planner
        smallest = min((cost.tp for cost in self._rollout.costs), default=1)
        most = self._num_gpus - max(planner.min_rollout_gpus, smallest)
        step = planner.allocation_granularity_gpus
        return [n for n in range(step, most + 1, step) if n >= planner.min_train_gpus]

    def _falling_candidates(self) -> list[TrainCandidate]:
        """The best layout of each training size, without sizes that a smaller one equals."""
        kept: list[TrainCandidate] = []
        for count in self._gpu_counts():
            best = self._train.best(count)
            if not best:
                continue
            if kept and best[0].cost.total_s >= kept[-1].cost.total_s:
                self._log.cut(
                    f"{count} training GPUs",
                    f"no faster ({best[0].cost.total_s:.1f} s) than {kept[-1].layout.num_gpus}",
                )
            else:
                kept.append(best[0])
        return kept

    def _best_split(self, candidates: Sequence[TrainCandidate]) -> int:
        """Index of the fastest split, or of one beside it.

        The step time falls and then rises with training GPUs. Every so many are tried, then all
        around the best of those: divisibility makes the curve uneven. With lengths known one trial
        takes seconds at size, and the crossing of both sides has to do.
        """
        if self._rollout.lengths_known:
            return min(self._crossing(candidates), len(candidates) - 1)
        stride = max(1, len(candidates) // _NUM_TRIED)
        tried = range(0, len(candidates), stride)
        near = min(tried, key=lambda index: self._step_s(candidates[index]))
        around = range(max(0, near - stride), min(len(candidates), near + stride + 1))
        return min(around, key=lambda index: self._step_s(candidates[index]))

    def _step_s(self, candidate: TrainCandidate) -> float:
        beside = self._beside(candidate)
        if beside is None:
            return inf
        layout, pace = beside
        return step_seconds(self._rollout.train_pace(layout, candidate.cost.total_s), pace)

    def _beside(
        self, candidate: TrainCandidate, *, tolerance: float = 0.0
    ) -> tuple[RolloutLayout, RolloutPace] | None:
        """The best rollout on the GPUs that training leaves; None without room for an instance."""
        try:
            return self._rollout.best(
                self._num_gpus - candidate.layout.num_gpus,
                candidate.cost.total_s,
                has_room=lambda tps: self._place(candidate, tps) is not None,
                tolerance=tolerance,
            )
        except InfeasiblePlanError:
            return None

    def _place(self, candidate: TrainCandidate, tps: Sequence[int]) -> Plan | None:
        return place(
            candidate.layout,
            tps,
            num_gpus=self._num_gpus,
            gpus_per_node=self._models.rates.gpus_per_node,
        )

    def _crossing(self, candidates: Sequence[TrainCandidate]) -> int:
        """Index of the first candidate that leaves rollout too few GPUs to keep pace with it."""
        export_s = self._models.publish.step_export_s()
        low, high = 0, len(candidates)
        while low < high:
            middle = (low + high) // 2
            candidate = candidates[middle]
            num_gpus = self._num_gpus - candidate.layout.num_gpus
            if not self._rollout.keeps_pace(
                num_gpus, (candidate.cost.total_s + export_s) * self._demand.num_batches
            ):
                high = middle
            else:
                low = middle + 1
        return low

    def _placed(self, candidate: TrainCandidate, *, exact: bool) -> tuple[Option, Plan] | None:
        """The split's best rollout layout on real slots; None when node boundaries forbid it."""
        beside = self._beside(candidate, tolerance=0.0 if exact else _RUNNER_UP_TOLERANCE)
        if beside is None:
            self._no_room(candidate, "any instance")
            return None
        layout, pace = beside
        estimate = Estimate(
            train=candidate.cost,
            train_budget=candidate.budget,
            rollout=layout,
            num_batches=self._demand.num_batches,
            export_s=self._models.publish.step_export_s(),
            sync_s=self._models.publish.step_sync_s(layout.tp_degrees),
            pace=pace,
        )
        for tps in self._instances(layout, self._num_gpus - candidate.layout.num_gpus):
            placed = self._place(candidate, tps)
            if placed is not None:
                option = Option(train=candidate.layout, rollout_tps=tps, estimate=estimate)
                return option, placed
        self._no_room(candidate, format_tps(layout.tp_degrees))
        return None

    def _no_room(self, candidate: TrainCandidate, instances: str) -> None:
        self._log.cut(
            f"{candidate.layout} with rollout of {instances}",
            f"node boundaries ({self._models.rates.gpus_per_node} GPUs) leave no room",
        )

    def _instances(self, layout: RolloutLayout, num_gpus: int) -> Iterator[tuple[int, ...]]:
        """Degrees to place, best first.

        GPUs that a layout by length leaves over get more of the smallest instances: they wait for
        requests that turn out shorter. Without known lengths such an instance would slow all down.
        """
        smallest = min(cost.tp for cost in self._rollout.costs)
        most_spares = (num_gpus - layout.num_gpus) // smallest
        for spares in reversed(range(most_spares + 1 if self._rollout.lengths_known else 1)):
            yield tuple(sorted((*layout.tp_degrees, *[smallest] * spares), reverse=True))

    def _other_layouts(self, choice: Option) -> list[Option]:
        """The next best training layouts of the chosen split."""
        estimate = choice.estimate
        if estimate is None:
            return []
        return [
            Option(
                train=other.layout,
                rollout_tps=choice.rollout_tps,
                estimate=msgspec.structs.replace(
                    estimate, train=other.cost, train_budget=other.budget
                ),
            )
            for other in self._train.best(choice.train.num_gpus, num_best=3)[1:]
        ]

    def _notes(self, chosen: Plan) -> tuple[str, ...]:
        notes = []
        rooms = free_slots(chosen, self._num_gpus, self._models.rates.gpus_per_node)
        if idle := sum(rooms):
            smallest = min(cost.tp for cost in self._rollout.costs)
            why = "more instances on them would not shorten the step"
            if smallest > max(rooms):
                why = f"the smallest instance has TP{smallest}, a node has {max(rooms)} of them"
            notes.append(f"{idle} GPUs stay idle: {why}")
        concurrency = self._config.rollout.max_concurrent_rollouts
        if concurrency < self._demand.num_sequences:
            notes.append(
                f"max_concurrent_rollouts {concurrency} is below the {self._demand.num_sequences} "
                "trajectories of a step; the rollout time assumes all in flight"
            )
        return tuple(notes)

    def _pruned(self) -> tuple[Pruned, ...]:
        return (*self._log.entries(), *self._train.log.entries())

    def _why(self, what: str) -> str:
        reasons = [str(pruned) for pruned in self._pruned()]
        shown = "\n  ".join(reasons[:_REASONS_SHOWN])
        more = len(reasons) - _REASONS_SHOWN
        rest = f"\n  and {more} more" if more > 0 else ""
        return f"{what} on {self._num_gpus} GPUs:\n  {shown}{rest}"


def format_tps(tps: Sequence[int]) -> str:
    """`2 x TP4 + 6 x TP1`, largest first."""
    degrees = sorted(set(tps), reverse=True)
    return " + ".join(f"{tps.count(tp)} x TP{tp}" for tp in degrees)


def _configured(config: RunConfig, demand: Demand, calibration: Calibration | None) -> PlanReport:
    """The pinned split, with estimates when hardware and model are described."""
    placed = configured_plan(config)
    train = layout_of(placed.train, micro_batch_size=config.training.micro_batch_size)
    tps = tuple(sorted((instance.tp for instance in placed.instances), reverse=True))
    estimate = None
    notes: tuple[str, ...] = ("no estimates: hardware or model_arch are not described",)
    if config.hardware is not None and config.model_arch is not None:
        book = calibration or book_of(config.hardware, config.model_arch)
        estimate = estimate_of(config, demand, cost_models(config, book), train=train, tps=tps)
        notes = ()
    choice = Option(train=train, rollout_tps=tps, estimate=estimate)
    return PlanReport(
        plan=placed, choice=choice, runners_up=(), pruned=(), demand=demand.source, notes=notes
    )


def _best(placed: Sequence[tuple[Option, Plan]]) -> tuple[Option, Plan]:
    """The fastest; among those alike, the one whose faster side leaves most time to spare.

    Where one side hardly gains from more GPUs (a long tail keeps rollout waiting), they are better
    spent on the other: waits for the trainer and for reloads come on top of the slower side.
    """
    limit_s = _ALIKE * min(_step_s(option) for option, _ in placed)
    return min(placed, key=lambda both: (max(limit_s, _step_s(both[0])), _both_sides_s(both[0])))


def _both_sides_s(option: Option) -> float:
    if option.estimate is None:
        return 0.0
    return option.estimate.version_s + option.estimate.rollout_s


def _step_s(option: Option) -> float:
    return option.estimate.step_s if option.estimate else 0.0
