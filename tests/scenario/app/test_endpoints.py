"""Servers that somebody else runs: used, reloaded in place, never started, ended or signalled."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from fake_runs import FakeRun
from processes import CHILDREN

pytestmark = pytest.mark.timeout(400)

RUN_ID = "others-1"


class OperatorsServer:
    """A fake server as its operator starts it, on an address that stays."""

    def __init__(self, folder, index, *, run_id=RUN_ID):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.token_file = folder / "token"
        self.token_file.write_text("the operator's secret")
        self.token_file.chmod(0o600)
        self._folder, self._index, self._run_id = folder, index, run_id
        self._num_started = 0
        self.process = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        self._num_started += 1
        path = os.pathsep.join(map(str, (CHILDREN.parents[2], CHILDREN.parents[2] / "supervisor")))
        mine = {
            "PYTHONPATH": os.pathsep.join((path, str(CHILDREN.parent))),
            "LIBRA_INSTANCE_ID": f"vllm-{self._index}",
            "LIBRA_INCARNATION": f"life-{self._index}-{self._num_started}",
            "LIBRA_RUN_ID": self._run_id,
            "LIBRA_WEIGHTS_DIR": str(self._folder / "run" / "weights"),
            "LIBRA_TOKEN_FILE": str(self.token_file),
        }
        argv = [sys.executable, str(CHILDREN / "fake_server.py"), "127.0.0.1", str(self.port)]
        self.process = subprocess.Popen(argv, env={**os.environ, **mine}, stdout=subprocess.DEVNULL)

    def stop(self):
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def servers(tmp_path):
    both = [OperatorsServer(tmp_path, index) for index in (0, 1)]
    yield both
    for server in both:
        server.stop()


@pytest.fixture
def run(tmp_path, servers):
    run = FakeRun(
        tmp_path,
        run_id=RUN_ID,
        api={"api_token_file": str(servers[0].token_file)},
        global_resource_planner={"runtime_manage_rollout_processes": False},
    )
    run.env["FAKE_STEP_S"] = "0.1"
    yield run
    run.end()


def start(run, servers, *arguments):
    endpoints = json.dumps([{"url": server.url, "tp": 1} for server in servers])
    run.start(
        *("-o", "heterogeneous_rollout.instances=[]"),
        *("-o", f"heterogeneous_rollout.endpoints={endpoints}"),
        *arguments,
    )


def engine(run, name):
    return next(it for it in run.status().get("children", ()) if it["child"] == name)


def test_their_servers_serve_every_version_and_outlive_the_run(run, servers):
    for server in servers:
        server.start()
    start(run, servers, "-o", "total_steps=3")
    assert run.wait(120) == 0, run.tail()
    assert run.steps() == [1, 2, 3]
    assert [server.process.poll() for server in servers] == [None, None]
    assert {it["child_id"] for it in run.journal("ChildStarted")} >= {"vllm-0", "vllm-1"}
    # The same processes as before go on with it, and nobody took them for leftovers.
    start(run, servers, "-o", "total_steps=5", "--resume")
    assert run.wait(120) == 0, run.tail()
    assert run.steps() == [1, 2, 3, 4, 5]
    assert [server.process.poll() for server in servers] == [None, None]
    assert not run.said("leftover_does_not_end")


def test_a_run_waits_for_servers_and_takes_up_those_that_come_back(run, servers):
    servers[0].start()
    start(run, servers)
    waiting = run.until(lambda: run.journal("ChildWaiting"))
    assert waiting[0]["child_id"] == "vllm-1"
    assert "no server of this run answers" in waiting[0]["reason"]
    assert servers[1].url in waiting[0]["reason"]
    servers[1].start()
    run.until_step(1)
    assert engine(run, "vllm-1")["pid"] is None
    servers[1].stop()
    run.until(lambda: engine(run, "vllm-1")["state"] != "serving")
    step = max(run.steps())
    run.until_step(step + 2)
    servers[1].start()
    run.until(lambda: engine(run, "vllm-1")["state"] == "serving")
    assert servers[0].process.poll() is None
    assert not run.journal("ChildGaveUp")


def test_a_supervisor_that_was_killed_finds_them_again(run, servers):
    for server in servers:
        server.start()
    start(run, servers)
    run.until_step(3)
    run.kill()
    start(run, servers, "--resume")
    step = max(run.steps())
    run.until_step(step + 2)
    assert [server.process.poll() for server in servers] == [None, None]


def test_what_would_need_to_start_or_end_a_server_is_refused(run, servers):
    for server in servers:
        server.start()
    start(run, servers)
    run.until_step(1)
    done = run.call("restart", "vllm-0")
    assert done.returncode == 1
    assert "run by somebody else" in done.stderr
    assert run.call("drain", "vllm-0").returncode == 0
    run.until(lambda: engine(run, "vllm-0")["state"] == "draining")
    assert run.call("undrain", "vllm-0").returncode == 0


def test_a_server_of_another_run_is_not_used(tmp_path, run, servers):
    stranger = OperatorsServer(tmp_path, 1, run_id="another")
    servers[0].start()
    stranger.start()
    try:
        start(run, [servers[0], stranger])
        waiting = run.until(lambda: run.journal("ChildWaiting"))
        assert "was started for run another" in waiting[-1]["reason"]
    finally:
        stranger.stop()
