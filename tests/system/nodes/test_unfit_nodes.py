"""Nodes that cannot do their part of a run, and how a run says so."""

import json
import sys
import time

import pytest

from netns_hosts import hosts
from node_runs import NodeRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

SQUATTER = """
import socket, sys, time
held = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("held", flush=True)
time.sleep(600)
"""


def test_a_node_that_lacks_something_ends_and_the_leader_s_status_says_what(tmp_path):
    base = 23_000
    with hosts(2) as made:
        out = tmp_path / "squatter.out"
        argv = [sys.executable, "-c", SQUATTER, made.addresses[1], str(base + 2)]
        made.run(1, argv, log=out, env={})
        while "held" not in out.read_text():
            time.sleep(0.05)
        run = NodeRun(made, tmp_path, total_steps=1000, gpus=(3, 1), rollout_port_base=base)
        run.start_all()
        lack = f"rollout_port_base: {made.addresses[1]}:{base + 2} is in use"
        assert run.processes.pop(1).wait(60) == 5
        assert lack in (tmp_path / "node-1.out").read_text()

        def detail():
            answer = run.call("status", "--json")
            assert answer.returncode == 0, answer.stderr
            return json.loads(answer.stdout)["nodes"][1]["detail"]

        run.until(lambda: lack in detail(), within_s=30)
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0}, run.said()
