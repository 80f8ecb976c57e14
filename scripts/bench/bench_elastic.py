#!/usr/bin/env python3
"""What following a drifting load is worth, and what a change of the plan takes, as JSON.

    scripts/bench/bench_elastic.py --simulate [--seeds 1,2,3] [--steps-per-phase 40]
    scripts/bench/bench_elastic.py --measure [--lending | --last-server] [--device cuda]
                                   [--shape 0.5b] [--turns 3] [--keep DIR] [-o KEY=VALUE]...

`--simulate`, on virtual time: each scenario is a load on eight GPUs that jumps, ramps or stays.
`regret` is the total of the elastic run over that of the best plan that is kept, chosen in
hindsight among all splits; `regret_of_each` over the best plan of each phase, changed at once and
for nothing. Both are to stay below 0.1, and `switches` not above `real_changes`.

`--measure`, a real run with vLLM and Megatron: the quickstart's model and prompts on one core and
two servers. An operator's orders take it through a turn: a server leaves and joins, its slot goes
to a hybrid replica and back, the core grows, is cut otherwise and shrinks. Medians over turns of
the switch, its phases and stages, how long the trainer was held, and what the steps with the change
in them took beyond those before it. `--lending` leaves all out but the slot that goes to a replica
and back. `--device cuda` takes two GPUs: the core has the first, both
servers share the second.

`--last-server`: one core and one server, whose slot goes to a hybrid replica and back, and nothing
else. Before it is lent rollouts run ahead by `--lead` batches, on which the core and the replica
train while nothing serves. `stalled_step_s` is what the trainer stood still for in each direction:
held, or waiting for rollouts longer than usually; `waited_for_rollouts_in_s` says in which phase.
With `--device cuda` the core has the first GPU and the server the second.

`-o` of `global_resource_planner`: `runtime_lent_servers=sleep` has the server of the lent slot
sleep, `runtime_rollout_reconfigure_strategy=prewarm` has the replica come up first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/gpu")]

from elastic_job import (  # noqa: E402 - after the path is set
    LENDING,
    LENDING_OF_LAST_SERVER,
    TURN,
    Job,
    medians,
)
from main_job import gpus, make_model  # noqa: E402

from libra.config.load import load_config  # noqa: E402
from libra.simulate.drift import DriftingLengths, Phase  # noqa: E402
from libra.simulate.elastic import DriftComparison, compare_drift  # noqa: E402

KV_CACHE_BYTES = 4 * 2**30
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
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--simulate", action="store_true")
    what.add_argument("--measure", action="store_true")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps-per-phase", type=int, default=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=("tiny", "0.5b", "1.8b"), default="tiny")
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.add_mutually_exclusive_group()
    turns.add_argument("--lending", action="store_true")
    turns.add_argument("--last-server", action="store_true")
    parser.add_argument(
        "--lead", type=int, default=48, help="batches that rollouts are ahead of a last server lent"
    )
    parser.add_argument("--keep", type=Path, help="an empty directory for the run, which stays")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.measure:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured(options, options.keep or Path(folder)), indent=2))
        return
    seeds = [int(seed) for seed in options.seeds.split(",")]
    found = {
        name: scenario(phases, ramp, seeds, options.steps_per_phase)
        for name, (phases, ramp) in SCENARIOS.items()
    }
    print(json.dumps({"steps_per_phase": options.steps_per_phase, "scenarios": found}, indent=2))


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A real run, taken through its turns."""
    quickstart = folder / "quickstart"
    subprocess.run([sys.executable, ROOT / "scripts/make_quickstart.py", quickstart], check=True)
    model = quickstart / "model"
    first, second = gpus()[:2]
    if options.shape != "tiny":
        os.environ["CUDA_VISIBLE_DEVICES"] = first
        model = make_model(folder / "model", model, options.shape)
    given = list(options.overrides)
    if options.device == "cuda":
        # By slot: the servers come first. Two of them have a part of the second device each.
        servers = [second] if options.last_server else [second, second]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join((*servers, first))
        share = "0.5" if options.last_server else "0.25"
        # A size that is given, since a server that measures its own takes what its neighbour
        # allocates meanwhile for its own.
        memory = (f"gpu_memory_utilization={share}", f"rollout_kv_cache_bytes={KV_CACHE_BYTES}")
        given = ["train_dtype=bfloat16", *memory, *given]
    job = Job(
        folder,
        model=model,
        tokenizer=quickstart / "model",
        data=quickstart / "train.jsonl",
        options=[f"device={options.device}", *given],
        lead_batches=options.lead if options.last_server else 0,
    )
    try:
        turns = job.measure(orders_of(options), num_turns=options.turns)
    finally:
        job.end()
    return {
        "device": options.device,
        "shape": options.shape,
        "turns": options.turns,
        "lead_batches": options.lead if options.last_server else None,
        "options": given,
        "changes": {name: medians(found) for name, found in turns.items()},
        "switch_s_of_turns": {
            name: [round(it["switch_s"], 2) for it in found] for name, found in turns.items()
        },
    }


def orders_of(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """One turn."""
    if options.last_server:
        return LENDING_OF_LAST_SERVER
    return LENDING if options.lending else TURN


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
