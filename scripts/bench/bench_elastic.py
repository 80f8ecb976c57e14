#!/usr/bin/env python3
"""What following a drifting load is worth, on virtual time, as JSON.

    scripts/bench/bench_elastic.py --simulate [--seeds 1,2,3] [--steps-per-phase 40]

Each scenario is a load on eight GPUs that jumps, ramps or stays. `regret` is the total of the
elastic run over that of the best plan that is kept, chosen in hindsight among all splits;
`regret_of_each` over the best plan of each phase, changed at once and for nothing. Both are to stay
below 0.1, and `switches` not above `real_changes`.
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
from libra.simulate.drift import DriftingLengths, Phase  # noqa: E402
from libra.simulate.elastic import DriftComparison, compare_drift  # noqa: E402

CONFIG = ROOT / "configs" / "qwen2_5_7b_8gpu.yaml"
READS = {"prompt_tokens": 12000, "response_mean_tokens": 400.0, "response_sigma": 0.6}
WRITES = {"prompt_tokens": 256, "response_mean_tokens": 4000.0, "response_sigma": 1.0}
SCENARIOS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "reads": ([READS], 0),
    "writes": ([WRITES], 0),
    "reads, then writes": ([READS, WRITES], 0),
    "writes, then reads": ([WRITES, READS], 0),
    "there and back again": ([READS, WRITES, READS], 0),
    "writes, slowly more reading": ([WRITES, READS], 20),
}
"""Phases, and the steps over which one goes over into the next."""


def main() -> None:
    """Run what was asked for and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--simulate", action="store_true", required=True)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps-per-phase", type=int, default=40)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    found = {
        name: scenario(phases, ramp, seeds, options.steps_per_phase)
        for name, (phases, ramp) in SCENARIOS.items()
    }
    print(json.dumps({"steps_per_phase": options.steps_per_phase, "scenarios": found}, indent=2))


def scenario(
    phases: list[dict[str, Any]], ramp: int, seeds: list[int], steps: int
) -> dict[str, Any]:
    """One load with every seed."""
    config = load_config(CONFIG, purpose="plan").config
    began = process_time()
    runs = []
    for seed in seeds:
        lengths = DriftingLengths(
            seed=seed,
            longest=config.rollout.max_new_tokens,
            phases=tuple(
                Phase(from_step=steps * index, ramp_steps=ramp if index else 0, **phase)
                for index, phase in enumerate(phases)
            ),
        )
        num_steps = steps * len(phases)
        runs.append(compare_drift(config, lengths, num_steps=num_steps, seed=seed))
    return summary(runs) | {"cpu_s": round(process_time() - began, 1)}


def summary(runs: list[DriftComparison]) -> dict[str, Any]:
    """Means over seeds; of regrets and switches every seed's."""
    return {
        "seeds": [run.seed for run in runs],
        "static_s": round(mean(run.static.total_s for run in runs)),
        "planned_at_start_s": round(mean(run.start.total_s for run in runs)),
        "elastic_s": round(mean(run.elastic.total_s for run in runs)),
        "best_kept_s": round(mean(run.best.total_s for run in runs)),
        "best_of_each_phase_s": round(mean(run.best_of_each_s for run in runs)),
        "regret": [round(run.regret_fraction, 3) for run in runs],
        "regret_of_each": [round(run.regret_of_each_fraction, 3) for run in runs],
        "real_changes": runs[0].num_changes,
        "switches": [run.num_switches for run in runs],
        "switched_at": [[it.step for it in run.decided if it.switch_kind] for run in runs],
        "looks": [len(run.decided) for run in runs],
    }


if __name__ == "__main__":
    main()
