#!/usr/bin/env python3
"""CPU time of scheduling, and how even several schedulers are together, as JSON. Under 40 s.

    scripts/bench/bench_scheduler.py [--only hot_path,background,scrape,poll,herd] [--repeats 5]

hot_path: microseconds of CPU for one route and one complete, with feedback, affinity and shared
load on, 16 requests in flight per instance, groups of 8 siblings; median over repeats, and the
figure at 512 instances over that at 8.
background: what runs beside the requests, per event, and as a share of a core at the rates that it
runs at: a snapshot per instance every 3 s, an exchange with 7 other ranks at its own interval.
scrape: milliseconds of CPU to read one /metrics page of 57 KB.
poll: cores used by 512 pollers at 1 Hz, HTTP included, and the event loop's longest stall. The
server runs in another process.
herd: imbalance (max / mean in flight) of 8 schedulers over 64 instances in bursts, over one's.
"""

# ruff: noqa: S311 - made-up load needs no secrets

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic, process_time

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "supervisor"), str(ROOT / "tests/support")]

import anyio  # noqa: E402 - after the path is set
from metrics_page import page_of  # noqa: E402

from fleets import fleet_of  # noqa: E402
from herd import Herd, simulate  # noqa: E402
from libra import clock  # noqa: E402
from libra.ids import Incarnation, InstanceId, PromptId, RequestId  # noqa: E402
from libra.scheduling.load import LoadMetric, LoadSnapshot, OwnLoad, RemoteLoad  # noqa: E402
from libra.scheduling.request import Routed, RouteRequest  # noqa: E402
from libra.scheduling.scheduler import Scheduler  # noqa: E402
from libra.scheduling.shared_view import FORMAT, RankLoad, SharedView  # noqa: E402
from libra_supervisor.instances.client import InstanceClient  # noqa: E402
from libra_supervisor.instances.metrics import server_metrics  # noqa: E402
from libra_supervisor.instances.poller import InstancePoller  # noqa: E402
from libra_supervisor.shared_load.directory import SharedDirectory  # noqa: E402

METRICS: tuple[LoadMetric, ...] = ("requests", "tokens", "kv_tokens")
SIZES = (8, 64, 512)
PER_INSTANCE, GROUP, OPERATIONS = 16, 8, 4000
NOW = 1000.0
FIRST = Incarnation("first")


def loaded(num_instances: int, metric: LoadMetric) -> tuple[Scheduler, list[RouteRequest]]:
    """A scheduler with everything on and fresh snapshots and remote load everywhere."""
    scheduler = fleet_of(
        num_instances,
        load_metric=metric,
        kv_capacity_tokens_by_tp={1: 120_000},
        enable_metrics_feedback=True,
        prefix_affinity=True,
        max_in_flight_per_instance=1024,
    )
    scheduler.on_tick(NOW)
    rng = Random(num_instances)
    for index in range(num_instances):
        scheduler.on_snapshot(InstanceId(f"i{index}"), snapshot_of(rng, NOW), NOW)
    scheduler.on_remote_load(remote_of(rng, num_instances), NOW)
    requests = [
        RouteRequest(
            request_id=RequestId(str(k)),
            max_new_tokens=1024,
            num_prompt_tokens=100 + k * 37 % 400,
            prompt_id=PromptId(f"p{k // GROUP}"),
            category="rollout",
        )
        for k in range(num_instances * PER_INSTANCE + OPERATIONS)
    ]
    return scheduler, requests


def snapshot_of(rng: Random, now: float) -> LoadSnapshot:
    return LoadSnapshot(
        incarnation=FIRST,
        sampled_at=now,
        num_running=rng.randrange(10, 40),
        num_waiting=rng.randrange(4),
        num_waiting_for_capacity=0,
        kv_use_fraction=rng.uniform(0.2, 0.7),
        num_preemptions=0,
    )


def remote_of(rng: Random, num_instances: int) -> dict[tuple[InstanceId, Incarnation], RemoteLoad]:
    return {
        (InstanceId(f"i{k}"), FIRST): RemoteLoad(rng.randrange(100), rng.randrange(50_000))
        for k in range(num_instances)
    }


def place(scheduler: Scheduler, request: RouteRequest) -> Routed:
    decision = scheduler.route(request, NOW)
    if not isinstance(decision, Routed):
        raise TypeError(f"a request could not be placed: {decision}")
    return decision


def route_and_complete_us(num_instances: int, metric: LoadMetric) -> float:
    scheduler, requests = loaded(num_instances, metric)
    num_held = num_instances * PER_INSTANCE
    held = [place(scheduler, request).reservation for request in requests[:num_held]]
    rng = Random(7)
    picks = [rng.randrange(num_held) for _ in range(OPERATIONS)]
    fresh = requests[num_held:]
    began = process_time()
    for pick, request in zip(picks, fresh, strict=True):
        scheduler.complete(held[pick], 300, NOW)
        held[pick] = place(scheduler, request).reservation
    return (process_time() - began) / OPERATIONS * 1e6


def hot_path(repeats: int) -> dict[str, object]:
    table = {}
    for metric in METRICS:
        # The sizes take turns, so that a busy moment of the machine does not fall on one of them.
        rounds = [{n: route_and_complete_us(n, metric) for n in SIZES} for _ in range(repeats)]
        medians = {n: median(times[n] for times in rounds) for n in SIZES}
        table[metric] = {
            "us_by_instances": {str(n): round(value, 2) for n, value in medians.items()},
            "ratio_512_to_8": round(medians[512] / medians[8], 2),
        }
    return table


def per_call_s(do: Callable[[], object], num_calls: int, repeats: int) -> float:
    """Median CPU time of one call."""
    times = []
    for _ in range(repeats):
        began = process_time()
        for _ in range(num_calls):
            do()
        times.append((process_time() - began) / num_calls)
    return median(times)


def background(repeats: int) -> dict[str, object]:
    return {str(n): background_of(n, repeats) for n in SIZES}


def background_of(num_instances: int, repeats: int) -> dict[str, float]:
    scheduler, requests = loaded(num_instances, "kv_tokens")
    for request in requests[: num_instances * PER_INSTANCE]:
        place(scheduler, request)
    rng, now = Random(3), [NOW]

    def snapshot() -> None:
        now[0] += 0.001
        name = InstanceId(f"i{rng.randrange(num_instances)}")
        scheduler.on_snapshot(name, snapshot_of(rng, now[0]), now[0])

    with tempfile.TemporaryDirectory() as directory:
        ranks = [SharedDirectory(Path(directory), rank=str(k), writer="w") for k in range(8)]
        view = SharedView(own_rank="0", own_writer="w", ttl_s=30.0)
        sequence = [0]

        def write(rank: int) -> None:
            sequence[0] += 1
            load = tuple(
                OwnLoad(own.instance_id, own.incarnation, own.num_requests + rng.randrange(9), 9)
                for own in scheduler.own_load()
            )
            ranks[rank].write(
                RankLoad(
                    format=FORMAT, rank=str(rank), writer="w", sequence=sequence[0],
                    written_at_ns=0, load=load,
                )
            )  # fmt: skip

        def take_in() -> None:
            sequence[0] += 1
            view.on_read(changed(files, sequence[0]), now=NOW, wall_ns=0)
            scheduler.on_remote_load(view.remote_load(NOW), NOW)

        for rank in range(8):
            write(rank)
        files = ranks[0].read()
        snapshot_s = per_call_s(snapshot, 200, repeats)
        write_s = per_call_s(lambda: write(0), 20, repeats)
        read_s = per_call_s(ranks[0].read, 20, repeats)
        loop_s = per_call_s(take_in, 10, repeats)
    return {
        "snapshot_us": round(snapshot_s * 1e6, 1),
        "snapshots_core_share": round(snapshot_s * num_instances / 3.0, 4),
        "exchange_write_ms": round(write_s * 1e3, 3),
        "exchange_read_ms": round(read_s * 1e3, 3),
        "exchange_on_loop_ms": round(loop_s * 1e3, 3),
    }


def changed(files: dict[str, RankLoad], sequence: int) -> dict[str, RankLoad]:
    """The same ranks after each has placed something."""
    return {
        rank: RankLoad(
            format=FORMAT,
            rank=rank,
            writer=content.writer,
            sequence=sequence,
            written_at_ns=0,
            load=tuple(
                OwnLoad(e.instance_id, e.incarnation, e.num_requests + sequence % 7, e.num_tokens)
                for e in content.load
            ),
        )
        for rank, content in files.items()
    }


def scrape(repeats: int) -> dict[str, object]:
    page = page_of(57_000)
    seconds = per_call_s(
        lambda: server_metrics(page, incarnation=FIRST, sampled_at=NOW), 40, repeats
    )
    return {"page_bytes": len(page), "parse_ms": round(seconds * 1e3, 3)}


async def poll_many(url: str, num_instances: int, duration_s: float) -> dict[str, object]:
    looks, stalls = [0], [0.0]

    def count(polled: object) -> None:
        if polled.metrics is None:
            raise RuntimeError(polled.error)
        looks[0] += 1

    async def watch_stalls() -> None:
        while True:
            before = clock.now()
            await clock.sleep(0.005)
            stalls[0] = max(stalls[0], clock.now() - before - 0.005)

    async with AsyncExitStack() as stack, anyio.create_task_group() as tg:
        for index in range(num_instances):
            client = InstanceClient(InstanceId("i0"), url, token="")
            await stack.enter_async_context(client)
            poller = InstancePoller(
                client, FIRST, count, period_s=1.0, timeout_s=5.0, rng=Random(index)
            )
            tg.start_soon(poller.run)
        while looks[0] < 2 * num_instances:  # until every connection is made
            await clock.sleep(0.1)
        tg.start_soon(watch_stalls)
        looks[0], cpu, began = 0, process_time(), monotonic()
        await clock.sleep(duration_s)
        wall = monotonic() - began
        result = {
            "cores": round((process_time() - cpu) / wall, 3),
            "looks_per_s": round(looks[0] / wall, 1),
            "longest_stall_ms": round(stalls[0] * 1e3, 1),
        }
        tg.cancel_scope.cancel()
    return result


def poll(_repeats: int) -> dict[str, object]:
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("metrics_page.py"))],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port = int(server.stdout.readline())
        return anyio.run(
            poll_many, f"http://127.0.0.1:{port}", 512, 6.0, backend_options={"use_uvloop": True}
        )
    finally:
        server.kill()
        server.wait()


def herd(_repeats: int) -> dict[str, object]:
    shape = Herd(duration_s=10.0)
    found = {s: simulate(shape, s) for s in ("one scheduler", "shared load", "own view")}
    alone = found["one scheduler"].mean
    return {
        kind: {
            "mean": round(result.mean, 3),
            "p99": round(result.p99, 3),
            "over_one_scheduler": round(result.mean / alone, 3),
        }
        for kind, result in found.items()
    }


PARTS: dict[str, Callable[[int], dict[str, object]]] = {
    "hot_path": hot_path,
    "background": background,
    "scrape": scrape,
    "poll": poll,
    "herd": herd,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    began = monotonic()
    result: dict[str, object] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for name in options.only.split(","):
        result[name] = PARTS[name](options.repeats)
    result["wall_s"] = round(monotonic() - began, 1)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
