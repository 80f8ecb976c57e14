"""A plan report as text for a terminal."""

from collections.abc import Iterator, Sequence

from libra.models.kv_capacity import GIB
from libra.planner.calibration import Calibration
from libra.planner.memory import MemoryBudget
from libra.planner.report import Estimate, Option, PlanReport
from libra.planner.search import format_tps

_PRUNED_SHOWN = 40
_SHOWN_WAIT_S = 0.05


def render_plan(report: PlanReport, calibration: Calibration | None = None) -> str:
    """The choice with its budget, the runners-up, every pruned branch, and what was calibrated."""
    return "\n".join(_lines(report, calibration)) + "\n"


def _lines(report: PlanReport, calibration: Calibration | None) -> Iterator[str]:
    yield f"demand: {report.demand}"
    yield "choice"
    yield from _option(report.choice)
    if report.choice.estimate is not None:
        yield from _budget(report.choice.estimate.train_budget)
        yield from _layout(report.choice.estimate)
        if report.by_length is not None:
            known_s = report.by_length.makespan_s / report.choice.estimate.num_batches
            yield (
                f"    if lengths were known in advance: {format_tps(report.by_length.tp_degrees)}, "
                f"{known_s:.1f} s a step"
            )
    for note in report.notes:
        yield f"note: {note}"
    if report.runners_up:
        yield "runners-up"
        for option in report.runners_up:
            yield from _option(option)
    if report.pruned:
        yield f"left out ({len(report.pruned)})"
        yield from (f"  {pruned}" for pruned in report.pruned[:_PRUNED_SHOWN])
        if len(report.pruned) > _PRUNED_SHOWN:
            yield f"  and {len(report.pruned) - _PRUNED_SHOWN} more; --json has all"
    yield from _calibration(calibration)


def _option(option: Option) -> Iterator[str]:
    yield f"  train   {option.train.num_gpus:>5} GPUs: {option.train}"
    yield f"  rollout {sum(option.rollout_tps):>5} GPUs: {format_tps(option.rollout_tps)}"
    estimate = option.estimate
    if estimate is not None:
        train = estimate.train
        wait_s = estimate.step_s - max(estimate.train_s, estimate.rollout_s)
        waits = (
            f" + {wait_s:.1f} s for stale samples and waiting" if wait_s >= _SHOWN_WAIT_S else ""
        )
        yield (
            f"    step {estimate.step_s:.1f} s = max(train {estimate.train_s:.1f} s, "
            f"rollout {estimate.rollout_s:.1f} s){waits}; recompute "
            f"{train.recompute_logprobs_s:.1f} s, update {train.grpo_update_s:.1f} s, "
            f"export {estimate.export_s:.1f} s, reload {estimate.sync_s:.1f} s beside it, "
            f"bubble {train.bubble_fraction:.0%}"
        )


def _budget(budget: MemoryBudget) -> Iterator[str]:
    items = ", ".join(f"{item} {size / GIB:.1f}" for item, size in budget.bytes_of.items() if size)
    yield f"    memory of a training rank: {budget} is the largest; GiB: {items}"


def _layout(estimate: Estimate) -> Iterator[str]:
    blocks_of_all = estimate.rollout.blocks
    if estimate.num_batches > 1:
        yield f"    {estimate.num_batches} batches are in flight together:"
    for tp in sorted({block.tp for block in blocks_of_all}, reverse=True):
        blocks = [block for block in blocks_of_all if block.tp == tp]
        most = max(block.num_requests for block in blocks)
        seconds = _range([block.seconds for block in blocks])
        yield f"    TP{tp}: {len(blocks)} instances, at most {most} requests each, {seconds} s"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low}-{high}"


def _calibration(calibration: Calibration | None) -> Iterator[str]:
    if calibration is None or not calibration.factors:
        yield "calibration: none, figures are from data sheets and the shares in the documentation"
        return
    yield f"calibration of {calibration.model} on {calibration.hardware}"
    for operation, factor in sorted(calibration.factors.items()):
        yield (
            f"  {operation}: x{factor.ratio:.2f} from {factor.num_observations} measurements, "
            f"last prediction off by {factor.last_error_fraction:+.0%}"
        )
