"""Real child processes for tests: a spawner with its log relay, and questions about processes."""

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import anyio

from libra.ids import ChildId, Incarnation, RunId
from libra_supervisor.events import ChildEvent
from libra_supervisor.process.cgroup import CgroupRoot
from libra_supervisor.process.kernel import Linux, read_table
from libra_supervisor.process.logs import LogPolicy, LogRelay, open_log_relay
from libra_supervisor.process.spawn import LinuxSpawner
from libra_supervisor.process.spec import Limits, ProcessSpec
from libra_supervisor.process.tree import StopDeadlines, Tree

CHILDREN = Path(__file__).parent / "children"


class Site:
    """One supervisor's worth of process machinery in a temporary run directory."""

    def __init__(self, run_dir: Path, logs: LogRelay, cgroups: CgroupRoot | None) -> None:
        self.run_dir = run_dir
        self.run_id = run_id_of(run_dir)
        self.logs = logs
        self.kernel = Linux()
        self.spawner = LinuxSpawner(
            run_id=self.run_id, logs=logs, kernel=self.kernel, cgroups=cgroups
        )
        self.posted: list[ChildEvent] = []
        self.rng = Random(7)
        self.trees: list[Tree] = []

    async def post(self, event: ChildEvent) -> None:
        self.posted.append(event)

    def spec(self, *argv: str, child_id: str = "child", **changes) -> ProcessSpec:
        return spec_for(self.run_dir, *argv, child_id=child_id, **changes)

    async def spawn(self, *argv: str, **changes):
        spec = self.spec(*argv, **changes)
        child = await self.spawner.spawn(spec, Incarnation(f"{spec.child_id}-1"))
        self.trees.append(child.tree)
        return child


def run_id_of(run_dir: Path) -> RunId:
    return RunId(f"{run_dir.name}-{os.getpid()}")


def spec_for(run_dir: Path, *argv: str, child_id: str = "child", **changes) -> ProcessSpec:
    return ProcessSpec(
        child_id=ChildId(child_id),
        run_id=run_id_of(run_dir),
        argv=argv,
        env=changes.pop("env", {"PATH": os.environ["PATH"]}),
        cwd=changes.pop("cwd", str(run_dir)),
        log_path=str(run_dir / "logs" / f"{child_id}.log"),
        limits=changes.pop("limits", Limits()),
        **changes,
    )


def python(script: str, *arguments: str) -> tuple[str, ...]:
    """Argv that runs one of the scripts in tests/support/children."""
    return (sys.executable, "-S", str(CHILDREN / script), *arguments)


@asynccontextmanager
async def site(
    run_dir: Path, *, cgroups: CgroupRoot | None = None, policy: LogPolicy | None = None
) -> AsyncIterator[Site]:
    holder: list[Site] = []

    async def post(event: ChildEvent) -> None:
        await holder[0].post(event)

    async with open_log_relay(
        run_dir, run_id=run_id_of(run_dir), env=dict(os.environ), post=post, policy=policy
    ) as logs:
        holder.append(Site(run_dir, logs, cgroups))
        holder[0].taken_over = logs.children
        try:
            yield holder[0]
        finally:
            with anyio.CancelScope(shield=True):
                for tree in holder[0].trees:
                    await tree.end(StopDeadlines(term_grace_s=0, kill_wait_s=5))


def processes_tagged(run_id: str) -> list[int]:
    """Pids whose environment carries the run's tag, this process aside."""
    found = []
    for pid, row in read_table().items():
        if row.is_dead or pid == os.getpid():
            continue
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if f"LIBRA_RUN_ID={run_id}".encode() in environ.split(b"\0"):
            found.append(pid)
    return found


def alive(pids: Sequence[int]) -> list[int]:
    table = read_table()
    return [pid for pid in pids if pid in table and not table[pid].is_dead]


async def until(condition, *, within_s: float = 10.0):
    """Poll until the condition is true and return its value; fail loudly after `within_s`."""
    with anyio.fail_after(within_s):
        while not (value := condition()):
            await anyio.sleep(0.02)
    return value
