"""Runs that go on without a node that they lost, and take it in again."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from netns_hosts import hosts
from node_runs import NodeRun
from wanted_plans import changes_in, plan_in

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


def test_a_run_shrinks_when_a_node_is_lost_and_grows_when_it_is_back(tmp_path):
    with hosts(3) as made:
        run = NodeRun(
            made, tmp_path, total_steps=1000, node_loss_policy="shrink", node_loss_patience_s=1
        )
        run.start_all()
        run.until_step(2)
        home = plan_in(run.run_dir)
        run.crash(1)
        del run.processes[1]
        run.until(lambda: len(changes_in(run.run_dir)) == 1, within_s=60)
        before = max(run.steps())
        run.until_step(before + 2)
        status = json.loads(run.call("status", "--json").stdout)
        assert status["nodes"][1]["state"] == "lost"
        assert status["nodes"][1]["detail"].endswith("the run goes on without it")
        assert "DP 2" in status["plan"]
        assert "vllm-3" not in {child["child"] for child in status["children"]}
        assert status["children"][0]["num_restarts"] == 1
        run.start(1)
        run.until(lambda: len(changes_in(run.run_dir)) == 3, within_s=60)
        before = max(run.steps())
        run.until_step(before + 2)
        assert plan_in(run.run_dir) == home
        assert run.state_of("vllm-3") in ("serving", "reloading")
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0, 2: 0}, run.said()
    found = [(it.cause, it.outcome, it.plan.train.dp) for it in changes_in(run.run_dir)]
    assert found == [("node_lost", "done", 2), ("node_back", "done", 2), ("node_back", "done", 4)]
    assert sorted(set(run.steps())) == list(range(1, 1 + max(run.steps())))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_megatron_goes_on_in_fewer_ranks_and_grows_back(tmp_path, quickstart):
    options = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    with hosts(3) as made:
        run = NodeRun(
            made,
            tmp_path,
            gpus=(3, 2),
            program=[sys.executable, "-m", "libra_supervisor.cli"],
            base=options,
            model_path=str(quickstart / "model"),
            train_data=str(quickstart / "train.jsonl"),
            total_steps=1000,
            save_interval=1,
            max_head_offpolicyness=0,
            node_lease_s=20,
            node_loss_policy="shrink",
            node_loss_patience_s=5,
        )
        run.start_all()
        run.until_step(2, within_s=900)
        home = plan_in(run.run_dir)
        assert home.train.nodes == (1, 2)
        run.crash(2)
        del run.processes[2]
        run.until(lambda: len(changes_in(run.run_dir)) == 1, within_s=400)
        before = max(run.steps())
        run.until_step(before + 2, within_s=400)
        run.start(2)
        run.until(lambda: len(changes_in(run.run_dir)) == 2, within_s=400)
        before = max(run.steps())
        run.until_step(before + 2, within_s=400)
        assert plan_in(run.run_dir) == home
        assert run.call("stop").returncode == 0
        assert run.wait_all(within_s=200) == {0: 0, 1: 0, 2: 0}, run.said()
    found = [(it.cause, it.outcome, it.plan.train.dp) for it in changes_in(run.run_dir)]
    assert found == [("node_lost", "done", 1), ("node_back", "done", 2)]
    assert sorted(set(run.steps())) == list(range(1, 1 + max(run.steps())))
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    # At staleness 0 the engines say of the weights what the trainer says, through both changes.
    assert max(json.loads(line)["kl_mismatch"] for line in lines) < 1e-3
