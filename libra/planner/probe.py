"""What the recompute dry run says about a plan, and what follows from it.

`memory_budget_dry_run_enabled`: the ranks run one complete recompute pass before training and
report by how much it raised what they hold. That corrects the estimate; a probe that did not fit,
or with which the budget no longer fits, excludes its layout and the search runs again.
"""

from typing import TypeAlias, assert_never

import msgspec

from libra.config.run import RunConfig
from libra.errors import InfeasiblePlanError
from libra.models.kv_capacity import GIB
from libra.planner.calibration import Calibration, Observation, observe
from libra.planner.cost_models import cost_models
from libra.planner.demand import Demand
from libra.planner.report import PlanReport
from libra.planner.search import plan
from libra.planner.train_layout import TrainLayout

_LEAST_OVERSHOOT = 1.1
"""A pass that ran out of memory wanted at least this much more than the device has: the allocator
stops at the first request that does not fit and never says what would have followed."""


class ProbeMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """The pass ran; the largest of its ranks' figures."""

    rise_bytes: int
    """By how much the pass raised what the rank held: optimizer state is not there yet."""

    peak_bytes: int


class ProbeOutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A rank ran out of device memory."""


ProbeOutcome: TypeAlias = ProbeMeasured | ProbeOutOfMemory


class KeepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan holds; train with it."""

    message: str
    calibration: Calibration


class SwitchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan does not hold; `report` has the next one, `excluded` what must not come back."""

    message: str
    calibration: Calibration
    report: PlanReport
    excluded: frozenset[TrainLayout]


class ProbedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What was planned, and with which knowledge."""

    config: RunConfig
    report: PlanReport
    calibration: Calibration
    demand: Demand
    excluded: frozenset[TrainLayout] = frozenset()


def probe_observation(
    run: ProbedRun, outcome: ProbeOutcome, layout: TrainLayout | None = None
) -> Observation | None:
    """What the probe teaches about `recompute_memory`; None when nothing rose.

    `layout` is what was probed, where it is not the plan's.
    """
    nothing_known = msgspec.structs.replace(run.calibration, factors={})
    memory = cost_models(run.config, nothing_known).train_memory
    static_bytes, estimated_bytes = memory.recompute_peak_bytes(layout or run.report.choice.train)
    match outcome:
        case ProbeMeasured(rise_bytes=rise_bytes):
            measured_bytes = rise_bytes
        case ProbeOutOfMemory():
            measured_bytes = int(memory.capacity_bytes * _LEAST_OVERSHOOT) - static_bytes
        case _:
            assert_never(outcome)
    if measured_bytes <= 0 or estimated_bytes <= static_bytes:
        return None
    return Observation(
        operation="recompute_memory",
        predicted=estimated_bytes - static_bytes,
        measured=measured_bytes,
    )


class LayoutJudged(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a layout that nobody planned fits."""

    fits: bool
    message: str


def on_forced_probe(run: ProbedRun, layout: TrainLayout, outcome: ProbeOutcome) -> LayoutJudged:
    """Compare the probe of a layout that was forced on the run with its estimate."""
    observation = probe_observation(run, outcome, layout)
    calibration = run.calibration
    if observation is not None:
        calibration = observe(calibration, observation)
    fits = _fits(run, layout, outcome, calibration)
    said = f"recompute probe of {layout}: {_in_words(run, layout, outcome)}"
    return LayoutJudged(fits=fits, message=said if fits else f"{said}: does not fit")


def on_probe(run: ProbedRun, outcome: ProbeOutcome) -> KeepPlan | SwitchPlan:
    """Compare the probe with the estimate and keep the plan or make another.

    Raises InfeasiblePlanError when nothing is left, or when the split is pinned by `configured`.
    """
    layout = run.report.choice.train
    observation = probe_observation(run, outcome)
    calibration = run.calibration
    if observation is not None:
        calibration = observe(calibration, observation)
    said = f"recompute probe of {layout}: {_in_words(run, layout, outcome)}"
    if _fits(run, layout, outcome, calibration):
        return KeepPlan(message=said, calibration=calibration)
    if run.report.plan.strategy == "configured":
        raise InfeasiblePlanError(
            f"{said}: the configured split does not fit; lower recompute_micro_batch_size or "
            "max_model_len, raise train_tp_size, or let the planner choose "
            "(initial_allocation_strategy: grp)"
        )
    excluded = run.excluded | {layout}
    report = plan(run.config, demand=run.demand, calibration=calibration, excluded=excluded)
    return SwitchPlan(
        message=f"{said}: does not fit, going on with {report.choice.train}",
        calibration=calibration,
        report=report,
        excluded=excluded,
    )


def _fits(
    run: ProbedRun, layout: TrainLayout, outcome: ProbeOutcome, calibration: Calibration
) -> bool:
    """Both the corrected budget and this very measurement, which one factor may average away."""
    if not isinstance(outcome, ProbeMeasured):
        return False
    memory = cost_models(run.config, calibration).train_memory
    static_bytes, _ = memory.recompute_peak_bytes(layout)
    margin = run.config.global_resource_planner.memory_budget_safety_margin_bytes
    needed = static_bytes + outcome.rise_bytes + margin
    return memory.budget(layout).fits and needed <= memory.capacity_bytes


def _in_words(run: ProbedRun, layout: TrainLayout, outcome: ProbeOutcome) -> str:
    memory = cost_models(run.config, run.calibration).train_memory
    static_bytes, estimated_bytes = memory.recompute_peak_bytes(layout)
    estimated = (
        f"{_gib(estimated_bytes - static_bytes)} estimated beside {_gib(static_bytes)} of "
        f"parameters, gradients and optimizer state, on {_gib(memory.capacity_bytes)}"
    )
    if isinstance(outcome, ProbeMeasured):
        return f"{_gib(outcome.rise_bytes)} measured (peak {_gib(outcome.peak_bytes)}), {estimated}"
    return f"out of memory, {estimated}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
