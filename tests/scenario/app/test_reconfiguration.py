"""Whole runs on fake servers and ranks whose plan is changed while steps go on."""

import msgspec
import pytest

from fake_runs import read_lines
from libra.ids import InstanceId, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan
from wanted_plans import changes_in, plan_in, want

pytestmark = pytest.mark.timeout(180)
ELASTIC = {
    "runtime_dynamic_reconfiguration_enabled": True,
    "runtime_reconfigure_training": True,
    "runtime_cluster_swap_enabled": True,
    "runtime_reconfigure_timeout_s": 60.0,
}


def elastic(fake_run, **planner):
    run = fake_run(global_resource_planner={**ELASTIC, **planner})
    run.start()
    run.until_step(2)
    return run


def with_instances(plan: Plan, *slots: int) -> Plan:
    instances = tuple(
        InstancePlacement(instance_id=InstanceId(f"x-{n}"), tp=1, slots=(SlotId(slot),))
        for n, slot in enumerate(slots)
    )
    return msgspec.structs.replace(plan, instances=instances)


def ended(run, count: int):
    return run.until(lambda: changes_in(run.run_dir)[count - 1 :], within_s=60)[0]


def servers(run) -> dict[str, int]:
    found = {child: pid for pid, child in run.pids("vllm").items()}
    assert len(found) == len(run.pids("vllm")), "an instance runs twice"
    return found


def in_order(steps) -> bool:
    return steps == list(range(1, len(steps) + 1))


def no_sample_failed(run) -> bool:
    return not run.said("sample_failed")


@pytest.mark.case("R-B29")
def test_instances_come_and_go_while_steps_go_on_and_no_request_is_lost(fake_run):
    run = elastic(fake_run)
    before, plan = servers(run), plan_in(run.run_dir)
    want(run.run_dir, with_instances(plan, 0), decision_id=1)
    less = ended(run, 1)
    assert (less.outcome, less.stopped, less.started) == ("done", ("vllm-1",), ())
    assert less.transitions == ("drain vllm-1", "stop vllm-1")
    assert servers(run) == {"vllm-0": before["vllm-0"]}
    assert [it.instance_id for it in plan_in(run.run_dir).instances] == ["vllm-0"]
    run.until_step(max(run.steps()) + 2)
    want(run.run_dir, with_instances(plan, 0, 1), decision_id=2)
    more = ended(run, 2)
    assert (more.outcome, more.started) == ("done", ("vllm-2",))
    step = max(run.steps())
    run.until_step(step + 3)
    assert set(servers(run)) == {"vllm-0", "vllm-2"}
    assert servers(run)["vllm-0"] == before["vllm-0"]
    # The new one answers requests, with the version that is served.
    lines = read_lines(run.run_dir / "trajectories" / f"step_{step + 3:06d}.jsonl")
    assert {name for line in lines for name in line["instance_ids"]} <= {"vllm-0", "vllm-2"}
    status = run.status()
    assert [it["child"] for it in status["children"]] == ["trainer", "vllm-0", "vllm-2"]
    assert status["plan"] == ("train 2 GPUs (TP 1, PP 1, CP 1, DP 2), rollout 2 GPUs (2 x TP 1)")
    assert in_order(run.steps())
    assert no_sample_failed(run)
    assert run.call("stop").returncode == 0
    assert run.wait() == 0
    assert run.pids() == {}


def test_a_plan_that_is_not_allowed_is_refused_in_words_and_nothing_is_touched(fake_run):
    run = elastic(fake_run, min_rollout_gpus=2)
    before, plan = servers(run), plan_in(run.run_dir)
    want(run.run_dir, with_instances(plan, 0), decision_id=1)
    refused = ended(run, 1)
    assert refused.outcome == "refused"
    assert refused.reason.endswith("min_rollout_gpus 2 exceeds rollout_gpus, 1")
    run.until_step(max(run.steps()) + 1)
    assert servers(run) == before


def test_the_trainer_starts_anew_in_another_layout_and_rollouts_go_on(fake_run):
    run = elastic(fake_run)
    before, plan = servers(run), plan_in(run.run_dir)
    alone = msgspec.structs.replace(plan.train, dp=1, slots=plan.train.slots[:1])
    want(run.run_dir, msgspec.structs.replace(plan, train=alone), decision_id=1)
    done = ended(run, 1)
    assert done.outcome == "done", done
    assert done.stalled_s > 0
    assert set(done.phases) == {"hold", "reshape"}
    run.until_step(max(run.steps()) + 2)
    assert servers(run) == before
    assert len([pid for pid, child in run.pids("trainer").items()]) == 2  # torchrun and one rank
    # No step is trained twice, and what was sampled before is not thrown away.
    assert in_order(run.steps())
    assert no_sample_failed(run)
    assert plan_in(run.run_dir).train == alone
    assert run.call("stop").returncode == 0
    assert run.wait() == 0
    run.start("--resume")
    run.until_step(max(run.steps()) + 1)
    assert plan_in(run.run_dir).train == alone


@pytest.mark.parametrize("moment", ["drain", "start"])
def test_a_change_cut_off_by_the_end_of_the_supervisor_is_made_to_its_end_by_the_next(
    fake_run, moment
):
    run = fake_run(global_resource_planner=ELASTIC)
    run.env["FAKE_SERVER"] = '{"start_s": 3.0}'
    run.start()
    run.until_step(2)
    plan = plan_in(run.run_dir)
    if moment == "start":
        want(run.run_dir, with_instances(plan, 0), decision_id=6)
        assert ended(run, 1).outcome == "done"
    num_before = len(changes_in(run.run_dir))
    wanted = with_instances(plan, 0, 1) if moment == "start" else with_instances(plan, 0)
    want(run.run_dir, wanted, decision_id=7)
    # As soon as it is written down: whatever has been done of it by then.
    run.until(lambda: b'"order":null' not in state_bytes(run), within_s=30)
    if moment == "start":
        run.until(lambda: "vllm-2" in run.pids().values(), within_s=30)
    run.kill()
    run.start("--resume")
    done = ended(run, num_before + 1)
    assert (done.outcome, done.decision_id) == ("done", 7), done
    run.until_step(max(run.steps()) + 2)
    expected = {"start": {"vllm-0", "vllm-2"}, "drain": {"vllm-0"}}[moment]
    assert set(servers(run)) == expected
    assert {it.instance_id for it in plan_in(run.run_dir).instances} == expected
    assert run.call("stop").returncode == 0
    assert run.wait() == 0


def state_bytes(run) -> bytes:
    """Without spaces; empty of plans until the first is remembered."""
    return (run.run_dir / "state.json").read_bytes().replace(b" ", b"")


def test_prewarmed_servers_wait_for_their_devices_until_those_are_free(fake_run):
    run = elastic(fake_run, runtime_rollout_reconfigure_strategy="prewarm")
    plan = plan_in(run.run_dir)
    wide = InstancePlacement(instance_id=InstanceId("x"), tp=2, slots=(SlotId(0), SlotId(1)))
    want(run.run_dir, with_instances(plan, 0), decision_id=1)
    assert ended(run, 1).outcome == "done"
    # Both slots would be needed at once, and one instance has to serve.
    want(run.run_dir, msgspec.structs.replace(plan, instances=(wide,)), decision_id=2)
    refused = ended(run, 2)
    assert refused.outcome == "refused"
    assert "cannot go: 1 GPUs serve, and 1 have to" in refused.reason
    want(run.run_dir, with_instances(plan, 0, 1), decision_id=3)
    done = ended(run, 3)
    assert done.transitions[:3] == (
        "warm up vllm-3 (TP 1, slots 1)",
        "wait until vllm-3 needs a device",
        "start vllm-3 (TP 1, slots 1)",
    )
    assert done.outcome == "done"
    [warmed] = run.journal("InstanceWarmed")
    assert warmed["instance_id"] == "vllm-3"
    assert list((run.run_dir / "prewarm").iterdir()) == []
    run.until_step(max(run.steps()) + 2)
    assert set(servers(run)) == {"vllm-0", "vllm-3"}


def test_what_is_in_flight_is_given_back_where_nobody_waits_for_it(fake_run):
    run = elastic(fake_run, runtime_drain_before_reconfigure=False)
    plan = plan_in(run.run_dir)
    want(run.run_dir, with_instances(plan, 0), decision_id=1)
    done = ended(run, 1)
    assert done.transitions == ("take back what is in flight at vllm-1", "stop vllm-1")
    run.until_step(max(run.steps()) + 2)
    assert no_sample_failed(run)
    assert in_order(run.steps())


def test_a_server_that_does_not_come_up_is_given_up_in_time_and_the_plan_before_serves(fake_run):
    run = fake_run(global_resource_planner={**ELASTIC, "runtime_reconfigure_timeout_s": 15.0})
    run.env["FAKE_SERVER"] = '{"start_s": 0.0, "slow": {"vllm-2": 600}}'
    run.start()
    run.until_step(2)
    plan = plan_in(run.run_dir)
    want(run.run_dir, with_instances(plan, 0), decision_id=1)
    assert ended(run, 1).outcome == "done"
    want(run.run_dir, with_instances(plan, 0, 1), decision_id=2)
    back = ended(run, 2)
    assert back.outcome == "rolled_back"
    assert back.reason == "wait until vllm-2 serves: not over within 15 s"
    assert set(servers(run)) == {"vllm-0"}
    step = max(run.steps())
    run.until_step(step + 2)
    # The name is used up.
    want(run.run_dir, with_instances(plan, 0, 1), decision_id=3)
    again = ended(run, 3)
    assert (again.outcome, again.started) == ("done", ("vllm-3",))


def test_without_lanes_of_their_own_replicas_are_ranks_of_a_gang_that_starts_anew(fake_run):
    run = fake_run(
        train_gpus=1,
        global_resource_planner={**ELASTIC, "decouple_communication_domains": False},
    )
    run.start()
    run.until_step(2)
    plan = plan_in(run.run_dir)
    replica = HybridPlacement(replica_id=ReplicaId("any"), slots=(SlotId(1),))
    lent = msgspec.structs.replace(with_instances(plan, 0), hybrids=(replica,))
    want(run.run_dir, lent, decision_id=1)
    there = ended(run, 1)
    assert there.outcome == "done", there
    assert "reshape" in there.phases
    found = plan_in(run.run_dir)
    assert (found.train.dp, found.train.slots, found.hybrids) == (2, (2, 1), ())
    run.until_step(max(run.steps()) + 2)
    want(run.run_dir, plan, decision_id=2)
    assert ended(run, 2).outcome == "done"
    assert plan_in(run.run_dir).train == plan.train
    run.until_step(max(run.steps()) + 1)
    assert in_order(run.steps())
