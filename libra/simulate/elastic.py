"""One drifting load on a plan that stays and on one that follows, beside the best in hindsight."""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from libra.config.run import RunConfig
from libra.errors import InfeasiblePlanError
from libra.planner.calibration import book_of
from libra.planner.cost_models import described
from libra.planner.plan import Plan, plan_in_words
from libra.planner.replan import Replanner, Switch
from libra.planner.replan_observed import StepObserved
from libra.simulate.drift import DriftingLengths, Phase
from libra.simulate.reconfiguration import SwitchTimes
from libra.simulate.result import SimulationResult
from libra.simulate.run import Scenario, simulate
from libra.simulate.scenarios import planned, rollout_degrees, split_of

_TIMES = SwitchTimes()


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the plan."""

    step: int
    switch_kind: str
    """Empty when the plan was kept."""

    reason: str
    plan: str
    """In force after it, in words."""


class ReplanningSteward:
    """`libra.simulate.run.Steward` that does what the real Replanner says."""

    def __init__(self, replanner: Replanner, *, num_steps: int, times: SwitchTimes) -> None:
        self.times = times
        self.decided: list[Decided] = []
        self._replanner = replanner
        self._num_steps = num_steps

    def on_step(self, seen: StepObserved, plan: Plan, now: float) -> Plan | None:
        self._replanner.on_step(seen)
        if not self._replanner.due(now):
            return None
        verdict = self._replanner.decide(plan, now, self._num_steps - seen.step)
        wanted = verdict.plan if isinstance(verdict, Switch) else None
        self.decided.append(
            Decided(
                step=seen.step,
                switch_kind=verdict.kind if isinstance(verdict, Switch) else "",
                reason=verdict.reason,
                plan=plan_in_words(wanted or plan),
            )
        )
        if isinstance(verdict, Switch):
            self._replanner.on_switch_begun(verdict)
        return wanted

    def on_changed(self, stalled_s: float, now: float) -> None:
        self._replanner.on_switched(stalled_s, now, ok=True)


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the load."""

    name: str
    total_s: float
    phase_s: tuple[float, ...]
    """Of the steps in each phase."""

    train: str
    rollout: str
    """Layouts at the end."""


class DriftComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What following the load was worth."""

    num_steps: int
    seed: int
    static: Use
    """The configured split, with the planner's layouts for the first phase."""

    start: Use
    """The planner's choice for the first phase."""

    elastic: Use
    """The same, replanned while the run goes on."""

    best: Use
    """The fastest of all splits that keep their plan."""

    best_of_each_s: float
    """The fastest split of each phase, as if changed at once and for nothing."""

    regret_fraction: float
    """Elastic over the best fixed plan; below 0 when following was better than any."""

    regret_of_each_fraction: float
    """Elastic over the best of each phase."""

    num_changes: int
    """Phases after the first: how often the load really changed."""

    num_switches: int

    decided: tuple[Decided, ...]


def compare_drift(
    config: RunConfig,
    lengths: DriftingLengths,
    *,
    num_steps: int,
    seed: int,
    times: SwitchTimes = _TIMES,
) -> DriftComparison:
    """Static, planned at the start, elastic, and every split that keeps its plan.

    What the elastic run may change is as configured; without
    `runtime_dynamic_reconfiguration_enabled` it is everything.
    Raises InfeasiblePlanError when the first phase has no plan, ConfigError without a description
    of hardware and model.
    """
    bounds = [phase.from_step for phase in lengths.phases if phase.from_step < num_steps]
    phases = lengths.phases[: len(bounds)]
    first = lengths.demand(config)
    budget = config.training.train_gpus
    fixed = [
        _use(simulate(scenario, lengths, num_steps=num_steps, seed=seed), bounds)
        for scenario in _splits(config, lengths, phases)
    ]
    static = split_of(config, first, train_gpus=budget)
    start = planned(config, first)
    elastic, decided = _elastic(start, config, lengths, num_steps=num_steps, seed=seed, times=times)
    runs = {
        scenario.name: _use(simulate(scenario, lengths, num_steps=num_steps, seed=seed), bounds)
        for scenario in (replace(static, name="static"), replace(start, name="planned at start"))
    }
    fixed += runs.values()
    fastest = min(fixed, key=lambda use: use.total_s)
    each_s = sum(min(use.phase_s[index] for use in fixed) for index in range(len(bounds)))
    followed = _use(elastic, bounds)
    return DriftComparison(
        num_steps=num_steps,
        seed=seed,
        static=runs["static"],
        start=runs["planned at start"],
        elastic=followed,
        best=fastest,
        best_of_each_s=each_s,
        regret_fraction=followed.total_s / fastest.total_s - 1,
        regret_of_each_fraction=followed.total_s / each_s - 1,
        num_changes=len(bounds) - 1,
        num_switches=sum(bool(it.switch_kind) for it in decided),
        decided=decided,
    )


def _elastic(
    start: Scenario,
    config: RunConfig,
    lengths: DriftingLengths,
    *,
    num_steps: int,
    seed: int,
    times: SwitchTimes,
) -> tuple[SimulationResult, tuple[Decided, ...]]:
    following = _following(config)
    steward = ReplanningSteward(
        Replanner(following, num_gpus=start.num_gpus, book=book_of(*described(config))),
        num_steps=num_steps,
        times=times,
    )
    scenario = replace(
        start,
        name="elastic",
        config=_following(start.config),
        more_degrees=frozenset(rollout_degrees(config)),
    )
    result = simulate(scenario, lengths, num_steps=num_steps, seed=seed, steward=steward)
    return result, tuple(steward.decided)


def _following(config: RunConfig) -> RunConfig:
    planner = config.global_resource_planner
    if planner.runtime_dynamic_reconfiguration_enabled:
        return config
    everything = replace(
        planner,
        runtime_dynamic_reconfiguration_enabled=True,
        runtime_online_replanning=True,
        runtime_reconfigure_training=True,
    )
    return replace(config, global_resource_planner=everything)


def _splits(
    config: RunConfig, lengths: DriftingLengths, phases: Sequence[Phase]
) -> Iterator[Scenario]:
    """Every split with the planner's layouts for each phase, each only once."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    granularity = config.global_resource_planner.allocation_granularity_gpus
    num_gpus = config.training.train_gpus + config.rollout.rollout_gpus
    for phase in phases:
        demand = lengths.demand_of(phase, config)
        for train_gpus in range(granularity, num_gpus, granularity):
            try:
                scenario = split_of(config, demand, train_gpus=train_gpus)
            except InfeasiblePlanError:
                continue
            tps = tuple(instance.tp for instance in scenario.plan.instances)
            if (str(scenario.layout), tps) not in seen:
                seen.add((str(scenario.layout), tps))
                yield scenario


def _use(result: SimulationResult, bounds: Sequence[int]) -> Use:
    """Times of the steps that the phases begin with; the first phase has the filling in it."""
    freed_at = [0.0, *(step.freed_at for step in result.steps)]
    ends = [*bounds[1:], len(result.steps)]
    return Use(
        name=result.name,
        total_s=freed_at[-1],
        phase_s=tuple(
            freed_at[end] - freed_at[begin] for begin, end in zip(bounds, ends, strict=True)
        ),
        train=result.train,
        rollout=result.rollout,
    )
