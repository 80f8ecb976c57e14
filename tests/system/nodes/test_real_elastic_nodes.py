"""The whole job over three hosts with real parts: GPUs go from rollout to training and back."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from netns_hosts import hosts
from node_runs import NodeRun
from wanted_plans import changes_in

ROOT = Path(__file__).parents[3]
WITHIN_S = 900
pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(2400)]


def replanned(run, *words):
    before = len(changes_in(run.run_dir))
    answer = run.call("replan", *words)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    change = run.until(lambda: changes_in(run.run_dir)[before:], within_s=WITHIN_S)[0]
    assert change.outcome == "done", change
    run.until_step(max(run.steps()) + 2, within_s=WITHIN_S)
    return change


def test_a_host_s_slot_trains_for_a_while_and_serves_again(tmp_path, quickstart):
    options = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    with hosts(3) as made:
        run = NodeRun(
            made,
            tmp_path,
            gpus=(2, 1),
            program=[sys.executable, "-m", "libra_supervisor.cli"],
            base=options,
            model_path=str(quickstart / "model"),
            train_data=str(quickstart / "train.jsonl"),
            total_steps=1000,
            max_head_offpolicyness=0,
            node_lease_s=30,
            global_resource_planner={
                "runtime_dynamic_reconfiguration_enabled": True,
                "runtime_reconfigure_training": True,
                "runtime_reconfigure_timeout_s": float(WITHIN_S),
                "elastic_hybrid_min_rollout_gpus": 1,
            },
        )
        run.start_all()
        run.until_step(2, within_s=WITHIN_S)
        lent = replanned(run, "--instances", "1x1", "--hybrids", "1")
        (replica,) = lent.plan.hybrids
        # The core is on host 2: gradients and weights cross the network.
        assert (replica.node, lent.plan.train.node, lent.stopped) == (1, 2, ("vllm-1",))
        back = replanned(run, "--instances", "2x1", "--hybrids", "0")
        assert [it.node for it in back.plan.instances] == [0, 1]
        assert back.detached == (replica.replica_id,)
        assert run.call("stop").returncode == 0
        assert run.wait_all(within_s=200) == {0: 0, 1: 0, 2: 0}, run.said()
    steps = run.steps()
    assert steps == list(range(1, len(steps) + 1))
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    # At staleness 0 the engines say of the weights what the trainer says, through both changes.
    assert max(json.loads(line)["kl_mismatch"] for line in lines) < 1e-3
