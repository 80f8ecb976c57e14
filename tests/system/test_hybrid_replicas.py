"""Whole runs with Megatron ranks, and fake servers: a server's slot trains for a while."""

import os
import signal

import msgspec
import pytest

from fake_runs import FakeRun
from hybrid_run import relative_difference
from libra.ids import ReplicaId, SlotId
from libra.planner.plan import HybridPlacement
from replayed import replayed_weights, weights_in
from wanted_plans import changes_in, plan_in, want

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
WITHIN_S = 240.0
TOLERANCE = 5e-5
"""Relative to each tensor's largest value, in float32."""


TRAINS_SLOWLY = {
    "device_name": "slow",
    "memory_bytes": 4_000_000_000,
    "dense_bf16_flops": 1.0e9,
    "memory_bandwidth_bytes_per_s": 1.0e12,
    "intra_node_bandwidth_bytes_per_s": 1.0e12,
    "inter_node_bandwidth_bytes_per_s": 1.0e12,
    "gpus_per_node": 3,
}
"""By this one's figures a GPU is better used for training than for a second server."""


def made_in(folder, *, planner=None, **options) -> FakeRun:
    return FakeRun(
        folder,
        has_real_trainer=True,
        # The fake servers' logprobs are not those of the trainer's model.
        rollout_weight_sync_mode="none",
        max_head_offpolicyness=float("inf"),
        learning_rate=1e-3,
        global_resource_planner={
            "runtime_dynamic_reconfiguration_enabled": True,
            "runtime_reconfigure_training": True,
            "runtime_reconfigure_timeout_s": WITHIN_S,
            **(planner or {}),
        },
        **options,
    )


@pytest.fixture
def run(tmp_path):
    one = made_in(tmp_path, train_gpus=1)
    yield one
    one.end()


LARGE_BATCH = 128
LAST_SERVER = (
    *("-o", "rollout_gpus=1", "-o", "heterogeneous_rollout.instances=[{tp: 1, count: 1}]"),
    *("-o", "global_resource_planner.elastic_hybrid_min_rollout_gpus=0"),
    # Steps that take their time, and rollouts that run ahead of them. Few steps, too: weights come
    # apart by rounding with every one of them.
    *("-o", f"batch_size={LARGE_BATCH}", "-o", "micro_batch_size=1"),
    *("-o", "recompute_micro_batch_size=1"),
)


def rollouts_ahead(run, num_batches):
    run.until_step(2, within_s=WITHIN_S)
    run.until(lambda: run.status()["num_buffered"] >= LARGE_BATCH * num_batches, within_s=WITHIN_S)


@pytest.fixture
def planned_run(tmp_path):
    """Its planner expects long prompts, and that a change costs nearly nothing."""
    planner = {
        "runtime_switch_cost_prior_s": 0.001,
        "memory_budget_safety_margin_bytes": 0,
        "prior_prompt_tokens": 60,
        "prior_response_mean_tokens": 1,
    }
    one = made_in(tmp_path, train_gpus=1, hardware=TRAINS_SLOWLY, planner=planner)
    yield one
    one.end()


@pytest.fixture
def prewarmed_run(tmp_path):
    strategy = {"runtime_rollout_reconfigure_strategy": "prewarm"}
    one = made_in(tmp_path, train_gpus=1, planner=strategy)
    yield one
    one.end()


@pytest.fixture
def run_of_four(tmp_path):
    """Four core ranks, on slots 2 to 5."""
    one = made_in(tmp_path, train_gpus=4, micro_batch_size=1, recompute_micro_batch_size=1)
    yield one
    one.end()


def ended(run, count):
    return run.until(lambda: changes_in(run.run_dir)[count - 1 :], within_s=WITHIN_S)[0]


def with_hybrid(plan):
    """The second server's slot goes to a replica."""
    replica = HybridPlacement(replica_id=ReplicaId("any"), slots=(SlotId(1),))
    return msgspec.structs.replace(plan, instances=plan.instances[:1], hybrids=(replica,))


def replanned(run, *arguments):
    """The change that `replan` led to."""
    before = len(changes_in(run.run_dir))
    done = run.call("replan", *arguments)
    assert done.returncode == 0, done.stderr
    return ended(run, before + 1)


def test_a_slot_trains_by_order_and_serves_again_and_the_weights_are_those_of_a_core_alone(
    run, tmp_path
):
    run.start()
    run.until_step(2, within_s=WITHIN_S)
    lent = replanned(run, "--instances", "1x1", "--hybrids", "1")
    assert (lent.outcome, lent.stalled_s) == ("done", 0.0), lent
    (replica_id,) = lent.attached
    assert set(lent.stages["vllm-1"]) == {"drain", "stop"}
    assert set(lent.stages[replica_id]) == {"start", "snapshot", "load", "catch_up"}
    assert [it.replica_id for it in plan_in(run.run_dir).hybrids] == [replica_id]
    (row,) = [it for it in run.status()["children"] if it["child"] == replica_id]
    assert (row["role"], row["state"]) == ("trainer", "member")
    joined_at = max(run.steps())
    run.until_step(joined_at + 4)
    back = replanned(run, "--instances", "2x1", "--hybrids", "0")
    assert (back.outcome, back.detached) == ("done", (replica_id,)), back
    assert set(back.stages[replica_id]) == {"leave"}
    assert set(back.stages[back.started[0]]) >= {"start"}
    run.until_step(max(run.steps()) + 2)
    assert [it["replica"] for it in run.said("hybrid_joined")] == [replica_id]
    assert [it["replica"] for it in run.said("hybrid_left")] == [replica_id]
    assert not run.said("hybrid_lost")
    assert run.pids(replica_id) == {}
    # Snapshots and sockets are gone with the last replica that could use them.
    assert not list((run.run_dir / "hybrid").iterdir())
    assert run.call("stop").returncode == 0
    assert run.wait() == 0
    weights_are_those_of_a_core_alone(run, tmp_path)


def test_a_replica_comes_up_before_its_slot_is_drained_and_contributes_like_any_other(
    prewarmed_run, tmp_path
):
    run = prewarmed_run
    run.start()
    run.until_step(2, within_s=WITHIN_S)
    lent = replanned(run, "--instances", "1x1", "--hybrids", "1")
    assert (lent.outcome, lent.stalled_s) == ("done", 0.0), lent
    (replica_id,) = lent.attached
    assert lent.transitions[:3] == (
        f"warm up {replica_id}",
        f"wait until {replica_id} needs a device",
        "drain vllm-1",
    )
    stages = lent.stages[replica_id]
    assert set(stages) == {"warm", "start", "snapshot", "load", "catch_up"}
    run.until_step(max(run.steps()) + 4)
    back = replanned(run, "--instances", "2x1", "--hybrids", "0")
    assert (back.outcome, back.detached) == ("done", (replica_id,)), back
    run.until_step(max(run.steps()) + 2)
    assert run.call("stop").returncode == 0
    assert run.wait() == 0
    weights_are_those_of_a_core_alone(run, tmp_path)


def test_a_replica_that_is_killed_while_it_is_warm_takes_nothing_from_rollout(prewarmed_run):
    run = prewarmed_run
    run.start()
    run.until_step(2, within_s=WITHIN_S)
    servers = run.pids("vllm")
    want(run.run_dir, with_hybrid(plan_in(run.run_dir)), decision_id=1)
    pids = run.until(lambda: run.pids("hybrid"), within_s=WITHIN_S)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    failed = ended(run, 1)
    assert failed.outcome == "rolled_back", failed
    assert run.pids("vllm") == servers
    run.until_step(max(run.steps()) + 2)
    assert run.pids("hybrid") == {}
    assert run.call("stop").returncode == 0
    assert run.wait() == 0


@pytest.mark.long
def test_the_only_server_is_lent_and_comes_back_by_order_and_by_itself(run, tmp_path):
    run.start(*LAST_SERVER, "-o", "max_concurrent_rollouts=3200")
    rollouts_ahead(run, 20)
    lent = replanned(run, "--instances", "0", "--hybrids", "1")
    assert (lent.outcome, lent.stalled_s, lent.stopped) == ("done", 0.0, ("vllm-0",)), lent
    assert run.pids("vllm") == {}
    (replica_id,) = lent.attached
    until_steps_more(run, 3)
    assert "batches are left before a server comes back" in run.status()["waiting_for"]
    back = replanned(run, "--instances", "1x1", "--hybrids", "0")
    assert (back.outcome, back.cause, back.detached) == ("done", "decision", (replica_id,)), back
    until_steps_more(run, 2)
    # The second time nobody orders it back.
    rollouts_ahead(run, 15)
    assert replanned(run, "--instances", "0", "--hybrids", "1").outcome == "done"
    again = ended(run, 4)
    assert (again.outcome, again.cause, again.stalled_s) == ("done", "starved", 0.0), again
    until_steps_more(run, 2)
    assert not run.said("hybrid_lost")
    assert not run.said("sample_failed")
    assert run.call("stop").returncode == 0
    assert run.wait() == 0
    weights_are_those_of_a_core_alone(run, tmp_path)


@pytest.mark.long
@pytest.mark.case("T-B78")
def test_a_run_that_is_killed_while_its_only_server_is_lent_goes_on_with_it(run):
    options = (*LAST_SERVER, "-o", "max_concurrent_rollouts=3200")
    run.start(*options)
    rollouts_ahead(run, 15)
    assert replanned(run, "--instances", "0", "--hybrids", "1").outcome == "done"
    until_steps_more(run, 3)
    before = max(run.steps())
    run.kill()
    run.start("--resume", *options)
    run.until_step(before + 3, within_s=WITHIN_S)
    (server,) = plan_in(run.run_dir).instances
    assert server.instance_id not in ("vllm-0", "hybrid-1"), "a name is used twice"
    assert set(run.pids("vllm").values()) == {server.instance_id}
    assert run.pids("hybrid") == {}
    assert run.call("stop").returncode == 0
    assert run.wait() == 0


def until_steps_more(run, num_steps):
    run.until_step(max(run.steps()) + num_steps, within_s=WITHIN_S)


def weights_are_those_of_a_core_alone(run, folder):
    steps = run.steps()
    assert steps == list(range(1, len(steps) + 1))
    got = exported(run, folder / "exported", step=len(steps))
    wanted = replayed_weights(run.run_dir, folder / "alone", num_steps=len(steps))
    base = weights_in(folder / "model")
    assert relative_difference(got, wanted) < TOLERANCE
    assert relative_difference(base, wanted) > 1000 * TOLERANCE


def exported(run, out, *, step):
    checkpoint = run.run_dir / "checkpoints" / f"step_{step:06d}"
    done = run.call_bare("export", str(checkpoint), str(out))
    assert done.returncode == 0, done.stderr
    return weights_in(out)


def test_a_replica_that_is_killed_costs_the_run_nothing_but_the_replica(run):
    run.start()
    run.until_step(2, within_s=WITHIN_S)
    want(run.run_dir, with_hybrid(plan_in(run.run_dir)), decision_id=1)
    (replica_id,) = ended(run, 1).attached
    core = run.pids("trainer")
    for pid in run.pids(replica_id):
        os.kill(pid, signal.SIGKILL)
    run.until(lambda: run.said("hybrid_lost"), within_s=WITHIN_S)
    run.until_step(max(run.steps()) + 3)
    assert run.pids("trainer") == core
    assert plan_in(run.run_dir).hybrids == ()
    steps = run.steps()
    assert steps == list(range(1, len(steps) + 1))
    assert run.call("stop").returncode == 0
    assert run.wait() == 0


@pytest.mark.long
def test_the_planner_attaches_a_replica_when_that_pays(planned_run):
    run = planned_run
    run.start()
    run.until_step(2, within_s=WITHIN_S)
    lent = replanned(run)
    assert (lent.outcome, len(lent.attached), len(lent.stopped)) == ("done", 1, 1), lent
    assert "worth it: " in lent.reason
    run.until_step(max(run.steps()) + 3)
    (row,) = [it for it in run.status()["children"] if it["child"] == lent.attached[0]]
    assert row["state"] == "member"
    assert not run.said("hybrid_lost")
    assert run.call("stop").returncode == 0
    assert run.wait() == 0


@pytest.mark.long
def test_a_replica_has_the_layout_that_the_core_came_to_and_comes_back_with_a_resume(run_of_four):
    run = run_of_four
    run.start()
    run.until_step(2, within_s=WITHIN_S)
    plan = plan_in(run.run_dir)
    core = msgspec.structs.replace(plan.train, tp=2, dp=1, slots=(SlotId(2), SlotId(3)))
    want(run.run_dir, msgspec.structs.replace(plan, train=core), decision_id=1)
    assert ended(run, 1).outcome == "done"
    run.until_step(max(run.steps()) + 1, within_s=WITHIN_S)
    replica = HybridPlacement(replica_id=ReplicaId("any"), slots=(SlotId(4), SlotId(5)))
    wanted = msgspec.structs.replace(plan_in(run.run_dir), hybrids=(replica,))
    want(run.run_dir, wanted, decision_id=2)
    lent = ended(run, 2)
    assert (lent.outcome, len(lent.attached)) == ("done", 1), lent
    run.kill()
    run.start("--resume")
    again = ended(run, 3)
    assert (again.outcome, len(again.attached)) == ("done", 1), again
    assert again.attached != lent.attached
    run.until_step(max(run.steps()) + 3)
    assert [it.slots for it in plan_in(run.run_dir).hybrids] == [(4, 5)]
    assert not run.said("hybrid_lost")
    assert run.call("stop").returncode == 0
    assert run.wait() == 0
    assert run.pids() == {}
