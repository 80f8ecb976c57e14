"""The whole job over three hosts with real parts: vLLM, torchrun, Megatron-Core on gloo."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from netns_hosts import hosts
from node_runs import NodeRun

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("sync_mode", ["restart", "nccl"])
def test_servers_and_ranks_on_several_hosts_learn_together(tmp_path, quickstart, sync_mode):
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
            total_steps=3,
            node_lease_s=30,
            rollout_weight_sync_mode=sync_mode,
        )
        run.start_all()
        run.until_step(3, within_s=1200)
        assert run.wait_all(within_s=200) == {0: 0, 1: 0, 2: 0}, run.said()
    logs = [run.run_dir / "nodes" / rank / "logs" / "control.jsonl" for rank in "12"]
    assert min(map(num_made, logs)) > 0
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert [it["node"] for it in plan["instances"]] == [0, 0, 1]
    assert plan["train"]["nodes"] == [1, 2]
    reloads = (run.run_dir / "reloads.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in reloads] == ["committed"] * len(reloads)
    assert (sync_mode == "nccl") is not any((run.run_dir / "weights").glob("v*"))
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    # At staleness 0 the engines say of the weights what the trainer says, over the network too.
    assert json.loads(lines[0])["kl_mismatch"] < 1e-3


def num_made(log):
    """Trajectories that the node has made, as it says when it ends."""
    said = [json.loads(line) for line in log.read_text().splitlines()]
    return sum(it["num_trajectories"] for it in said if it["event"] == "part_let_go")
