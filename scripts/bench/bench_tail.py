#!/usr/bin/env python3
"""The makespan of a burst on two unequal vLLM servers on CPU, by strategy, as JSON.

    scripts/bench/bench_tail.py [--turns 3]

64 samples of 100 to 240 tokens, 48 at a time, on one server with room for all and one whose KV
cache holds one or two of them; each server has one core. The strategies take turns, so that a busy
moment of the machine is no one's merit; the median and every turn are told, and how often the
servers preempted. Starting the servers takes a minute, and more on a busy machine.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "supervisor"), str(ROOT / "tests/support")]

import anyio  # noqa: E402 - after the path is set

from real_servers import RunFiles  # noqa: E402
from tail import STRATEGIES, Burst, burst, output_lengths, unequal_servers  # noqa: E402


async def measure(turns: int, root: Path) -> dict[str, list[Burst]]:
    found: dict[str, list[Burst]] = {name: [] for name in STRATEGIES}
    lengths = output_lengths()
    async with unequal_servers(RunFiles(root)) as servers:
        await burst(servers, output_lengths=lengths[:8], num_in_flight=8, seed=99)  # warms up
        for turn in range(turns):
            for name, options in STRATEGIES.items():
                one = await burst(servers, output_lengths=lengths, seed=1000 * turn, **options)
                found[name].append(one)
    return found


def summary(bursts: list[Burst]) -> dict[str, object]:
    return {
        "makespan_s": round(median(one.seconds for one in bursts), 2),
        "turns_s": [round(one.seconds, 2) for one in bursts],
        "num_samples": [one.num_samples for one in bursts],
        "num_preemptions": [one.num_preemptions for one in bursts],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = anyio.run(measure, options.turns, Path(directory) / "run")
    result: dict[str, object] = {
        "python": platform.python_version(),
        "load_average": [round(value, 1) for value in os.getloadavg()],
    }
    result |= {name: summary(bursts) for name, bursts in found.items()}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
