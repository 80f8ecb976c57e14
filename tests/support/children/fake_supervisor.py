"""A small libra-supervisor: two children that hide descendants, adoption, sd_notify.

    fake_supervisor.py RUN_DIR SLOW_START_S

The first start takes SLOW_START_S. SIGTERM: stop everything, exit 0. SIGUSR1: stall the event
loop. SIGUSR2: stop, exit 3.
"""

import os
import signal
import sys
import time
from pathlib import Path
from random import Random

import anyio

from libra.ids import ChildId, RunId
from libra_supervisor.events import ChildExited, ChildReady, ChildStarted
from libra_supervisor.journal import ChildRecord, StateFile, SupervisorState
from libra_supervisor.notify import Notifier
from libra_supervisor.process.cgroup import delegated_root
from libra_supervisor.process.identity import ProcessIdentity, boot_id
from libra_supervisor.process.kernel import Linux
from libra_supervisor.process.lifecycle import Adoptee, ChildHooks, Deadlines
from libra_supervisor.process.logs import open_log_relay
from libra_supervisor.process.restart import RestartBudget, RestartPolicy
from libra_supervisor.process.spawn import LinuxSpawner, become_subreaper
from libra_supervisor.process.spec import ProcessSpec
from libra_supervisor.process.supervise import Supervision
from libra_supervisor.process.tree import StopDeadlines
from libra_supervisor.run_directory import RunDirectory, held

CHILDREN = (ChildId("vllm-0"), ChildId("vllm-1"))
TREE = Path(__file__).with_name("tree.py")


class Hooks(ChildHooks):
    def __init__(self, child_id, directory, run_id):
        self.child_id, self.directory, self.run_id = child_id, directory, run_id

    async def spec(self, incarnation):
        return ProcessSpec(
            child_id=self.child_id,
            run_id=self.run_id,
            argv=(sys.executable, "-S", str(TREE), "1", "1", "ignore", "setsid", "orphan"),
            env=dict(os.environ),
            cwd="/",
            log_path=str(self.directory.log_of(self.child_id)),
        )


async def main(root, slow_start_s):
    directory = RunDirectory(root)
    directory.create()
    with held(directory):
        raise SystemExit(await run(directory, slow_start_s))


async def run(directory, slow_start_s):
    file = StateFile(directory.state)
    old = file.load()
    records = {record.child_id: record for record in old.children} if old is not None else {}
    run_id = old.run_id if old is not None else RunId(f"fake-{os.getpid()}")
    notifier = Notifier.from_environment(os.environ)
    become_subreaper()

    def save():
        state = SupervisorState(
            run_id=run_id,
            written_at_ns=0,
            supervisor_pid=os.getpid(),
            children=tuple(records.values()),
        )
        file.save(state)

    async def post(event):
        print(event, flush=True)
        if isinstance(event, ChildStarted):
            records[event.child_id] = ChildRecord(
                child_id=event.child_id,
                incarnation=event.incarnation,
                pid=event.pid,
                start_ticks=event.start_ticks,
                boot_id=boot_id(),
            )
        elif isinstance(event, ChildExited):
            records.pop(event.child_id, None)
        elif not isinstance(event, ChildReady):
            return
        save()

    adoptable = {
        child_id: Adoptee(
            identity=ProcessIdentity(r.pid, r.start_ticks, r.boot_id), incarnation=r.incarnation
        )
        for child_id, r in records.items()
    }
    async with open_log_relay(directory.root, run_id=run_id, env=os.environ, post=post) as logs:
        spawner = LinuxSpawner(run_id=run_id, logs=logs, kernel=Linux(), cgroups=delegated_root())
        fleet = [
            Supervision(
                child_id,
                Hooks(child_id, directory, run_id),
                spawner=spawner,
                budget=RestartBudget(RestartPolicy()),
                deadlines=Deadlines(stop=StopDeadlines(term_grace_s=0.5)),
                post=post,
                rng=Random(),
            )
            for child_id in CHILDREN
        ]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(notifier.keep_alive)
            for child_id, supervision in zip(CHILDREN, fleet, strict=True):
                tasks.start_soon(supervision.run, adoptable.get(child_id))
            with anyio.open_signal_receiver(
                signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
            ) as signals:
                await start_slowly(notifier, slow_start_s if old is None else 0.0)
                notifier.ready("2 servers ready")
                exit_code = await obey(signals, notifier)
            for supervision in fleet:
                supervision.stop()
            for supervision in fleet:
                await supervision.until_down()
            tasks.cancel_scope.cancel()
    return exit_code


async def start_slowly(notifier, slow_start_s):
    until = time.monotonic() + slow_start_s
    while time.monotonic() < until:
        notifier.extend_start(8)
        notifier.status("loading models")
        await anyio.sleep(0.5)


async def obey(signals, notifier):
    async for signum in signals:
        if signum == signal.SIGUSR1:
            time.sleep(600)
        notifier.stopping("ending children")
        return 0 if signum == signal.SIGTERM else 3


anyio.run(main, Path(sys.argv[1]), float(sys.argv[2]), backend_options={"use_uvloop": True})
