"""Whole runs on fake servers and ranks whose plan is changed while steps go on."""

import msgspec
import pytest

from fake_runs import read_lines
from libra.ids import InstanceId, SlotId
from libra.planner.plan import InstancePlacement, Plan
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
