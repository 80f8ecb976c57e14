"""Simulation results as text for a terminal."""

from collections.abc import Iterator

from msgspec.structs import replace

from libra.planner.report import Estimate
from libra.simulate.comparison import Comparison
from libra.simulate.elastic import DriftComparison
from libra.simulate.result import SimulationResult, StepRecord


def render_simulation(result: SimulationResult, estimate: Estimate | None = None) -> str:
    """One run: its rates, its instances, every step, and the planner's estimate beside them."""
    return "\n".join(_run_lines(result, estimate)) + "\n"


def render_comparison(comparison: Comparison) -> str:
    """A row per scenario; `ratio` is tokens/s over those of the first row."""
    return "\n".join(_comparison_lines(comparison)) + "\n"


def render_drift(comparison: DriftComparison) -> str:
    """A row per way to run the load, the regrets, and every switch with its reason."""
    return "\n".join(_drift_lines(comparison)) + "\n"


def _drift_lines(comparison: DriftComparison) -> Iterator[str]:
    num_phases = comparison.num_changes + 1
    heads = "".join(f" {f'phase {k + 1}':>9}" for k in range(num_phases))
    yield f"{'':<22} {'total s':>9}{heads}  at the end"
    best = replace(comparison.best, name=f"best kept: {comparison.best.name}")
    for use in (comparison.static, comparison.start, comparison.elastic, best):
        phases = "".join(f" {seconds:>9.0f}" for seconds in use.phase_s)
        yield f"{use.name:<22} {use.total_s:>9.0f}{phases}  {use.train} | {use.rollout}"
    each_s = f"{comparison.best_of_each_s:>9.0f}"
    yield f"{'best of each phase':<22} {each_s}  changed at once, for nothing"
    yield (
        f"regret of elastic: {comparison.regret_fraction:+.1%} over the best plan that is kept, "
        f"{comparison.regret_of_each_fraction:+.1%} over the best of each phase"
    )
    yield (
        f"{comparison.num_switches} switches in {len(comparison.decided)} looks; the load changed "
        f"{comparison.num_changes} times"
    )
    for decided in comparison.decided:
        if decided.switch_kind:
            yield f"step {decided.step}, {decided.switch_kind}: {decided.reason}"


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
