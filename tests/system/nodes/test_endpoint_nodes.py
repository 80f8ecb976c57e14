"""Servers that somebody else runs, used by a run over several hosts."""

import json

import pytest

from netns_hosts import hosts
from node_runs import NodeRun
from operators_servers import RUN_ID, OperatorsServer

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(400)]


def test_all_hosts_ask_servers_of_others_of_which_one_is_replaced(tmp_path):
    with hosts(3) as made:
        servers = [OperatorsServer(tmp_path, index, host=made.addresses[0]) for index in (0, 1)]
        made.at_end += [server.stop for server in servers]
        run = NodeRun(
            made,
            tmp_path,
            gpus=(1, 4),
            total_steps=1000,
            run_id=RUN_ID,
            api={"api_token_file": str(servers[0].token_file)},
            global_resource_planner={"runtime_manage_rollout_processes": False},
        )
        endpoints = json.dumps([{"url": server.url, "tp": 1} for server in servers])
        for server in servers:
            server.start()
        run.start_all(
            *("-o", "heterogeneous_rollout.instances=[]"),
            *("-o", f"heterogeneous_rollout.endpoints={endpoints}"),
        )
        run.until_step(2)
        plan = json.loads((run.run_dir / "plan.json").read_text())
        # Only the ranks need places: two on each host, which is enough for the first two.
        assert plan["train"]["nodes"] == [0, 0, 1, 1]
        # The servers lie on no node of the run.
        assert run.call("drain", "--node", "0").returncode == 1
        servers[1].stop()
        run.until(lambda: run.state_of("vllm-1") != "serving", within_s=30)
        run.until_step(max(run.steps()) + 2)
        servers[1].start()
        run.until(lambda: run.state_of("vllm-1") == "serving", within_s=60)
        run.until_step(max(run.steps()) + 2)
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0, 2: 0}, run.said()
        assert [server.process.poll() for server in servers] == [None, None]
    assert run.steps() == list(range(1, 1 + len(run.steps())))
    for rank in (1, 2):
        log = run.run_dir / "nodes" / str(rank) / "logs" / "control.jsonl"
        said = [json.loads(line) for line in log.read_text().splitlines()]
        assert sum(it["num_trajectories"] for it in said if it["event"] == "part_let_go")
