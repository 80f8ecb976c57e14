"""A node whose supervisor stands still: nothing of it acts beyond its lease."""

import json
import signal
import time

import psutil
import pytest

from netns_hosts import hosts
from node_runs import NodeRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def test_ranks_end_with_the_lease_while_their_supervisor_stands_still(tmp_path):
    with hosts(2) as made:
        run = NodeRun(made, tmp_path, total_steps=1000, gpus=(2, 2))
        run.start_all()
        run.until_step(2)
        ranks = made.children(run.processes[1], "fake_trainer.py")
        assert ranks
        made.signal(run.processes[1], signal.SIGSTOP)
        run.until(lambda: not any(map(acts, ranks)), within_s=60)
        run.until(lambda: "node_lost" in run.said(), within_s=60)
        before = max(run.steps())
        made.signal(run.processes[1], signal.SIGCONT)
        run.until_step(before + 2)
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0}, run.said()


def test_a_stall_beyond_the_lease_costs_no_restart_and_keeps_no_stop_up(tmp_path):
    """Soon enough that the node does not count as lost yet; then while ranks are being started."""
    with hosts(2) as made:
        run = NodeRun(made, tmp_path, total_steps=1000, gpus=(2, 2))
        run.start_all()
        run.until_step(2)
        journal = run.run_dir / "journal.jsonl"

        def restarts():
            entries = map(json.loads, journal.read_text().splitlines()[:-1])
            return [it for it in entries if it["name"] == "ChildRestartScheduled"]

        for num_stalls in (1, 2):
            made.signal(run.processes[1], signal.SIGSTOP)
            time.sleep(4.5)
            made.signal(run.processes[1], signal.SIGCONT)
            run.until(lambda num=num_stalls: len(restarts()) >= num, within_s=60)
        assert {it["num_recent_restarts"] for it in restarts()} == {0}
        assert "its lease had ended" in run.said()
        run.until_step(max(run.steps()) + 2)
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0}, run.said()


def acts(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
