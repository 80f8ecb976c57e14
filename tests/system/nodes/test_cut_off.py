"""Followers whose leader cannot be reached when they, or the run, are to end."""

import signal

import pytest

from netns_hosts import hosts
from node_runs import NodeRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def test_a_node_that_is_cut_off_when_the_run_ends_ends_with_it(tmp_path):
    with hosts(3) as made:
        # The third host has neither servers nor ranks: the run goes on without it.
        run = NodeRun(made, tmp_path, total_steps=1000, gpus=(2, 2))
        run.start_all()
        run.until_step(2)
        made.cut(2)
        run.until(lambda: "node_lost" in run.said(), within_s=60)
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0, 2: 0}, run.said()
        assert "the run is over: " in (tmp_path / "node-2.out").read_text()


def test_a_node_that_is_stopped_while_it_is_cut_off_ends_with_its_lease(tmp_path):
    with hosts(3) as made:
        run = NodeRun(made, tmp_path, total_steps=1000, gpus=(2, 2))
        run.start_all()
        run.until_step(2)
        made.cut(2)
        made.signal(run.processes[2], signal.SIGTERM)
        assert run.processes.pop(2).wait(60) == 0
        said = (tmp_path / "node-2.out").read_text()
        assert "SIGTERM, and no leader to end the run with" in said
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0}, run.said()
