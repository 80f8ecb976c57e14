#!/usr/bin/env python3
"""The gateway beside vllm-router on the same engines in one run, as JSON.

    scripts/bench/bench_gateway.py [--router PATH/vllm-router] [--rounds 3] [--streams 8000]

latency: milliseconds that going through adds to p50 and p99, at 300 requests/s with 16 KB bodies;
direct, gateway and router take turns, and the median over the rounds is told.
large: requests/s with 220 KB bodies, 16 users.
streams: streams held open through one gateway process, with an event every 2 s each; `settled_s`
is how long after the last was opened each had had its first event.
Without --router only the gateway is measured. vllm-router 0.1.17 comes from PyPI; give it an
environment of its own.
"""

import argparse
import asyncio
import json
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import psutil
import uvloop
from http_load import Pool, closed_loop, completion_request, open_loop

HERE = Path(__file__).resolve().parent
RATE, LATENCY_S, SMALL_BYTES = 300.0, 4.0, 16_000
LARGE_BYTES, LARGE_USERS, LARGE_S = 220_000, 16, 3.0
STREAM_S, SETTLE_S = 6.0, 20.0


@contextmanager
def process(argv: list[str], *, tells_port: bool) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `argv` for the block, and end it."""
    running = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE if tells_port else subprocess.DEVNULL,
        stderr=None if tells_port else subprocess.DEVNULL,
        text=True,
    )
    try:
        yield running, int(running.stdout.readline()) if running.stdout else 0
    finally:
        running.kill()
        running.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def router_argv(path: str, port: int, engine_ports: list[int]) -> list[str]:
    urls = [f"http://127.0.0.1:{engine}" for engine in engine_ports]
    return [
        path, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls,
        "--policy", "power_of_two", "--prometheus-port", str(free_port()),
    ]  # fmt: skip


def wait_until_up(port: int) -> None:
    opener, end = build_opener(ProxyHandler({})), monotonic() + 60
    while monotonic() < end:
        try:
            opener.open(f"http://127.0.0.1:{port}/health", timeout=1).close()
        except (URLError, OSError):
            sleep(0.2)
        else:
            return
    raise SystemExit("the router did not come up within 60 s")


def quantile_ms(latencies: list[float], q: float) -> float:
    return latencies[int(q * (len(latencies) - 1))] * 1e3


async def latency(ports: dict[str, int], rounds: int) -> dict[str, object]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ports}
    for port in ports.values():  # connections and caches of a first second do not count
        await open_loop(port, completion_request(port, SMALL_BYTES), rate=RATE, duration_s=1.0)
    for _ in range(rounds):
        for name, port in ports.items():
            request = completion_request(port, SMALL_BYTES)
            seen = await open_loop(port, request, rate=RATE, duration_s=LATENCY_S)
            found[name].append((quantile_ms(seen, 0.5), quantile_ms(seen, 0.99)))
    medians = {
        name: (median(p50 for p50, _ in all_), median(p99 for _, p99 in all_))
        for name, all_ in found.items()
    }
    direct = medians["direct"]
    return {
        name: {
            "p50_ms": round(p50, 3),
            "p99_ms": round(p99, 3),
            "added_p50_ms": round(p50 - direct[0], 3),
            "added_p99_ms": round(p99 - direct[1], 3),
        }
        for name, (p50, p99) in medians.items()
    }


async def large(ports: dict[str, int], rounds: int) -> dict[str, object]:
    found: dict[str, list[float]] = {name: [] for name in ports}
    for _ in range(rounds):
        for name, port in ports.items():
            request = completion_request(port, LARGE_BYTES)
            found[name].append(
                await closed_loop(port, request, num_users=LARGE_USERS, duration_s=LARGE_S)
            )
    return {name: {"requests_per_s": round(median(all_), 1)} for name, all_ in found.items()}


async def streams(port: int, wanted: int, gateway: psutil.Process) -> dict[str, object]:
    # The gateway has two descriptors per stream, one for each side.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    possible = min(wanted, (limit - 200) // 2)
    pool, request = Pool(port), completion_request(port, 200, is_stream=True)
    connections = []
    for _ in range(possible):
        connection = await pool.connect()
        connection.start_stream(request)
        connections.append(connection)
        if len(connections) % 100 == 0:
            await asyncio.sleep(0.05)
    began = monotonic()
    while monotonic() < began + SETTLE_S and not all(c.num_events for c in connections):
        await asyncio.sleep(0.2)
    settled_s = monotonic() - began
    before, cpu = [c.num_events for c in connections], gateway.cpu_times()
    await asyncio.sleep(STREAM_S)
    after, later = [c.num_events for c in connections], gateway.cpu_times()
    alive = sum(b > a for a, b in zip(before, after, strict=True))
    used = (later.user + later.system) - (cpu.user + cpu.system)
    result = {
        "wanted": wanted,
        "opened": possible,
        "limited_by": f"RLIMIT_NOFILE {limit}" if possible < wanted else "",
        "settled_s": round(settled_s, 1),
        "got_events": alive,
        "events_per_s": round((sum(after) - sum(before)) / STREAM_S, 1),
        "gateway_cores": round(used / STREAM_S, 3),
        "gateway_rss_mb": round(gateway.memory_info().rss / 2**20, 1),
    }
    for connection in connections:
        connection.transport.close()
    await asyncio.sleep(1.0)
    return result


async def measure(
    ports: dict[str, int], gateway: psutil.Process, options: argparse.Namespace
) -> dict[str, object]:
    return {
        "latency": await latency(ports, options.rounds),
        "large": await large(ports, options.rounds),
        "streams": await streams(ports["gateway"], options.streams, gateway),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8000)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    began = monotonic()
    with ExitStack() as stack:
        argv = [sys.executable, str(HERE / "bench_engine.py")]
        engine_ports = [stack.enter_context(process(argv, tells_port=True))[1] for _ in range(2)]
        argv = [sys.executable, str(HERE / "gateway_process.py"), *map(str, engine_ports)]
        gateway, gateway_port = stack.enter_context(process(argv, tells_port=True))
        ports = {"direct": engine_ports[0], "gateway": gateway_port}
        if options.router:
            port = free_port()
            argv = router_argv(options.router, port, engine_ports)
            stack.enter_context(process(argv, tells_port=False))
            wait_until_up(port)
            ports["router"] = port
        found = uvloop.run(measure(ports, psutil.Process(gateway.pid), options))
    load = {"python": platform.python_version(), "load_average": psutil.getloadavg()[0]}
    print(json.dumps(load | found | {"wall_s": round(monotonic() - began, 1)}, indent=2))


if __name__ == "__main__":
    main()
