"""A follower's whole program, which is stopped: what it leaves, whenever the signals come."""

import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import anyio
import pytest

from fake_runs import write_config
from leaders_end import Leading, leading
from libra import clock
from libra.config.load import load_config
from libra.wire import node as wire
from libra_supervisor.app.following import Following
from libra_supervisor.app.recall import record_run_id
from libra_supervisor.nodes.site import Site
from libra_supervisor.run_directory import RunDirectory
from processes import CHILDREN, processes_tagged, python, run_id_of, spec_for, until

TOKEN = "a token of these nodes"
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


class Program:
    """The process of node 1, and its leader in ours."""

    def __init__(self, tmp_path, port):
        self.config = write_config(tmp_path, total_steps=1, node_lease_s=2)
        directory = RunDirectory(tmp_path / "run")
        directory.create()
        self.run_id = run_id_of(directory.root)
        record_run_id(directory, self.run_id)
        self.told = Following(
            site=Site(hosts=("127.0.0.1", "127.0.0.2"), port=port, rank=1),
            config=load_config(self.config, purpose="plan").config,
            environ={},
            directory=directory,
            token=TOKEN,
            devices=(),
        )

    def start(self):
        site, directory = self.told.site, self.told.directory.root
        said = {
            "hosts": site.hosts, "port": site.port, "rank": 1, "config": str(self.config),
            "run_dir": str(directory),
        }  # fmt: skip
        path = os.pathsep.join(p for p in sys.path if p)
        env = {**os.environ, "LIBRA_NODE_TOKEN": TOKEN, "PYTHONPATH": path}
        argv = [sys.executable, str(CHILDREN / "follower_node.py"), json.dumps(said)]
        with (directory / "follower.out").open("wb") as out:
            self.process = subprocess.Popen(argv, env=env, stdout=out, stderr=out)

    async def stop_twice(self):
        self.process.send_signal(signal.SIGTERM)
        await clock.sleep(0.1)
        self.process.send_signal(signal.SIGTERM)

    async def left(self):
        """The exit code; nothing of the run is there any more."""
        code = await until(lambda: self.process.poll() is not None and [self.process.poll()])
        assert processes_tagged(self.run_id) == []
        return code[0]

    def text(self):
        return (self.told.directory.root / "follower.out").read_text()


@asynccontextmanager
async def program(tmp_path, free_ports):
    it = Program(tmp_path, free_ports(1))
    async with leading(it.told, run_id=it.run_id) as leader, anyio.create_task_group() as tasks:
        it.leader = leader
        it.start()
        try:
            yield it
        finally:
            it.process.kill()
            it.process.wait()
        tasks.cancel_scope.cancel()


async def let_go_when_asked(leader: Leading):
    await leader.until(lambda it: it.said, within_s=60)
    leader.end.tell(1, wire.Leave(0, "stopped"))


MOMENTS = {
    "its program loads": lambda it: it.process.pid,
    "it has begun its first child": lambda it: processes_tagged(it.run_id),
    "it has joined": lambda it: it.leader.news,
}


@pytest.mark.case("R-B54")
@pytest.mark.parametrize("moment", MOMENTS)
async def test_two_signals_at_any_moment_of_its_start_leave_nothing(tmp_path, free_ports, moment):
    async with program(tmp_path, free_ports) as it, anyio.create_task_group() as tasks:
        tasks.start_soon(let_go_when_asked, it.leader)
        await until(lambda: MOMENTS[moment](it))
        await it.stop_twice()
        # Before Python listens to signals there is nothing to be ended.
        codes = (0, -signal.SIGTERM) if moment == "its program loads" else (0,)
        assert await it.left() in codes, it.text()
        tasks.cancel_scope.cancel()


@pytest.mark.case("R-B54")
@pytest.mark.parametrize("answers", [True, False])
async def test_what_runs_there_ends_with_it_when_it_is_stopped_twice(tmp_path, free_ports, answers):
    async with program(tmp_path, free_ports) as it:
        leader = it.leader
        await leader.until_joined()
        leader.end.tell(1, wire.KeepOnly(()))
        leader.end.tell(1, server_of(it.told.directory.root))
        await leader.until(lambda leader: leader.said)
        await until(lambda: len(processes_tagged(it.run_id)) >= 4)
        await it.stop_twice()
        await leader.until(lambda leader: len(leader.said) == 3)
        asked = [wire.StopAsked("SIGTERM on node 1", in_hurry=hurry) for hurry in (False, True)]
        assert leader.said[1:] == asked
        if answers:
            leader.end.tell(1, wire.Leave(0, "stopped"))
        else:
            it.process.send_signal(signal.SIGTERM)
        assert await it.left() == 0, it.text()


def server_of(run_dir):
    spec = spec_for(run_dir, *python("tree.py", "1", "2", "setsid", "orphan"), child_id="vllm-0")
    return wire.Start(
        call=1, child_id=spec.child_id, incarnation="vllm-0-1", argv=spec.argv, env=spec.env,
        cwd=spec.cwd, log_path=spec.log_path, cpu_cores=(), is_bound=False,
    )  # fmt: skip
