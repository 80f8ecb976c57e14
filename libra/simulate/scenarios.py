"""The ways to use one cluster that a comparison runs: colocated, static, planned."""

from collections.abc import Sequence

from msgspec.structs import replace

from libra.config.run import RunConfig
from libra.errors import InfeasiblePlanError, InvariantError
from libra.ids import SlotId
from libra.planner.applied import planned_config
from libra.planner.calibration import Calibration, book_of
from libra.planner.cost_models import CostModels, cost_models, described
from libra.planner.demand import Demand
from libra.planner.layout import best_layout
from libra.planner.placement import place
from libra.planner.plan import Plan, TrainPlacement
from libra.planner.pricing import train_work
from libra.planner.pruning import PruneLog
from libra.planner.report import PlanReport
from libra.planner.rollout_cost import workload_of
from libra.planner.rollout_search import instance_costs
from libra.planner.search import plan
from libra.planner.train_layout import TrainLayout
from libra.planner.train_search import TrainSearch
from libra.simulate.fleet import LengthBound
from libra.simulate.run import Scenario

_OFFLOAD_BYTES_PER_S = 25e9
"""Device to host and back: PCIe generation 4, 16 lanes, as reached."""

_SLEEP_BYTES_PER_S = 1.7e9
_WAKE_BYTES_PER_S = 6.0e9
"""Measured: vLLM 0.22 /sleep?level=1 in 2.07 s and /wake_up in 0.59 s for 3.5 GB of weights."""


def configured(config: RunConfig, demand: Demand) -> Scenario:
    """What the configuration asks for: the planner's choice, or the pinned split."""
    described(config)
    strategy = config.global_resource_planner.initial_allocation_strategy
    name = "planned" if strategy == "grp" else "configured"
    return of_report(name, config, plan(config, demand=demand))


def planned(config: RunConfig, demand: Demand) -> Scenario:
    """The planner's own choice for the real router."""
    return of_report("planned", config, plan(_grp(config), demand=demand))


def mixed(config: RunConfig, demand: Demand, *, lengths_known: bool) -> Scenario:
    """Instances of several TP degrees, as they would be best if lengths were known in advance.

    Without `lengths_known` the real router, which does not know them, has to work with that mix.
    """
    report = plan(_grp(config), demand=demand, lengths_known=True)
    scenario = of_report(
        f"mixed TP, lengths {'known' if lengths_known else 'unknown'}", config, report
    )
    bounds = _length_bounds(report, demand) if lengths_known else ()
    return replace(scenario, length_bounds=bounds)


def _length_bounds(report: PlanReport, demand: Demand) -> tuple[LengthBound, ...]:
    """Where the plan cuts the sorted requests between degrees."""
    if report.choice.estimate is None:
        raise InvariantError("a plan for known lengths has no estimate")
    lengths = sorted(demand.response_tokens * demand.num_batches, reverse=True)
    bounds: list[LengthBound] = []
    end = 0
    for block in report.choice.estimate.rollout.blocks:
        end += block.num_requests
        bounds.append(LengthBound(shortest_tokens=lengths[end - 1], tp=block.tp))
    return tuple(bounds)


def static_split(config: RunConfig, demand: Demand, *, train_gpus: int, tp: int) -> Scenario:
    """Training on `train_gpus` with its best layout, the rest in instances of one degree."""
    scenario = split_of(_grp(config, allowed_rollout_tp=[tp]), demand, train_gpus=train_gpus)
    return replace(scenario, name=f"static {train_gpus}+{_num_gpus(config) - train_gpus}, TP{tp}")


def split_of(config: RunConfig, demand: Demand, *, train_gpus: int) -> Scenario:
    """Training on exactly `train_gpus`, both sides with the planner's layouts for `demand`."""
    num_rollout_gpus = _num_gpus(config) - train_gpus
    pinned = _grp(
        config,
        allocation_granularity_gpus=train_gpus,
        min_train_gpus=train_gpus,
        min_rollout_gpus=num_rollout_gpus,
    )
    name = f"static {train_gpus}+{num_rollout_gpus}"
    return of_report(name, config, plan(pinned, demand=demand))


def static_splits(config: RunConfig, demand: Demand) -> list[Scenario]:
    """Every static split at the granularity with every degree; infeasible ones are left out."""
    granularity = config.global_resource_planner.allocation_granularity_gpus
    found = []
    for train_gpus in range(granularity, _num_gpus(config), granularity):
        for tp in rollout_degrees(config):
            try:
                found.append(static_split(config, demand, train_gpus=train_gpus, tp=tp))
            except InfeasiblePlanError:
                # No layout trains on so many GPUs, or the degree does not fit beside it.
                continue
    return found


def colocated(config: RunConfig, demand: Demand) -> Scenario:
    """All GPUs roll out, then all train: on-policy, in turns, with a switch each way."""
    num_gpus = _num_gpus(config)
    demand = replace(demand, num_batches=1)
    grp = _grp(config)
    models = cost_models(grp, _calibration(grp))
    searched = TrainSearch(
        grp,
        models=models,
        work=train_work(grp, demand),
        gpu_counts=[num_gpus],
    ).best(num_gpus)
    if not searched:
        raise InfeasiblePlanError(f"no training layout uses exactly {num_gpus} GPUs")
    costs = instance_costs(grp, models, PruneLog(), most_gpus=num_gpus)
    work = workload_of(demand)
    layouts = [
        best_layout([cost], work, num_gpus=num_gpus, tolerance=1e-4)
        for cost in costs
        if num_gpus % cost.tp == 0
    ]
    tp = min(layouts, key=lambda layout: layout.makespan_s).tp_degrees[0]
    train = searched[0].layout
    both = _colocated_plan(train, [tp] * (num_gpus // tp), models)
    # Turns allow no head start: every batch is generated by the policy that it trains.
    on_policy = replace(config, rollout=replace(config.rollout, max_head_offpolicyness=0.0))
    return Scenario(
        name="colocated",
        config=planned_config(on_policy, both),
        plan=both,
        models=models,
        num_gpus=num_gpus,
        switch_s=_switch_s(models, train, tp),
    )


def of_report(name: str, config: RunConfig, report: PlanReport) -> Scenario:
    applied = planned_config(config, report.plan)
    return Scenario(
        name=name,
        config=applied,
        plan=report.plan,
        models=cost_models(applied, _calibration(config)),
        num_gpus=_num_gpus(config),
        estimate=report.choice.estimate,
    )


def _colocated_plan(train: TrainLayout, tps: Sequence[int], models: CostModels) -> Plan:
    """Instances and ranks on the same slots."""
    num_gpus, node_gpus = train.num_gpus, models.rates.gpus_per_node
    # Placed beside one another on twice the GPUs; the instances come first.
    placed = place(train, tps, num_gpus=2 * num_gpus, gpus_per_node=node_gpus)
    if placed is None:
        raise InfeasiblePlanError(f"TP{tps[0]} instances do not fill nodes of {node_gpus} GPUs")
    slots = tuple(SlotId(k % node_gpus) for k in range(num_gpus))
    shared: TrainPlacement = replace(placed.train, slots=slots)
    return replace(placed, train=shared)


def _switch_s(models: CostModels, train: TrainLayout, tp: int) -> float:
    """Engines sleep and wake, training state leaves and comes back."""
    weights = models.rollout_memory.budget(tp).bytes_of["weights"]
    static_bytes, _ = models.train_memory.recompute_peak_bytes(train)
    return (
        weights / _SLEEP_BYTES_PER_S
        + weights / _WAKE_BYTES_PER_S
        + 2 * static_bytes / _OFFLOAD_BYTES_PER_S
    )


def rollout_degrees(config: RunConfig) -> list[int]:
    """TP degrees that an instance may have."""
    models = cost_models(config, _calibration(config))
    most = _num_gpus(config) - config.global_resource_planner.min_train_gpus
    return [cost.tp for cost in instance_costs(config, models, PruneLog(), most_gpus=most)]


def _grp(config: RunConfig, **options: object) -> RunConfig:
    planner = replace(config.global_resource_planner, initial_allocation_strategy="grp", **options)
    return replace(config, global_resource_planner=planner)


def _calibration(config: RunConfig) -> Calibration:
    return book_of(*described(config))


def _num_gpus(config: RunConfig) -> int:
    return config.training.train_gpus + config.rollout.rollout_gpus
