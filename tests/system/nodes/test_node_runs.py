"""Whole runs over hosts with addresses of their own: steps, crashes, cuts."""

import json
import os
import signal
import sys
import time

import psutil
import pytest

from fake_runs import SUPPORT
from netns_hosts import hosts
from node_runs import NodeRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


def test_a_run_over_three_hosts_from_its_first_step_to_its_last(tmp_path):
    with hosts(3) as made:
        run = NodeRun(made, tmp_path, total_steps=1000)
        run.start_all()
        run.until_step(2)
        answer = run.call("status", "--json")
        assert answer.returncode == 0, answer.stderr
        status = json.loads(answer.stdout)
        assert [(node["node"], node["state"]) for node in status["nodes"]] == [
            (0, "leads"), (1, "member"), (2, "member")
        ]  # fmt: skip
        assert {child["child"] for child in status["children"]} >= {"vllm-0", "vllm-3", "trainer"}
        assert f"node 1 ({made.addresses[1]}): member for" in run.call("status").stdout
        drained = run.call("drain", "--node", "1")
        assert (drained.returncode, drained.stdout) == (
            0, "drain of vllm-3 on node 1 begun\n"
        )  # fmt: skip
        run.until(lambda: run.state_of("vllm-3") == "draining", within_s=20)
        for node, said in ((2, "no rollout instance is on node 2"), (3, "nodes are 0 to 2")):
            refused = run.call("drain", "--node", str(node))
            assert (refused.returncode, said in refused.stderr) == (1, True)
        assert run.call("undrain", "--node", "1").returncode == 0
        run.until(lambda: run.state_of("vllm-3") != "draining", within_s=20)
        assert "vllm-3" in run.call("logs", "--child", "vllm-3").stdout
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0, 2: 0}, run.said()
        assert run.steps() == list(range(1, 1 + len(run.steps())))
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert [it["node"] for it in plan["instances"]] == [0, 0, 0, 1]
    assert plan["train"]["nodes"] == [1, 1, 2, 2]
    logs = {path.name for path in (run.run_dir / "logs").glob("*.log")}
    assert {"vllm-3.log", "trainer-1.log", "trainer-2.log"} <= logs


def test_the_crash_of_a_follower_costs_its_lease_and_no_step(tmp_path):
    with hosts(3) as made:
        run = NodeRun(made, tmp_path, total_steps=1000)
        run.start_all()
        run.until_step(2)
        run.crash(1)
        del run.processes[1]
        run.until(lambda: "node_lost" in run.said(), within_s=60)
        before = max(run.steps())
        run.start(1)
        run.until_step(before + 2)
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0, 2: 0}, run.said()
        assert sorted(set(run.steps())) == list(range(1, 1 + max(run.steps())))


def test_every_node_makes_trajectories_and_the_crash_of_one_costs_and_doubles_none(tmp_path):
    with hosts(3) as made:
        # The third host has neither servers nor ranks: it makes trajectories and nothing else.
        # What waits for the lease of a lost one must not be too stale by then.
        options = {"total_steps": 1000, "max_head_offpolicyness": 1000}
        run = NodeRun(made, tmp_path, gpus=(2, 2), **options)
        run.start_all("-o", "reward=slow_rewards:said")
        run.until(lambda: all(scored_on(run, rank) >= 4 for rank in (0, 1, 2)), within_s=120)
        run.until(lambda: in_progress(run)[2], within_s=60)
        run.crash(2)
        del run.processes[2]
        run.until(lambda: "samples_made_elsewhere" in run.said(), within_s=60)
        before = max(run.steps(), default=0)
        run.until_step(before + 2)
        before = scored_on(run, 2)
        run.start(2, "-o", "reward=slow_rewards:said")
        run.until(lambda: scored_on(run, 2) > before, within_s=60)
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0, 2: 0}, run.said()
        assert run.steps() == list(range(1, 1 + len(run.steps())))
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert [it["node"] for it in plan["instances"]] == [0, 0]
    assert plan["train"]["node"] == 1
    names = [it["trajectory_id"] for it in trained_on(run)]
    assert len(names) == 8 * len(run.steps())
    assert len(set(names)) == len(names)
    # Each by the first try of its prompt.
    assert {name.split("/")[2] for name in names} == {"a0"}
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["num_dropped"] == {}


def scored_on(run, rank):
    home = run.run_dir / "nodes" / str(rank) if rank else run.run_dir
    path = home / "logs" / "reward-0.log"
    return path.read_text().count("scored row-") if path.exists() else 0


def in_progress(run):
    """Trajectories by node."""
    answer = run.call("status", "--json")
    assert answer.returncode == 0, answer.stderr
    return [node["num_samples"] for node in json.loads(answer.stdout)["nodes"]]


def trained_on(run):
    paths = sorted((run.run_dir / "trajectories").glob("step_*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_a_leader_that_is_killed_and_started_again_goes_on_with_the_servers_of_all(tmp_path):
    with hosts(3) as made:
        run = NodeRun(made, tmp_path, total_steps=1000, is_fenced=True)
        run.start_all()
        run.until_step(2)
        server = made.children(run.processes[1], "fake_server.py")
        ranks = made.children(run.processes[1], "fake_trainer.py")
        run.crash(0)
        before = max(run.steps())
        run.start(0, "--resume")
        run.until_step(before + 2)
        # Every server is the one from before, and no rank is.
        assert made.children(run.processes[1], "fake_server.py") == server
        assert len(server) == 1
        assert not any(map(runs, ranks))
        for name in ("vllm-0", "vllm-3"):
            first, second = started_in(run.run_dir, name)
            assert (first["pid"], first["incarnation"]) == (second["pid"], second["incarnation"])
            assert second["is_adopted"]
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0, 2: 0}, run.said()
        assert sorted(set(run.steps())) == list(range(1, 1 + max(run.steps())))
        assert json.loads((run.run_dir / "term.json").read_text())["term"] == 2


def runs(process):
    """A zombie has ended, whether or not its parent has looked."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def started_in(run_dir, child):
    lines = (run_dir / "journal.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [it for it in entries if it["name"] == "ChildStarted" and it["child_id"] == child]


def test_stopping_one_node_saves_and_stops_the_run_on_all(tmp_path):
    with hosts(3) as made:
        run = NodeRun(made, tmp_path, total_steps=1000)
        run.start_all()
        run.until_step(2)
        made.signal(run.processes[2], signal.SIGTERM)
        assert run.wait_all() == {0: 0, 1: 0, 2: 0}, run.said()
        saved = sorted((run.run_dir / "checkpoints").glob("step_*"))
        assert saved


def test_what_does_not_fit_is_said_before_anything_starts(tmp_path):
    with hosts(2) as made:
        run = NodeRun(made, tmp_path, total_steps=1, gpus=(2, 2))
        done = run.call("run", str(run.config), "--node-rank", "0", *run.overrides)
        assert done.returncode == 5
        assert "need a secret" in done.stderr
        assert not run.run_dir.exists()


def test_a_follower_that_no_leader_comes_for_leaves(tmp_path):
    with hosts(2) as made:
        more = ("-o", "supervision.start_timeout_s=3", "-o", "node_orphan_grace_s=1")
        run = NodeRun(made, tmp_path, total_steps=1000, gpus=(2, 2))
        run.start(1, *more)
        assert run.wait_all(within_s=60) == {1: 5}
        assert "no leader has begun a run" in run.said()
        run.start(0, *more)
        run.start(1, *more)
        run.until_step(1)
        run.crash(0)
        del run.processes[0]
        assert run.wait_all(within_s=60) == {1: 5}
        assert "no leader for 3 s" in run.said()


def test_a_leader_that_was_replaced_ends_and_leaves_the_followers_to_the_other(tmp_path):
    with hosts(2) as made:
        run = NodeRun(made, tmp_path, total_steps=1000, gpus=(2, 2))
        run.start_all()
        run.until_step(1)
        # Another machine whose lock did not see ours.
        (run.run_dir / "term.json").write_text('{"term": 9, "leader": "another"}')
        assert run.processes.pop(0).wait(60) == 5
        assert "another leader (term 9) took over" in run.said()
        before = max(run.steps())
        run.start(0, "--resume")
        run.until_step(before + 1)
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0}, run.said()
        assert json.loads((run.run_dir / "term.json").read_text())["term"] == 10


def test_a_run_that_fails_takes_its_followers_along(tmp_path):
    with hosts(2) as made:
        run = NodeRun(made, tmp_path, total_steps=1000, gpus=(2, 2))
        more = ("-o", "supervision.restart_max_without_progress=1")
        run.start_all(*more)
        run.until_step(1)
        ended = {}
        while not ended:
            for server in made.children(run.processes[0], "fake_server.py"):
                server.kill()
            time.sleep(0.1)
            ended = {rank: it.poll() for rank, it in run.processes.items() if it.poll() is not None}
        assert {rank: it.wait(60) for rank, it in run.processes.items()} == {0: 4, 1: 4}


def test_a_step_of_slurm_says_who_takes_part_and_who_leads(tmp_path):
    with hosts(3) as made:
        run = NodeRun(made, tmp_path, total_steps=2, by_slurm=True)
        run.start_all()
        assert run.wait_all() == {0: 0, 1: 0, 2: 0}, run.said()
        assert run.steps() == [1, 2]
        instances = json.loads((run.run_dir / "plan.json").read_text())["instances"]
        assert [it["node"] for it in instances] == [0, 0, 0, 1]


@pytest.mark.long
@pytest.mark.case("R-B50")
def test_servers_and_ranks_wait_for_the_memory_of_their_devices_on_another_node(tmp_path):
    used = [tmp_path / f"used-{rank}.json" for rank in range(2)]
    driver = os.pathsep.join([str(SUPPORT / "fake_driver"), *filter(None, sys.path)])
    env_of = {
        rank: {"FAKE_NVML": str(path), "CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": driver}
        for rank, path in enumerate(used)
    }
    used[0].write_text("{}")
    used[1].write_text(json.dumps({"0": 80 * 2**30}))
    with hosts(2) as made:
        run = NodeRun(made, tmp_path, total_steps=1000, gpus=(3, 1), env_of=env_of)
        run.start_all("-o", "device=cuda")
        journal, waits = run.run_dir / "journal.jsonl", "GPU 0 of node 1: 80.0 of 100.0 GiB"
        run.until(lambda: journal.exists() and waits in journal.read_text(), within_s=60)
        assert run.state_of("vllm-2") == "waiting"
        assert run.steps() == []
        used[1].write_text("{}")
        run.until_step(1)
        assert run.state_of("vllm-2") != "waiting"
        # The gang, too, before its second start.
        used[1].write_text(json.dumps({"1": 50 * 2**30}))
        for rank in made.children(run.processes[1], "fake_trainer.py"):
            rank.kill()
        waits = '"trainer","reason":"waiting for GPU 1 of node 1: 50.0 of 100.0 GiB'
        run.until(lambda: waits in journal.read_text(), within_s=60)
        used[1].write_text("{}")
        run.until_step(max(run.steps()) + 2)
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0}, run.said()
