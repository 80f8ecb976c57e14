"""The whole job with real parts while its plan changes: servers leave and join."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from libra.ids import InstanceId, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan
from main_jobs import Job, read_lines, servers
from wanted_plans import changes_in, plan_in, want

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]
PLANNER = "global_resource_planner"
OPTIONS = (
    *("-o", "train_gpus=1", "-o", "rollout_gpus=2"),
    *("-o", "heterogeneous_rollout.instances=[{tp: 1, count: 2}]"),
    *("-o", "total_steps=5000", "-o", "save_interval=5"),
    *("-o", f"{PLANNER}.runtime_dynamic_reconfiguration_enabled=true"),
)


@pytest.fixture
def elastic_job(tmp_path, quickstart, monkeypatch):
    path = os.pathsep.join((str(SUPPORT), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", path)
    program = (SUPPORT / "children" / "wanting_run.py",)
    jobs = []

    def start(*arguments):
        jobs.append(Job(tmp_path / "run", quickstart, *OPTIONS, *arguments, program=program))
        return jobs[-1]

    yield start
    for job in jobs[-1:]:
        if job.process.poll() is None:
            job.kill()


def with_instances(plan: Plan, *slots: int) -> Plan:
    instances = tuple(
        InstancePlacement(instance_id=InstanceId(f"x-{n}"), tp=1, slots=(SlotId(slot),))
        for n, slot in enumerate(slots)
    )
    return msgspec.structs.replace(plan, instances=instances)


def until(job, condition, within_s=400):
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert job.process.poll() is None, job.said()
        assert time.monotonic() < deadline, job.said()
        time.sleep(0.2)
    return found


def nth_change(job, number):
    return until(job, lambda: changes_in(job.run_dir)[number - 1 :])[0]


def instances(job) -> set[str]:
    return set(servers(job.run_dir).values())


def pids_of(job, name) -> set[int]:
    return {pid for pid, child in servers(job.run_dir).items() if child == name}


def newest_step(job) -> int:
    return max(line["step"] for line in job.steps())


def said(job, event):
    return [it for it in read_lines(job.run_dir / "logs" / "control.jsonl") if it["event"] == event]


def test_real_servers_leave_and_join_while_steps_go_on_and_a_killed_supervisor_makes_the_rest(
    elastic_job,
):
    job = elastic_job()
    job.until_step(2, 400)
    plan = plan_in(job.run_dir)
    one_leaves(job, plan)
    another_joins(job, plan)
    a_change_is_cut_off(job, elastic_job, plan)


def one_leaves(job, plan):
    want(job.run_dir, with_instances(plan, 0), decision_id=1)
    less = nth_change(job, 1)
    assert (less.outcome, less.stopped) == ("done", ("vllm-1",)), less
    assert instances(job) == {"vllm-0"}
    job.until_step(newest_step(job) + 2, 200)


def another_joins(job, plan):
    before = newest_step(job)
    want(job.run_dir, with_instances(plan, 0, 1), decision_id=2)
    more = nth_change(job, 2)
    assert (more.outcome, more.started) == ("done", ("vllm-2",)), more
    assert more.stalled_s == 0.0
    # Steps went on while the server came up.
    assert newest_step(job) > before
    step = newest_step(job)
    until(job, lambda: "vllm-2" in answered_by(job, step + 1))
    assert said(job, "sample_failed") == []
    steps = [line["step"] for line in job.steps()]
    assert steps == list(range(1, len(steps) + 1))


def a_change_is_cut_off(job, elastic_job, plan):
    """By SIGKILL, while its server comes up."""
    first = min(pid for pid, child in servers(job.run_dir).items() if child == "vllm-0")
    want(job.run_dir, with_instances(plan, 0), decision_id=3)
    assert nth_change(job, 3).outcome == "done"
    want(job.run_dir, with_instances(plan, 0, 1), decision_id=4)
    until(job, lambda: "vllm-3" in instances(job))
    until(job, lambda: b"vllm-3" in (job.run_dir / "state.json").read_bytes())
    job.process.kill()
    job.process.wait()
    job = elastic_job("--resume")
    rest = nth_change(job, 4)
    assert (rest.outcome, rest.decision_id) == ("done", 4), rest
    assert instances(job) == {"vllm-0", "vllm-3"}
    assert first in servers(job.run_dir), "the server of both plans was not adopted"
    job.until_step(newest_step(job) + 2, 200)
    assert [it.instance_id for it in plan_in(job.run_dir).instances] == ["vllm-0", "vllm-3"]
    job.process.terminate()
    assert job.wait(120) == 0


def test_the_real_trainer_goes_on_in_another_layout_and_a_server_is_prewarmed(elastic_job):
    job = elastic_job(
        *("-o", "train_gpus=2", "-o", "rollout_gpus=1", "-o", "max_head_offpolicyness=0"),
        *("-o", "heterogeneous_rollout.instances=[{tp: 1, count: 1}]"),
        *("-o", f"{PLANNER}.runtime_reconfigure_training=true"),
        *("-o", f"{PLANNER}.runtime_cluster_swap_enabled=true"),
        *("-o", f"{PLANNER}.runtime_rollout_reconfigure_strategy=prewarm"),
    )
    job.until_step(2, 400)
    plan = plan_in(job.run_dir)
    assert (plan.train.tp, plan.train.dp) == (1, 2)

    split = msgspec.structs.replace(plan.train, tp=2, dp=1)
    want(job.run_dir, msgspec.structs.replace(plan, train=split), decision_id=1)
    split_done = nth_change(job, 1)
    assert split_done.outcome == "done", split_done
    goes_on_with_the_same_policy(job)

    # Training gives a device to rollout.
    alone = msgspec.structs.replace(plan.train, dp=1, slots=plan.train.slots[:1])
    want(
        job.run_dir,
        msgspec.structs.replace(with_instances(plan, 0, 2), train=alone),
        decision_id=2,
    )
    swapped = nth_change(job, 2)
    assert swapped.outcome == "done", swapped
    assert "wait until vllm-1 needs a device" in swapped.transitions
    assert swapped.plan.instances[-1].slots == (SlotId(2),)
    goes_on_with_the_same_policy(job)
    assert instances(job) == {"vllm-0", "vllm-1"}
    job.process.terminate()
    assert job.wait(120) == 0


def test_a_real_server_sleeps_while_a_real_replica_has_its_slot_and_serves_again(elastic_job):
    job = elastic_job(
        *("-o", f"{PLANNER}.runtime_reconfigure_training=true"),
        *("-o", f"{PLANNER}.runtime_rollout_reconfigure_strategy=prewarm"),
        *("-o", f"{PLANNER}.runtime_lent_servers=sleep", "-o", "max_head_offpolicyness=0"),
    )
    job.until_step(2, 400)
    plan = plan_in(job.run_dir)
    processes = pids_of(job, "vllm-1")
    replica = HybridPlacement(replica_id=ReplicaId("any"), slots=(SlotId(1),))
    lent = msgspec.structs.replace(with_instances(plan, 0), hybrids=(replica,))

    want(job.run_dir, lent, decision_id=1)
    there = nth_change(job, 1)
    assert (there.outcome, there.asleep, there.stalled_s) == ("done", ("vllm-1",), 0.0), there
    assert pids_of(job, "vllm-1") == processes
    job.until_step(newest_step(job) + 3, 200)

    want(job.run_dir, with_instances(plan, 0, 1), decision_id=2)
    back = nth_change(job, 2)
    assert (back.outcome, back.started, back.stalled_s) == ("done", ("vllm-1",), 0.0), back
    assert set(back.stages["vllm-1"]) == {"wake", "load"}
    assert pids_of(job, "vllm-1") == processes
    step = newest_step(job)
    until(job, lambda: "vllm-1" in answered_by(job, step + 1))
    # What it answers is what the trainer computes with the weights of that version.
    goes_on_with_the_same_policy(job)
    for event in ("instance_does_not_sleep", "instance_replaced", "hybrid_lost"):
        assert said(job, event) == []
    job.process.terminate()
    assert job.wait(120) == 0


def goes_on_with_the_same_policy(job):
    """Without staleness the trainer computes what the engines did with the weights before."""
    step = newest_step(job)
    job.until_step(step + 3, 200)
    assert {line["staleness_max"] for line in job.steps()} == {0}
    assert max(line["kl_mismatch"] for line in job.steps()) < 1e-5
    steps = [line["step"] for line in job.steps()]
    assert steps == list(range(1, len(steps) + 1))
    assert said(job, "sample_failed") == []


def answered_by(job, step) -> set[str]:
    """Instances that trajectories of steps from `step` on came from."""
    found = set()
    for path in sorted((job.run_dir / "trajectories").glob("step_*.jsonl")):
        if int(path.stem.rpartition("_")[2]) >= step:
            found |= {name for line in read_lines(path) for name in line["instance_ids"]}
    return found
