"""Servers that somebody else runs: used, reloaded in place, never started, ended or signalled."""

import json

import pytest

from fake_runs import FakeRun
from operators_servers import RUN_ID, OperatorsServer

pytestmark = pytest.mark.timeout(400)


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
