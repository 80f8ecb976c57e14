"""Hybrid replicas on another host than the core, with Megatron ranks and fake servers."""

import json

import pytest

from hybrid_run import relative_difference
from netns_hosts import hosts
from node_runs import NodeRun
from replayed import replayed_weights, weights_in
from tiny_models import make_tiny_model
from wanted_plans import changes_in, plan_in

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(1500)]
WITHIN_S = 400
TOLERANCE = 5e-5
"""Relative to each tensor's largest value, in float32."""

ELASTIC = {
    "runtime_dynamic_reconfiguration_enabled": True,
    "runtime_reconfigure_training": True,
    "runtime_reconfigure_timeout_s": float(WITHIN_S),
}


@pytest.fixture
def run(tmp_path):
    """Two servers on host 0, one and the core on host 1, nothing on host 2."""
    with hosts(3) as made:
        one = NodeRun(
            made,
            tmp_path,
            gpus=(3, 1),
            env_of={rank: {"FAKE_RUN_TRAINER": "real"} for rank in range(3)},
            total_steps=1000,
            node_lease_s=15,
            # The fake servers' logprobs are not those of the trainer's model.
            rollout_weight_sync_mode="none",
            max_head_offpolicyness=float("inf"),
            learning_rate=1e-3,
            global_resource_planner=ELASTIC,
        )
        model = make_tiny_model(tmp_path / "trained", "qwen3")
        for name in ("config.json", "model.safetensors"):
            (model / name).rename(tmp_path / "model" / name)
        one.start_all()
        one.until_step(2, within_s=WITHIN_S)
        yield one


def replanned(run, *words):
    before = len(changes_in(run.run_dir))
    answer = run.call("replan", *words)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return run.until(lambda: changes_in(run.run_dir)[before:], within_s=WITHIN_S)[0]


def lent(run):
    """The name of a replica on host 2, whose head is on host 1."""
    change = replanned(run, "--hybrids", "1")
    assert change.outcome == "done", change
    (replica,) = change.plan.hybrids
    assert (replica.node, change.plan.train.node) == (2, 1)
    assert set(change.stages[replica.replica_id]) == {"start", "snapshot", "load", "catch_up"}
    run.until_step(max(run.steps()) + 4, within_s=WITHIN_S)
    return replica.replica_id


def said(run, event):
    lines = (run.run_dir / "logs" / "control.jsonl").read_text().splitlines()
    return [it for it in map(json.loads, lines) if it["event"] == event]


def stopped(run):
    assert run.call("stop").returncode == 0
    assert run.wait_all(within_s=200) == dict.fromkeys(run.processes, 0), run.said()
    steps = run.steps()
    assert steps == list(range(1, len(steps) + 1))


def test_a_replica_on_another_host_trains_and_the_weights_are_those_of_a_core_alone(run, tmp_path):
    name = lent(run)
    log = run.run_dir / "logs" / f"{name}-2.log"
    assert log.exists()
    back = replanned(run, "--hybrids", "0")
    assert (back.outcome, back.detached) == ("done", (name,))
    run.until_step(max(run.steps()) + 2)
    stopped(run)
    assert not said(run, "hybrid_lost")
    steps = run.steps()
    checkpoint = run.run_dir / "checkpoints" / f"step_{len(steps):06d}"
    done = run.call_bare("export", str(checkpoint), str(tmp_path / "exported"))
    assert done.returncode == 0, done.stderr
    wanted = replayed_weights(run.run_dir, tmp_path / "alone", num_steps=len(steps))
    assert relative_difference(weights_in(tmp_path / "exported"), wanted) < TOLERANCE
    base = weights_in(tmp_path / "model")
    assert relative_difference(base, wanted) > 1000 * TOLERANCE


def test_a_replica_that_is_lost_with_its_host_costs_the_core_nothing(run):
    name = lent(run)
    run.crash(2)
    del run.processes[2]
    run.until(lambda: said(run, "hybrid_lost"), within_s=WITHIN_S)
    run.until_step(max(run.steps()) + 2, within_s=WITHIN_S)
    assert plan_in(run.run_dir).hybrids == ()
    assert not said(run, "gang_lost")
    run.start(2)
    run.until(lambda: len(said(run, "node_joined")) == 3, within_s=WITHIN_S)
    assert lent(run) != name
    stopped(run)
