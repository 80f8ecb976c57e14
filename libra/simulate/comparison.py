"""One cluster used in several ways, on the same prompts."""

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from libra.config.run import RunConfig
from libra.errors import InfeasiblePlanError
from libra.planner.demand import Demand
from libra.simulate.lengths import LengthSource
from libra.simulate.result import SimulationResult
from libra.simulate.run import Scenario, simulate
from libra.simulate.scenarios import (
    colocated,
    mixed,
    planned,
    rollout_degrees,
    static_split,
)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Results in the order in which they are usually read, slowest idea first."""

    results: tuple[SimulationResult, ...]
    left_out: tuple[str, ...]
    """Scenarios that this cluster cannot run, each with its reason."""


def compare(
    config: RunConfig, demand: Demand, lengths: LengthSource, *, num_steps: int, seed: int
) -> Comparison:
    """Colocated, the even split with every TP degree, planned, and mixed TP degrees."""
    results, left_out = [], []
    for name, build in _builders(config, demand):
        try:
            scenario = build()
        except InfeasiblePlanError as exc:
            left_out.append(f"{name}: {str(exc).splitlines()[0]}")
            continue
        results.append(simulate(scenario, lengths, num_steps=num_steps, seed=seed))
    return Comparison(results=tuple(results), left_out=tuple(left_out))


def _builders(config: RunConfig, demand: Demand) -> Iterator[tuple[str, Callable[[], Scenario]]]:
    half = (config.training.train_gpus + config.rollout.rollout_gpus) // 2
    yield "colocated", partial(colocated, config, demand)
    for tp in rollout_degrees(config):
        build = partial(static_split, config, demand, train_gpus=half, tp=tp)
        yield f"static {half}, TP{tp}", build
    yield "planned", partial(planned, config, demand)
    for known in (False, True):
        yield "mixed TP", partial(mixed, config, demand, lengths_known=known)
