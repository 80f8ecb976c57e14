#!/usr/bin/env python3
"""The event loop while the supervisor watches many instances, as JSON. About 30 s.

    scripts/bench/bench_loop.py [--instances 512] [--seconds 20]

Every instance has its Engine, which polls /metrics and /health once a second, judges its health
and feeds the scheduler, as in a run; the control plane's own metrics page is read once a second.
The servers are one other process. Measured as /metrics tells it: by the product's own meter.
"""

# ruff: noqa: S311 - made-up load needs no secrets

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from random import Random
from time import monotonic, process_time, thread_time
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "supervisor"), str(ROOT / "tests/support")]

import anyio  # noqa: E402 - after the path is set
import msgspec  # noqa: E402

from fleets import FIRST, fleet_of  # noqa: E402
from libra import clock  # noqa: E402
from libra.config.run import RunConfig  # noqa: E402
from libra.ids import Incarnation, InstanceId, RunId, SlotId  # noqa: E402
from libra.planner.plan import InstancePlacement  # noqa: E402
from libra_supervisor.app.engine import Engine, EngineSite  # noqa: E402
from libra_supervisor.instances.serving_meter import ServingMeter  # noqa: E402
from libra_supervisor.loop.stall import PERIOD_S, StallMeter, measure_stalls  # noqa: E402
from libra_supervisor.run_directory import RunDirectory  # noqa: E402


class Child(msgspec.Struct):
    """What watching asks of a process."""

    incarnation: Incarnation


def config() -> RunConfig:
    scheduling = {"metrics_poll_interval_s": 1.0, "metrics_request_timeout_s": 5.0}
    options = {
        "model": {"model_path": "/m"},
        "heterogeneous_rollout": {"scheduling": scheduling},
    }
    return msgspec.convert(options, RunConfig)


class Busy:
    """The most CPU time that the loop's thread used between two looks, PERIOD_S apart if idle.

    What a stall would be on a machine that has a core to give; other load does not count.
    """

    longest_s = 0.0

    async def run(self) -> None:
        last = thread_time()
        while True:
            await clock.sleep(PERIOD_S)
            now = thread_time()
            self.longest_s, last = max(self.longest_s, now - last), now


async def watch(url: str, num_instances: int, duration_s: float) -> dict[str, Any]:
    scheduler = fleet_of(num_instances, enable_metrics_feedback=True)
    meter, run_config = StallMeter(), config()
    site = EngineSite(
        run_id=RunId("bench"),
        directory=RunDirectory(Path("/nowhere")),
        config=run_config,
        device="cpu",
        host="127.0.0.1",
        token="",
        token_file=Path("/nowhere/token"),
        env={},
        devices=("0",),
        meter=ServingMeter({InstanceId(f"i{k}"): 1 for k in range(num_instances)}),
    )
    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        for index in range(num_instances):
            instance_id = InstanceId(f"i{index}")
            engine = Engine(
                site,
                InstancePlacement(instance_id=instance_id, tp=1, slots=(SlotId(index),)),
                scheduler,
                port=0,
                served_directory=lambda: None,
                rng=Random(index),
            )
            await engine.take_over({"url": f"{url}/{instance_id}"})
            stack.push_async_callback(engine.close)
            tasks.start_soon(engine.until_stuck, Child(Incarnation(FIRST)))
        # Until every connection is made and every phase was met once.
        await clock.sleep(4.0)
        busy = Busy()
        tasks.start_soon(busy.run)
        tasks.start_soon(measure_stalls, meter)
        cpu, began = process_time(), monotonic()
        await clock.sleep(duration_s)
        cores = (process_time() - cpu) / (monotonic() - began)
        views = scheduler.instances(clock.now())
        ages = [max(view.signal_ages_s.values(), default=999.0) for view in views]
        result = {
            "cores": round(cores, 3),
            "longest_stall_ms": round(meter.longest_s(now=clock.now()) * 1e3, 1),
            "longest_busy_ms": round(busy.longest_s * 1e3, 1),
            "stalls": {bound: int(count) for bound, count in meter.buckets()},
            "oldest_snapshot_s": round(max(ages), 2),
        }
        tasks.cancel_scope.cancel()
    return result


@contextmanager
def serving() -> Iterator[str]:
    argv = [sys.executable, str(Path(__file__).with_name("metrics_page.py"))]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with serving() as url:
        found = anyio.run(
            watch,
            url,
            options.instances,
            options.seconds,
            backend_options={"use_uvloop": True},
        )
    print(
        json.dumps(
            {
                "bench": "loop",
                "num_instances": options.instances,
                "meter_period_ms": PERIOD_S * 1e3,
                "python": platform.python_version(),
                "num_cores": os.cpu_count(),
                "load": os.getloadavg()[0],
                "results": found,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
