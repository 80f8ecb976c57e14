#!/usr/bin/env python3
"""Supervision beside supervisord, in one run on the same children; prints JSON.

    PYTHONPATH=.:supervisor scripts/bench/bench_supervision.py [--repeats 5]

* death: from SIGKILL of a child to the decision about its restart (Libra: ChildRestartScheduled;
  supervisord: the child's state leaves RUNNING or its pid changes, asked every millisecond).
* tree: from the order to stop to the end of a tree of three levels and 211 processes that ignore
  SIGTERM, with one second of grace; and how many processes are left. `hidden`: every process has
  its own session. supervisord runs with stopasgroup and killasgroup.
* rest: CPU seconds per minute with 64 quiet children (Libra: supervisor and relay together).
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import anyio
from supervisord_peer import cpu_s, supervisord

from libra.ids import ChildId, Incarnation, RunId
from libra_supervisor.events import ChildEvent, ChildReady, ChildRestartScheduled
from libra_supervisor.process.kernel import Linux, read_table
from libra_supervisor.process.lifecycle import ChildHooks, Deadlines
from libra_supervisor.process.logs import open_log_relay
from libra_supervisor.process.restart import RestartBudget, RestartPolicy
from libra_supervisor.process.spawn import LinuxSpawner, become_subreaper
from libra_supervisor.process.spec import ProcessSpec
from libra_supervisor.process.supervise import Supervision
from libra_supervisor.process.tree import StopDeadlines

TREE = Path(__file__).with_name("tree.sh")
QUIET = "sleep 600"
WIDTH, DEPTH, NUM_PROCESSES = 14, 2, 211
NUM_QUIET = 64
REST_S = 20.0
FOREVER = RestartPolicy(
    backoff_initial_s=0.01, backoff_max_s=0.02, max_in_window=10**6, max_without_progress=10**6
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    become_subreaper()
    results = {
        "death_ms": both(libra_death, supervisord_death, options.repeats),
        "tree": both(libra_tree(), supervisord_tree(), min(options.repeats, 3)),
        "hidden_tree": both(libra_tree("hidden"), supervisord_tree("hidden"), 1),
        "rest_cpu_s_per_minute": both(libra_rest, supervisord_rest, 1),
    }
    print(
        json.dumps(
            {"bench": "supervision", "num_cores": os.cpu_count(), "results": results}, indent=1
        )
    )


Measure = Callable[[Path, int], Any]


def both(libra: Measure, peer: Measure, repeats: int) -> dict[str, Any]:
    """Each measured in a fresh directory, one after the other."""
    found = {}
    for name, measure in (("libra", libra), ("supervisord", peer)):
        directory = Path(tempfile.mkdtemp(prefix="libra-bench-"))
        try:
            found[name] = measure(directory, repeats)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    return found


def summary_ms(times_s: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(times_s) * 1000, 1),
        "worst": round(max(times_s) * 1000, 1),
    }


def living(pids: list[int]) -> list[int]:
    table = read_table()
    return [pid for pid in pids if pid in table and not table[pid].is_dead]


def printed_pids(log: Path) -> list[int]:
    return [int(word) for word in log.read_text().split()] if log.exists() else []


# Libra


class Hooks(ChildHooks):
    def __init__(self, directory: Path, child_id: ChildId, argv: tuple[str, ...]) -> None:
        self._spec = ProcessSpec(
            child_id=child_id,
            run_id=RunId(directory.name),
            argv=argv,
            env=dict(os.environ),
            cwd="/",
            log_path=str(directory / "logs" / f"{child_id}.log"),
        )

    async def spec(self, incarnation: Incarnation) -> ProcessSpec:  # noqa: ARG002 - a fixed one
        return self._spec


class Libra:
    """A supervisor with a few children; `body` does the measuring."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[tuple[float, ChildEvent]] = []
        self.fleet: list[Supervision] = []

    async def post(self, event: ChildEvent) -> None:
        self.events.append((time.monotonic(), event))

    def times_of(self, kind: type[ChildEvent]) -> list[float]:
        return [at for at, event in self.events if isinstance(event, kind)]

    def run(self, argvs: list[tuple[str, ...]], body: "Body") -> Any:
        return anyio.run(self._run, argvs, body, backend_options={"use_uvloop": True})

    async def _run(self, argvs: list[tuple[str, ...]], body: "Body") -> Any:
        run_id = RunId(self.directory.name)
        async with (
            open_log_relay(
                self.directory, run_id=run_id, env=dict(os.environ), post=self.post
            ) as logs,
            anyio.create_task_group() as tasks,
        ):
            spawner = LinuxSpawner(run_id=run_id, logs=logs, kernel=Linux(), cgroups=None)
            for index, argv in enumerate(argvs):
                child_id = ChildId(f"child-{index}")
                supervision = Supervision(
                    child_id,
                    Hooks(self.directory, child_id, argv),
                    spawner=spawner,
                    budget=RestartBudget(FOREVER),
                    deadlines=Deadlines(stop=StopDeadlines(term_grace_s=1)),
                    post=self.post,
                    rng=Random(index),  # noqa: S311 - jitter
                )
                self.fleet.append(supervision)
                tasks.start_soon(supervision.run)
            while len(self.times_of(ChildReady)) < len(argvs):
                await anyio.sleep(0.01)
            result = await body(self)
            for supervision in self.fleet:
                supervision.stop()
            return result


Body = Callable[[Libra], Awaitable[Any]]


def libra_death(directory: Path, repeats: int) -> dict[str, float]:
    async def body(libra: Libra) -> dict[str, float]:
        times_s = []
        for k in range(repeats):
            await anyio.sleep(0.3)
            killed_at = time.monotonic()
            os.kill(libra.fleet[0].status().pid or 0, signal.SIGKILL)
            while len(libra.times_of(ChildReady)) < k + 2:
                await anyio.sleep(0.001)
            times_s.append(libra.times_of(ChildRestartScheduled)[k] - killed_at)
        return summary_ms(times_s)

    return Libra(directory).run([tuple(QUIET.split())], body)


def libra_tree(*modes: str) -> Measure:
    argv = ("/bin/sh", str(TREE), str(WIDTH), str(DEPTH), *modes)

    async def body(libra: Libra) -> dict[str, float]:
        log = libra.directory / "logs" / "child-0.log"
        while len(printed_pids(log)) < NUM_PROCESSES:
            await anyio.sleep(0.05)
        began_at = time.monotonic()
        libra.fleet[0].stop()
        await libra.fleet[0].until_down()
        return tree_figures(began_at, printed_pids(log))

    def measure(directory: Path, repeats: int) -> list[Any]:
        return [Libra(directory / str(k)).run([argv], body) for k in range(repeats)]

    return measure


def libra_rest(directory: Path, _repeats: int) -> float:
    async def body(_libra: Libra) -> float:
        pids = [os.getpid(), relay_pid()]
        await anyio.sleep(35)  # the looks at young trees are over
        used_s = sum(map(cpu_s, pids))
        await anyio.sleep(REST_S)
        return round((sum(map(cpu_s, pids)) - used_s) * 60 / REST_S, 2)

    return Libra(directory).run([tuple(QUIET.split())] * NUM_QUIET, body)


def relay_pid() -> int:
    for pid, row in read_table().items():
        is_ours = row.ppid == os.getpid() and not row.is_dead
        if is_ours and b"log_relay" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise RuntimeError("there is no relay")


def tree_figures(began_at: float, pids: list[int]) -> dict[str, float]:
    took_s = time.monotonic() - began_at
    left = living(pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return {"took_s": round(took_s, 2), "num_left": len(left)}


# supervisord


def supervisord_death(directory: Path, repeats: int) -> dict[str, float]:
    times_s = []
    with supervisord(directory, {"child": QUIET}, autostart=True) as peer:
        for _ in range(repeats):
            time.sleep(0.3)
            pid = peer.call("getProcessInfo", "child")["pid"]
            killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            while peer.call("getProcessInfo", "child")["pid"] == pid:
                time.sleep(0.001)
            times_s.append(time.monotonic() - killed_at)
    return summary_ms(times_s)


def supervisord_tree(*modes: str) -> Measure:
    command = " ".join(["/bin/sh", str(TREE), str(WIDTH), str(DEPTH), *modes])

    def once(directory: Path) -> dict[str, float]:
        directory.mkdir()
        with supervisord(directory, {"child": command}, autostart=True, stop_wait_s=1) as peer:
            while len(printed_pids(directory / "child.log")) < NUM_PROCESSES:
                time.sleep(0.05)
            began_at = time.monotonic()
            peer.call("stopProcess", "child", True)
            return tree_figures(began_at, printed_pids(directory / "child.log"))

    def measure(directory: Path, repeats: int) -> list[Any]:
        return [once(directory / str(k)) for k in range(repeats)]

    return measure


def supervisord_rest(directory: Path, _repeats: int) -> float:
    programs = {f"child-{k}": QUIET for k in range(NUM_QUIET)}
    with supervisord(directory, programs, autostart=True) as peer:
        time.sleep(3)
        used_s = cpu_s(peer.pid)
        time.sleep(REST_S)
        return round((cpu_s(peer.pid) - used_s) * 60 / REST_S, 2)


if __name__ == "__main__":
    main()
