"""Plans that are changed while the run goes on, over several hosts."""

import json

import pytest

from netns_hosts import hosts
from node_runs import NodeRun
from wanted_plans import changes_in, plan_in

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]
ELASTIC = {
    "runtime_dynamic_reconfiguration_enabled": True,
    "runtime_reconfigure_training": True,
    "runtime_cluster_swap_enabled": True,
}


def nth_change(run, number, *, within_s=120):
    return run.until(lambda: changes_in(run.run_dir)[number - 1 :], within_s=within_s)[0]


def ordered(run, *words):
    """The answer of `replan`, which has to be a yes."""
    answer = run.call("replan", *words)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def until_two_more(run, *, within_s=120):
    before = max(run.steps())
    run.until_step(before + 2, within_s=within_s)


@pytest.fixture
def elastic_run(tmp_path):
    with hosts(3) as made:
        run = NodeRun(
            made,
            tmp_path,
            total_steps=1000,
            node_loss_policy="shrink",
            node_loss_patience_s=1,
            global_resource_planner=ELASTIC,
        )
        run.start_all()
        run.until_step(2)
        yield run
        assert run.call("stop").returncode == 0
        assert run.wait_all() == {0: 0, 1: 0, 2: 0}, run.said()
    assert {it.outcome for it in changes_in(run.run_dir)} == {"done"}
    assert sorted(set(run.steps())) == list(range(1, 1 + max(run.steps())))


def test_servers_and_the_core_move_between_hosts_of_which_one_is_lost(elastic_run):
    run = elastic_run
    assert "of node 2" in ordered(run, "--instances", "5x1")
    joined = nth_change(run, 1)
    assert joined.started == ("vllm-4",)
    assert [it.node for it in joined.plan.instances] == [0, 0, 0, 1, 2]
    until_two_more(run)
    assert run.state_of("vllm-4") in ("serving", "reloading")
    ordered(run, "--train-gpus", "2", "--instances", "4x1")
    shrunk = nth_change(run, 2).plan
    assert (shrunk.train.dp, shrunk.train.node, shrunk.train.nodes) == (2, 1, ())
    until_two_more(run)
    ordered(run, "--train-gpus", "4")
    decided = nth_change(run, 3).plan
    # On its own node first, where a server made room.
    assert decided.train.nodes == (1, 1, 1, 2)
    assert [it.node for it in decided.instances] == [0, 0, 0, 2]
    until_two_more(run)
    run.crash(2)
    del run.processes[2]
    lost = nth_change(run, 4)
    assert (lost.cause, lost.plan.train.dp, len(lost.plan.instances)) == ("node_lost", 2, 3)
    until_two_more(run)
    refused = run.call("replan", "--instances", "9x1")
    assert (refused.returncode, refused.stderr) == (1, "this needs 11 GPUs, and the run has 6\n")
    run.start(2)
    run.until(lambda: plan_in(run.run_dir) == decided, within_s=60)
    until_two_more(run)
    assert "DP 4" in json.loads(run.call("status", "--json").stdout)["plan"]
