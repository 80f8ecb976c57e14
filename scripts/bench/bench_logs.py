#!/usr/bin/env python3
"""Log throughput of Libra's relay beside supervisord, on the same input; prints JSON.

    PYTHONPATH=.:supervisor scripts/bench/bench_logs.py [--megabytes 1024] [--dir /dev/shm]

One child prints lines of 100 bytes as fast as its pipe takes them. Measured: MB/s until the last
byte is in the file, CPU seconds of the draining process per GB, and how long a question to the
supervising process waited at worst meanwhile (for Libra: the event loop's worst lag).
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import anyio
from supervisord_peer import Supervisord, cpu_s, supervisord

from libra.ids import ChildId, Incarnation, RunId
from libra_supervisor.events import ChildEvent
from libra_supervisor.process.kernel import Linux, read_table
from libra_supervisor.process.logs import LogPolicy, open_log_relay
from libra_supervisor.process.spawn import LinuxSpawner
from libra_supervisor.process.spec import ProcessSpec
from libra_supervisor.process.tree import StopDeadlines

FLOOD = """
import os, sys
block = (b"x" * 99 + b"\\n") * 655
for _ in range(int(sys.argv[1])):
    os.write(1, block)
import time
time.sleep(600)
"""
BLOCK_BYTES = 65_500
PROBE_S = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))  # noqa: S108 - no disk noise
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    num_blocks = options.megabytes * 1_000_000 // BLOCK_BYTES
    results: dict[str, list[dict[str, float]]] = {"libra": [], "supervisord": []}
    for _ in range(options.repeats):
        # Side by side in one run: machines are noisy.
        results["libra"].append(in_fresh_directory(options.dir, num_blocks, measure_libra))
        results["supervisord"].append(
            in_fresh_directory(options.dir, num_blocks, measure_supervisord)
        )
    best = {name: max(runs, key=lambda run: run["mb_per_s"]) for name, runs in results.items()}
    ratio = best["libra"]["mb_per_s"] / best["supervisord"]["mb_per_s"]
    print(
        json.dumps(
            {
                "bench": "logs",
                "megabytes": options.megabytes,
                "num_cores": os.cpu_count(),
                "best": best,
                "ratio_mb_per_s": round(ratio, 2),
                "runs": results,
            },
            indent=1,
        )
    )


def in_fresh_directory(parent, num_blocks, measure):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    directory = Path(tempfile.mkdtemp(prefix="libra-bench-", dir=parent))
    try:
        return measure(directory, num_blocks)
    finally:
        shutil.rmtree(directory)


def figures(num_bytes: int, took_s: float, used_s: float, worst_stall_s: float) -> dict[str, float]:
    return {
        "mb_per_s": round(num_bytes / 1e6 / took_s, 1),
        "cpu_s_per_gb": round(used_s / (num_bytes / 1e9), 3),
        "worst_stall_ms": round(worst_stall_s * 1000, 1),
    }


def bytes_logged(directory: Path, name: str) -> int:
    paths = directory.glob(f"{name}.log*")
    return sum(path.stat().st_size for path in paths if not path.name.endswith(".index"))


# Libra


def measure_libra(directory: Path, num_blocks: int) -> dict[str, float]:
    return anyio.run(_measure_libra, directory, num_blocks, backend_options={"use_uvloop": True})


async def _measure_libra(directory: Path, num_blocks: int) -> dict[str, float]:
    async def post(event: ChildEvent) -> None:
        raise RuntimeError(f"bytes were lost: {event}")

    run_id, child_id = RunId(directory.name), ChildId("flood")
    lags: list[float] = []
    policy = LogPolicy(max_bytes=256 * 2**20, num_kept=20)
    async with open_log_relay(
        directory, run_id=run_id, env=dict(os.environ), post=post, policy=policy
    ) as logs:
        spawner = LinuxSpawner(run_id=run_id, logs=logs, kernel=Linux(), cgroups=None)
        spec = ProcessSpec(
            child_id=child_id,
            run_id=run_id,
            argv=(sys.executable, "-S", "-c", FLOOD, str(num_blocks)),
            env=dict(os.environ),
            cwd="/",
            log_path=str(directory / "logs" / "flood.log"),
        )
        relay_pid = _relay_pid()
        await logs.tail(child_id, 1)  # it has started now, as supervisord has
        num_bytes, used_s, began_at = num_blocks * BLOCK_BYTES, cpu_s(relay_pid), time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch_lag, lags)
            child = await spawner.spawn(spec, Incarnation("flood-1"))
            while bytes_logged(directory / "logs", "flood") < num_bytes:
                await anyio.sleep(0.01)
            took_s = time.monotonic() - began_at
            used_s = cpu_s(relay_pid) - used_s
            tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await child.tree.end(StopDeadlines(term_grace_s=0))
            child.reap()
    return figures(num_bytes, took_s, used_s, max(lags))


async def _watch_lag(lags: list[float]) -> None:
    while True:
        due_at = anyio.current_time() + PROBE_S
        await anyio.sleep_until(due_at)
        lags.append(anyio.current_time() - due_at)


def _relay_pid() -> int:
    for pid, row in read_table().items():
        if row.ppid == os.getpid() and not row.is_dead:
            return pid
    raise RuntimeError("there is no relay")


# supervisord


def measure_supervisord(directory: Path, num_blocks: int) -> dict[str, float]:
    script = directory / "flood.py"
    script.write_text(FLOOD)
    command = f"{sys.executable} -S {script} {num_blocks}"
    num_bytes = num_blocks * BLOCK_BYTES
    with supervisord(directory, {"flood": command}, autostart=False) as peer:
        used_s, began_at, stop = cpu_s(peer.pid), time.monotonic(), threading.Event()
        waits: list[float] = []
        prober = threading.Thread(target=_probe, args=(peer, waits, stop))
        peer.call("startProcess", "flood", False)
        prober.start()
        while bytes_logged(directory, "flood") < num_bytes:
            time.sleep(0.01)
        took_s = time.monotonic() - began_at
        used_s = cpu_s(peer.pid) - used_s
        stop.set()
        prober.join()
    return figures(num_bytes, took_s, used_s, max(waits))


def _probe(peer: Supervisord, waits: list[float], stop: threading.Event) -> None:
    while not stop.is_set():
        began_at = time.monotonic()
        peer.call("getPID")
        waits.append(time.monotonic() - began_at)
        time.sleep(PROBE_S)


if __name__ == "__main__":
    main()
