"""What the recompute dry run says about a plan, and what follows from it.

`memory_budget_dry_run_enabled`: the ranks run one complete recompute pass before training and
report their peak. The peak corrects the estimate; a probe that did not fit, or whose corrected
budget no longer fits, excludes its layout and the search runs again.
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
    """The pass ran; the largest of its ranks' peaks."""

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


def on_probe(run: ProbedRun, outcome: ProbeOutcome) -> KeepPlan | SwitchPlan:
    """Compare the probe with the estimate and keep the plan or make another.

    Raises InfeasiblePlanError when nothing is left, or when the split is pinned by `configured`.
    """
    layout = run.report.choice.train
    memory = cost_models(run.config, run.calibration).train_memory
    static_bytes, estimated_bytes = memory.recompute_peak_bytes(layout)
    match outcome:
        case ProbeMeasured(peak_bytes=peak_bytes):
            measured_bytes = peak_bytes
        case ProbeOutOfMemory():
            measured_bytes = int(memory.capacity_bytes * _LEAST_OVERSHOOT)
        case _:
            assert_never(outcome)
    calibration = observe(
        run.calibration,
        Observation(
            operation="recompute_memory",
            predicted=max(1, estimated_bytes - static_bytes),
            measured=max(1, measured_bytes - static_bytes),
        ),
    )
    said = (
        f"recompute probe of {layout}: {_gib(measured_bytes)} measured, "
        f"{_gib(estimated_bytes)} estimated"
    )
    fits = isinstance(outcome, ProbeMeasured) and (
        cost_models(run.config, calibration).train_memory.budget(layout).fits
    )
    if fits:
        return KeepPlan(message=said, calibration=calibration)
    if run.report.plan.strategy == "configured":
        raise InfeasiblePlanError(f"{said}: the configured split does not fit")
    excluded = run.excluded | {layout}
    report = plan(run.config, demand=run.demand, calibration=calibration, excluded=excluded)
    return SwitchPlan(
        message=f"{said}: does not fit, going on with {report.choice.train}",
        calibration=calibration,
        report=report,
        excluded=excluded,
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
