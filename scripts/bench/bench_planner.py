#!/usr/bin/env python3
"""Time and quality of the planner on one core, as JSON. Default cases take under a minute.

    scripts/bench/bench_planner.py [--cases 48x4096,128x8192,1024x65536] [--repeats 3]

`layout_s` is the exact rollout layout alone, `plan_s` the whole plan of Qwen3-14B on 80 GB GPUs,
`plan_by_length_s` the same with lengths known, so that every split is laid out exactly.
`homogeneous_ratio` is the best layout with one TP degree over the mixed one, by predicted makespan.
`quality` compares with an independent exact search (memoised over requests and GPUs) at a size
where that is affordable: 1.0 is exact.
"""

import argparse
import json
import platform
import sys
from functools import cache
from pathlib import Path
from statistics import median
from time import process_time

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]
# Deep recursion of the memoised peer: one frame per instance.
sys.setrecursionlimit(10_000)

from libra.config.load import load_config  # noqa: E402 - after the path is set
from libra.config.run import RunConfig  # noqa: E402
from libra.planner.calibration import Calibration  # noqa: E402
from libra.planner.cost_models import cost_models  # noqa: E402
from libra.planner.demand import prior_demand  # noqa: E402
from libra.planner.layout import best_layout  # noqa: E402
from libra.planner.rollout_cost import (  # noqa: E402
    InstanceCost,
    Workload,
    block_seconds,
    workload_of,
)
from libra.planner.search import plan  # noqa: E402

DEGREES = (1, 2, 4, 8)
PEER_GPUS, PEER_REQUESTS = 12, 48


def main() -> None:
    """Run every case and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default="48x4096,128x8192,1024x65536")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    cases = [tuple(map(int, case.split("x"))) for case in options.cases.split(",")]
    result = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "clock": "process CPU time, seconds, median",
        "cases": [measure(*case, options.repeats) for case in cases],
        "quality": quality(),
    }
    print(json.dumps(result, indent=2))


def measure(num_gpus: int, num_requests: int, repeats: int) -> dict[str, float]:
    """Times of one size."""
    config = config_of(num_gpus, num_requests)
    costs, work = problem(config)
    # The rollout half of the budget, as in a balanced split.
    rollout_gpus = num_gpus // 2
    layout_s, layout = timed(lambda: best_layout(costs, work, num_gpus=num_gpus), repeats)
    plan_s, report = timed(lambda: plan(config), repeats)
    plan_by_length_s, _ = timed(lambda: plan(config, lengths_known=True), repeats)
    mixed = best_layout(costs, work, num_gpus=rollout_gpus).makespan_s
    alone = min(
        best_layout([cost], work, num_gpus=rollout_gpus, tolerance=1e-4).makespan_s
        for cost in costs
    )
    return {
        "num_gpus": num_gpus,
        "num_requests": num_requests,
        "layout_s": layout_s,
        "num_instances": len(layout.blocks),
        "plan_s": plan_s,
        "plan_by_length_s": plan_by_length_s,
        "num_pruned": len(report.pruned),
        "homogeneous_ratio": round(alone / mixed, 4),
    }


def config_of(num_gpus: int, num_requests: int) -> RunConfig:
    """The shipped 48-GPU configuration at another size."""
    path = ROOT / "configs" / "qwen3_14b_48gpu.yaml"
    loaded = load_config(
        path,
        overrides=(
            f"hardware.nodes={-(-num_gpus // 8)}",
            f"train_gpus={num_gpus // 2}",
            f"rollout_gpus={num_gpus - num_gpus // 2}",
            f"batch_size={num_requests}",
            f"mini_batch_size={num_requests}",
            f"max_concurrent_rollouts={num_requests}",
        ),
        purpose="plan",
    )
    return loaded.config


def problem(config: RunConfig) -> tuple[list[InstanceCost], Workload]:
    """Instance costs and requests of one step."""
    models = cost_models(config, Calibration(hardware="", model=""))
    return [models.instance.cost(tp) for tp in DEGREES], workload_of(prior_demand(config))


def timed(run, repeats: int):  # noqa: ANN001, ANN201 - any callable and its result
    """(median seconds, last result) of `repeats` calls."""
    seconds, result = [], None
    for _ in range(repeats):
        began = process_time()
        result = run()
        seconds.append(process_time() - began)
    return round(median(seconds), 4), result


def quality() -> dict[str, float]:
    """Makespan over that of a memoised search of every cut and every degree."""
    costs, work = problem(config_of(48, PEER_REQUESTS))

    @cache
    def least(begin: int, gpus: int) -> float:
        if begin == len(work):
            return 0.0
        return min(
            (
                max(block_seconds(cost, work, begin, end), least(end, gpus - cost.tp))
                for cost in costs
                if cost.tp <= gpus
                for end in range(begin + 1, len(work) + 1)
            ),
            default=float("inf"),
        )

    peer_s, exact = timed(lambda: least(0, PEER_GPUS), 1)
    own_s, layout = timed(lambda: best_layout(costs, work, num_gpus=PEER_GPUS), 3)
    return {
        "num_gpus": PEER_GPUS,
        "num_requests": PEER_REQUESTS,
        "ratio_to_exact": layout.makespan_s / exact,
        "peer_s": peer_s,
        "own_s": own_s,
    }


if __name__ == "__main__":
    main()
