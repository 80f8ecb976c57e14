#!/usr/bin/env python3
"""The published 48-GPU setting used in several ways, and the simulator's own speed, as JSON.

    scripts/bench/bench_simulate.py [--seeds 1,2,3] [--sigmas 0.8,1.2] [--steps 12] [--splits]
    scripts/bench/bench_simulate.py --scale [--steps 12]

Rates are response tokens/s per GPU; `ratio` is over `static 24+24, TP2`. `--splits` adds every
static split with every TP degree, to compare the planner's pick with the best of them. `--scale`
times one run of 1024 GPUs with 8192 trajectories a step instead.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

from libra.config.load import load_config  # noqa: E402 - after the path is set
from libra.config.run import RunConfig  # noqa: E402
from libra.simulate.comparison import compare  # noqa: E402
from libra.simulate.lengths import prior_lengths  # noqa: E402
from libra.simulate.result import SimulationResult  # noqa: E402
from libra.simulate.run import simulate  # noqa: E402
from libra.simulate.scenarios import planned, static_splits  # noqa: E402

CONFIG = ROOT / "configs" / "qwen3_14b_48gpu.yaml"
BASELINE = "static 24+24, TP2"


def main() -> None:
    """Run what was asked for and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--sigmas", default="0.8,1.2")
    parser.add_argument("--staleness", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--splits", action="store_true")
    parser.add_argument("--scale", action="store_true")
    options = parser.parse_args()
    if options.scale:
        print(json.dumps(scale(options.steps), indent=2))
        return
    seeds = [int(seed) for seed in options.seeds.split(",")]
    found = [setting(float(sigma), seeds, options) for sigma in options.sigmas.split(",")]
    print(json.dumps(found, indent=2))


def setting(sigma: float, seeds: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """All scenarios at one spread of lengths, means over seeds."""
    config = published(sigma, options.staleness)
    runs: dict[str, list[SimulationResult]] = {}
    for seed in seeds:
        lengths = prior_lengths(config, seed=seed, growth_per_step=0.0)
        demand = lengths.demand(config)
        comparison = compare(config, demand, lengths, num_steps=options.steps, seed=seed)
        results = list(comparison.results)
        if options.splits:
            known = {result.name for result in results}
            results += [
                simulate(scenario, lengths, num_steps=options.steps, seed=seed)
                for scenario in static_splits(config, demand)
                if scenario.name not in known
            ]
        for result in results:
            runs.setdefault(result.name, []).append(result)
    baseline = mean(result.tokens_per_gpu_s for result in runs[BASELINE])
    return {
        "sigma": sigma,
        "max_head_offpolicyness": options.staleness,
        "seeds": seeds,
        "num_steps": options.steps,
        "scenarios": {name: summary(results, baseline) for name, results in runs.items()},
    }


def summary(results: list[SimulationResult], baseline: float) -> dict[str, Any]:
    """Means over seeds, and the least and greatest rate."""
    rates = [result.tokens_per_gpu_s for result in results]
    return {
        "train": results[0].train,
        "rollout": results[0].rollout,
        "step_s": round(mean(result.step_s for result in results), 1),
        "tokens_per_gpu_s": round(mean(rates)),
        "range": [round(min(rates)), round(max(rates))],
        "ratio": round(mean(rates) / baseline, 3),
        "train_busy": round(mean(result.train_busy_fraction for result in results), 2),
        "stale_dropped": round(mean(result.num_stale_dropped for result in results)),
    }


def scale(num_steps: int) -> dict[str, Any]:
    """CPU seconds of a plan and a run on 1024 GPUs."""
    config = loaded(
        "hardware.nodes=128",
        "train_gpus=512",
        "rollout_gpus=512",
        "batch_size=8192",
        "mini_batch_size=2048",
        "max_concurrent_rollouts=16384",
    )
    lengths = prior_lengths(config, seed=1, growth_per_step=0.0)
    began = process_time()
    scenario = planned(config, lengths.demand(config))
    planned_at = process_time()
    result = simulate(scenario, lengths, num_steps=num_steps, seed=1)
    return {
        "num_gpus": result.num_gpus,
        "num_trajectories": sum(step.num_trajectories for step in result.steps),
        "num_instances": len(scenario.plan.instances),
        "plan_s": round(planned_at - began, 2),
        "simulate_s": round(process_time() - planned_at, 2),
        "virtual_s": round(result.steps[-1].freed_at),
    }


def published(sigma: float, staleness: float) -> RunConfig:
    """The 48-GPU configuration with another spread of lengths and staleness bound."""
    return loaded(
        f"global_resource_planner.prior_response_sigma={sigma}",
        f"max_head_offpolicyness={staleness}",
        f"max_concurrent_rollouts={768 * int(staleness + 1)}",
    )


def loaded(*overrides: str) -> RunConfig:
    """The shipped configuration with overrides."""
    return load_config(CONFIG, overrides=overrides, purpose="plan").config


if __name__ == "__main__":
    main()
