"""A run as deciding sees it: lengths that drift, step times from the cost model with noise on top.

Nothing is served and nothing trained: a switch takes effect at once and costs `switch_s` of the
step that follows.
"""

from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from libra.config.model_arch import ModelArchConfig
from libra.config.run import RunConfig
from libra.planner.calibration import book_of
from libra.planner.cost_models import cost_models, described
from libra.planner.demand import Demand, num_batches_in_flight, observed_demand, prefill_share
from libra.planner.plan import Plan
from libra.planner.pricing import estimate_of, layout_of
from libra.planner.replan import Keep, Replanner, Switch
from libra.planner.replan_candidates import replica_gpus, with_replicas
from libra.planner.replan_observed import StepObserved
from libra.planner.search import plan as searched
from planner_cases import A100_80G, QWEN2_5_7B, grp_config


@dataclass(frozen=True)
class Load:
    """What responses and prompts are like for a while."""

    mean: float = 1000.0
    sigma: float = 0.8
    prompt: int = 256
    slowness: float = 1.0
    """Of every step, whatever the plan."""

    def lengths(self, rng: np.random.Generator, num: int, longest: int) -> list[tuple[int, int]]:
        location = np.log(self.mean) - self.sigma**2 / 2
        drawn = np.exp(location + self.sigma * rng.standard_normal(num)).round().clip(1, longest)
        return [(self.prompt, int(length)) for length in drawn]


def replan_config(*, arch: ModelArchConfig = QWEN2_5_7B, **planner: object) -> RunConfig:
    """One node of eight GPUs, where long prompts and long responses want different splits."""
    return grp_config(
        num_gpus=8,
        arch=arch,
        hardware=A100_80G,
        batch_size=240,
        max_new_tokens=16384,
        training={"mini_batch_size": 240},
        rollout={"max_head_offpolicyness": 1, "max_concurrent_rollouts": 480},
        planner={
            "allocation_granularity_gpus": 1,
            "prior_response_mean_tokens": 1000,
            "runtime_dynamic_reconfiguration_enabled": True,
            "runtime_online_replanning": True,
            **planner,
        },
    )


def step_seconds_of(config: RunConfig, plan: Plan, demand: Demand) -> float:
    """What the cost model says of one step of a plan with its replicas."""
    core = layout_of(plan.train, micro_batch_size=config.training.micro_batch_size)
    train = with_replicas(core, len(plan.hybrids), replica_gpus(core))
    tps = sorted((instance.tp for instance in plan.instances), reverse=True)
    models = cost_models(config, book_of(*described(config)))
    return estimate_of(config, demand, models, train=train, tps=tps).step_s


@dataclass
class World:
    """One run; `switches` are what was decided and done, with their steps."""

    config: RunConfig
    plan: Plan
    seed: int = 1
    noise: float = 0.05
    switch_s: float = 20.0
    fails: bool = False
    """Every change of the plan is rolled back."""

    decides_itself: bool = True
    """Looks at the plan when there is reason to, not only when asked."""

    now: float = 0.0
    step: int = 0
    total_steps: float = float("inf")
    switches: list[tuple[int, Switch]] = field(default_factory=list)
    verdicts: list[tuple[int, Keep | Switch]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        num_gpus = self.config.training.train_gpus + self.config.rollout.rollout_gpus
        self.replanner = Replanner(
            self.config, num_gpus=num_gpus, book=book_of(*described(self.config))
        )
        self.pending_s = 0.0

    @classmethod
    def planned(cls, config: RunConfig, load: Load, **rest) -> "World":
        """The run begins with the planner's choice for `load`."""
        rng = np.random.default_rng(0)
        lengths = load.lengths(rng, 8 * config.training.batch_size, config.rollout.max_new_tokens)
        report = searched(config, demand=observed_demand(config, lengths))
        return cls(config, report.plan, **rest)

    def run(self, load: Load, num_steps: int) -> None:
        for _ in range(num_steps):
            self.one_step(load)

    def one_step(self, load: Load) -> None:
        config = self.config
        lengths = load.lengths(self.rng, config.training.batch_size, config.rollout.max_new_tokens)
        demand = Demand(
            prompt_tokens=tuple(prompt for prompt, _ in lengths),
            response_tokens=tuple(response for _, response in lengths),
            source="one step",
            prefill_share=prefill_share(config),
            num_batches=num_batches_in_flight(config),
        )
        step_s = step_seconds_of(config, self.plan, demand)
        step_s *= load.slowness * float(np.exp(self.noise * self.rng.standard_normal()))
        step_s, self.pending_s = step_s + self.pending_s, 0.0
        self.now += step_s
        self.step += 1
        self.replanner.on_step(
            StepObserved(
                step=self.step,
                lengths=lengths,
                step_s=step_s,
                trainer_idle_fraction=float(self.rng.random()),
                rollout_idle_fraction=float(self.rng.random()),
                staleness_fraction=float(self.rng.random()),
            )
        )
        if self.decides_itself and self.replanner.due(self.now):
            self.decide()

    def decide(self, *, is_asked: bool = False) -> Keep | Switch:
        verdict = self.replanner.decide(
            self.plan, self.now, self.total_steps - self.step, is_asked=is_asked
        )
        self.verdicts.append((self.step, verdict))
        if isinstance(verdict, Switch):
            self.replanner.on_switch_begun(verdict)
            self.now += self.switch_s
            self.pending_s = self.switch_s
            if not self.fails:
                self.plan = replace(verdict.plan)
                self.switches.append((self.step, verdict))
            self.replanner.on_switched(self.switch_s, self.now, ok=not self.fails)
        return verdict
