"""Simulation results as text for a terminal."""

from collections.abc import Iterator

from libra.planner.report import Estimate
from libra.simulate.comparison import Comparison
from libra.simulate.result import SimulationResult, StepRecord


def render_simulation(result: SimulationResult, estimate: Estimate | None = None) -> str:
    """One run: its rates, its instances, every step, and the planner's estimate beside them."""
    return "\n".join(_run_lines(result, estimate)) + "\n"


def render_comparison(comparison: Comparison) -> str:
    """A row per scenario; `ratio` is tokens/s over those of the first row."""
    return "\n".join(_comparison_lines(comparison)) + "\n"


def _run_lines(result: SimulationResult, estimate: Estimate | None) -> Iterator[str]:
    yield f"{result.name}: train {result.train}; rollout {result.rollout}; seed {result.seed}"
    yield (
        f"step {result.step_s:.1f} s, {result.tokens_per_gpu_s:.0f} response tokens/s per GPU, "
        f"trainer busy {result.train_busy_fraction:.0%}, mean staleness "
        f"{result.mean_staleness:.2f} (without the first {result.num_warm_up_steps} steps)"
    )
    if estimate is not None:
        yield (
            f"the planner expected a step of {estimate.step_s:.1f} s: train "
            f"{estimate.train_s:.1f} s, rollout {estimate.rollout_s:.1f} s"
        )
    for use in result.uses:
        yield (
            f"TP{use.tp}: {use.num_instances} instances, busy {use.busy_fraction:.0%}, "
            f"{use.num_preemptions} preemptions"
        )
    yield f"dropped as stale: {result.num_stale_dropped}; turned away: {result.num_refused}"
    yield " step    begins   waited  trained  export     tokens stale"
    yield from (_step(step) for step in result.steps)


def _step(step: StepRecord) -> str:
    return (
        f"{step.step:>5} {step.started_at:>9.1f} {step.waited_s:>8.1f} "
        f"{step.ended_at - step.started_at:>8.1f} {step.freed_at - step.ended_at:>7.1f} "
        f"{step.num_response_tokens:>10} {step.mean_staleness:.2f}"
    )


def _comparison_lines(comparison: Comparison) -> Iterator[str]:
    yield f"{'scenario':<28} {'step s':>8} {'tok/s/GPU':>10} {'ratio':>6} {'train':>6}  layout"
    first = comparison.results[0].tokens_per_gpu_s if comparison.results else 1.0
    for result in comparison.results:
        rate = result.tokens_per_gpu_s
        yield (
            f"{result.name:<28} {result.step_s:>8.1f} {rate:>10.0f} {rate / first:>6.2f} "
            f"{result.train_busy_fraction:>6.0%}  {result.train} | {result.rollout}"
        )
    yield from (f"left out: {reason}" for reason in comparison.left_out)
