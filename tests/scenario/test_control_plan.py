"""Plans that are wanted at any moment, while engines and gangs die: every step is trained."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_parts import plan_of
from control_runs import run_until
from elastic_world import (
    IDS,
    TIMEOUT_S,
    a_step_is_trained,
    elastic,
    plan,
    records,
    resumed,
    run_out,
    spent_on,
    strike,
    want,
)
from libra.ids import InstanceId, ReplicaId, SlotId
from libra.planner.plan import InstancePlacement
from libra.pools.member import MemberState
from libra.pools.reconfiguration import Order
from libra_supervisor import events
from libra_supervisor.app.operator import waiting_for
from libra_supervisor.loop.plan_desk import PlanDesk
from libra_supervisor.loop.plan_memory import PlanMemory
from metrics_source import metric_values


def test_an_instance_joins_at_the_committed_version_and_one_leaves_after_its_requests():
    world, rng = elastic(), Random(1)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2], [0, 1, 3]))
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    assert records(world)[0].outcome == "done"
    assert set(world.routes) <= {"vllm-0", "vllm-1", "vllm-2"}
    assert world.control.pool[InstanceId("vllm-2")].state.value in ("serving", "reloading")
    assert world.plan_in_force.instances[-1].instance_id == "vllm-2"
    assert spent_on(records(world)[0]) == {"vllm-2": ["load", "start"]}
    want(world, plan([2], [3]), 2)
    assert "the plan changes: drain vllm-1, vllm-2" in waiting_for(world.control)
    run_until(world, rng, lambda w: len(w.reconfigurations) == 2)
    assert [it.instance_id for it in world.control.pool.members] == ["vllm-0"]
    assert world.kept_plans[-1].memory.order is None
    world.run(rng)
    assert world.ended.exit_code == 0


def test_the_metrics_page_shows_the_plan_and_its_changes():
    world, rng = elastic(), Random(3)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2, 3], [0, 1]))
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    want(world, plan([2, 3], [0, 1]), 2)
    values = metric_values(world)
    assert values["libra_plan_slots", "train"] == 2
    assert values["libra_plan_slots", "rollout"] == 2
    assert values["libra_reconfigurations_total", "done"] == 1
    assert values["libra_reconfigurations_total", "refused"] == 1
    stalled_s = records(world)[0].stalled_s
    assert values["libra_reconfiguration_seconds_total", "stalled"] == stalled_s > 0


def test_the_gang_starts_anew_at_a_boundary_and_no_step_is_lost_or_trained_twice():
    world, rng = elastic(), Random(3)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2, 3], [0, 1]))
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    [record] = records(world)
    assert (record.outcome, record.plan.train.dp) == ("done", 2)
    assert record.stalled_s > 0
    assert set(spent_on(record)["trainer"]) >= {"finish_step", "start"}
    assert world.attempt == 2
    world.run(rng)
    assert [step for _, step, _ in world.trained] == [1, 2, 3, 4, 5, 6]
    # Rollouts of before the restart were used after it.
    assert not [it for it in world.said if it.event == "gang_lost"]


def test_a_gang_that_is_lost_on_its_way_up_comes_back_in_the_layout_before():
    world, rng = elastic(), Random(3)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2, 3], [0, 1]))
    run_until(world, rng, lambda w: w.attempt == 2)
    world.lose_gang()
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    [record] = records(world)
    assert (record.outcome, record.plan.train.dp) == ("rolled_back", 1)
    assert world.train.dp == 1
    world.run(rng)
    assert world.ended.exit_code == 0
    assert [step for _, step, _ in world.trained][-1] == 6


def test_replicas_take_devices_of_rollout_and_give_them_back():
    world, rng = elastic(), Random(5)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2], [0], [1]))
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    assert records(world)[0].attached == ("hybrid-2",)
    assert world.replicas.members == {"hybrid-2"}
    # One that dies outside of a change leaves the plan; its devices are idle.
    world.post(events.HybridLost(ReplicaId("hybrid-2"), "SIGKILL"))
    assert world.plan_in_force.hybrids == ()
    lost = records(world)[1]
    assert (lost.cause, lost.outcome, lost.plan.hybrids) == ("replica_lost", "failed", ())
    assert lost.reason.startswith("hybrid-2 was lost: SIGKILL; slots 1 are idle until")
    want(world, plan([2], [0, 1]), 2)
    run_until(world, rng, lambda w: len(w.reconfigurations) == 3)
    assert records(world)[2].outcome == "done"
    world.run(rng)
    assert world.ended.exit_code == 0


@pytest.mark.case("R-B48")
def test_no_plan_gets_the_device_of_a_replica_that_does_not_end():
    world, rng = elastic(), Random(5)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2], [0], [1]))
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    world.post(events.HybridLost(ReplicaId("hybrid-2"), "hangs", frozenset({(0, 1)})))
    want(world, plan([2], [0, 1]), 2)
    [_, lost, refused] = records(world)
    assert lost.reason == "hybrid-2 was lost: hangs"
    assert refused.outcome == "refused"
    assert "is held by a process that does not end" in refused.reason
    assert world.kept_plans[-1].memory.lost_slots == (1,)
    world.run(rng)
    assert world.ended.exit_code == 0


def test_a_replica_that_never_joins_is_given_up_in_time_and_rollout_gets_its_devices_back():
    world, rng = elastic(), Random(5)
    world.replicas.joins = False
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2], [0], [1]))
    run_until(world, rng, lambda w: w.replicas.members)
    world.now += TIMEOUT_S
    world.post(events.Ticked())
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    [record] = records(world)
    assert record.outcome == "rolled_back"
    assert record.reason == "attach hybrid-2: not over within 50 s"
    assert {it.instance_id for it in record.plan.instances} == set(IDS)
    assert world.replicas.members == set()


def test_instances_that_are_loading_weights_count_as_serving_and_leave_in_waves():
    world, rng = elastic(runtime_rollout_reconfigure_strategy="restart_all"), Random(5)
    run_until(world, rng, a_step_is_trained)
    run_until(
        world, rng, lambda w: {m.state.value for m in w.control.pool.members} == {"reloading"}
    )
    want(world, plan([2], [0, 1]))
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    [record] = records(world)
    assert record.outcome == "done"
    assert record.transitions[:2] == ("drain vllm-0", "stop vllm-0")


def test_what_an_operator_drains_in_the_middle_does_not_count_as_serving():
    world, rng = elastic(), Random(5)
    run_until(world, rng, a_step_is_trained)
    coming = InstancePlacement(instance_id=InstanceId("x-3"), tp=2, slots=(SlotId(3), SlotId(4)))
    wanted = msgspec.structs.replace(plan([2], [0]), instances=(plan_of(IDS).instances[0], coming))
    # All of the plan has to serve before vllm-1 may go.
    plans = world.control.plans
    plans.policy = msgspec.structs.replace(plans.policy, min_rollout_gpus=3)
    want(world, wanted)
    world.post(events.DrainRequested(IDS[0], drain=True))
    run_until(
        world, rng, lambda w: w.control.pool[InstanceId("vllm-2")].state is MemberState.SERVING
    )
    assert "wait until vllm-0 serves" in waiting_for(world.control)
    assert world.control.pool[IDS[1]].state is MemberState.SERVING
    world.post(events.DrainRequested(IDS[0], drain=False))
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    assert records(world)[0].outcome == "done"


def test_only_one_change_at_a_time_and_none_before_a_version_is_served():
    world, rng = elastic(), Random(7)
    want(world, plan([2], [0, 1, 3]), 1)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2], [0, 1, 3]), 2)
    want(world, plan([2], [0]), 3)
    found = {it.decision_id: it for it in records(world)}
    assert (found[1].outcome, found[1].reason) == ("refused", "no version is served yet")
    assert found[3].reason == "another change of the plan is under way"
    run_until(world, rng, lambda w: len(w.reconfigurations) == 3)
    assert records(world)[2].outcome == "done"
    want(world, plan([2], [0, 1, 3]), 4)
    assert records(world)[3].reason == "this plan is in force already"


def test_no_change_begins_once_the_run_is_stopping():
    world, rng = elastic(), Random(7)
    run_until(world, rng, a_step_is_trained)
    world.post(events.StopRequested("an operator", now=False))
    want(world, plan([2], [0]))
    [record] = records(world)
    assert (record.outcome, record.reason) == ("refused", "the run is stopping: an operator")
    world.run(rng)
    assert world.ended.exit_code == 0


def test_replicas_of_a_core_with_fewer_data_ranks_than_experts_are_refused():
    world, rng = elastic(), Random(7)
    run_until(world, rng, a_step_is_trained)
    wanted = plan([2, 5], [0], [1])
    core = msgspec.structs.replace(wanted.train, dp=1, cp=2, ep=2)
    want(world, msgspec.structs.replace(wanted, train=core))
    [record] = records(world)
    assert record.reason == "a replica has 2 data-parallel ranks, for EP 2, and the core only 1"


def test_replicas_that_would_get_no_sample_are_refused():
    world, rng = elastic(elastic_hybrid_min_rollout_gpus=0), Random(7)
    run_until(world, rng, a_step_is_trained)
    desk = world.control.plans
    # Batches of the world have four trajectories.
    assert desk.why_not(plan([2], [0], [1, 3, 4])) == ""
    want(world, plan([2], [0], [1, 3, 4, 5]))
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    [refused] = records(world)
    assert refused.outcome == "refused"
    assert refused.reason == "a mini-batch of 4 trajectories cannot be cut for 5 ranks"


@pytest.mark.parametrize(
    ("training", "planner", "why"),
    [
        ({"train_backend": "fsdp"}, {}, "train_backend is fsdp"),
        ({}, {"runtime_reconfigure_training": False}, "runtime_reconfigure_training is false"),
    ],
)
def test_a_run_that_cannot_have_replicas_says_which_option_forbids_them(training, planner, why):
    world = elastic()
    old, replaced = world.control.plans, msgspec.structs.replace
    config = old._config
    config = replaced(
        config,
        training=replaced(config.training, **{"train_backend": "megatron_core"} | training),
        global_resource_planner=replaced(
            config.global_resource_planner, **{"runtime_reconfigure_training": True} | planner
        ),
    )
    desk = PlanDesk(old.plan, old.policy, config=config)
    assert desk.why_not(plan([2], [0], [1])) == f"this run cannot have hybrid replicas: {why}"


def test_a_plan_that_the_batch_does_not_divide_over_is_refused():
    world, rng = elastic(), Random(7)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2, 3, 4], [0, 1]))
    [record] = records(world)
    assert record.outcome == "refused"
    assert "3 data-parallel ranks" in record.reason


WANTED = [
    plan([2], [0]),
    plan([2], [0, 1, 3]),
    plan([2], [0, 1, 3, 4]),
    plan([2, 3], [0, 1]),
    plan([2, 1], [0]),
    plan([2], [0], [1]),
    plan([2], [0, 1], [3, 4]),
    plan([2, 3], [0], [1, 4]),
]
STRATEGIES = ["diff", "restart_all", "blue_green", "cluster_swap"]
WAYS = [
    *((method, it, "stop") for method in ("inplace", "restart") for it in STRATEGIES),
    *(("inplace", it, "sleep") for it in ("diff", "cluster_swap")),
]
"""(reload method, strategy, what becomes of lent servers) that a configuration may have."""


@given(
    seed=st.integers(0, 2**32),
    wanted=st.lists(st.tuples(st.integers(1, 80), st.sampled_from(WANTED)), min_size=1, max_size=4),
    faults=st.lists(
        st.tuples(st.integers(1, 80), st.sampled_from(["kill", "gang", "hang", "wait", "sleep"])),
        max_size=4,
    ),
    way=st.sampled_from(WAYS),
    drains=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_wanted_and_whatever_dies_every_step_is_trained(
    seed, wanted, faults, way, drains
):
    rng = Random(seed)
    method, strategy, lent = way
    world = elastic(
        method=method,
        runtime_rollout_reconfigure_strategy=strategy,
        runtime_lent_servers=lent,
        runtime_drain_before_reconfigure=drains,
    )
    doings = [(wait, "want", it) for wait, it in wanted] + [(w, it, None) for w, it in faults]
    rng.shuffle(doings)
    for number, (wait, doing, what) in enumerate(doings):
        for _ in range(wait):
            if not world.step(rng):
                break
        if world.ended is not None:
            break
        if doing == "want":
            want(world, what, number)
        else:
            strike(world, rng, doing)
    run_out(world, rng)
    assert world.ended is not None, (world.control.cycle.phase, world.control.plans.change)
    if world.ended.exit_code == 4:
        assert "3 batches in a row" in world.ended.reason
        return
    assert world.ended.exit_code == 0
    assert {step for _, step, _ in world.trained} == set(range(1, 7))
    assert [w.record.step for w in world.written][-1] == 6


def test_what_is_kept_for_a_later_supervisor_is_enough_to_go_on():
    world, rng = elastic(), Random(11)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2], [0, 1, 3], [4]))
    run_until(world, rng, lambda w: "vllm-3" in w.processes)
    memory = world.kept_plans[-1].memory
    assert memory.order is not None
    second = resumed(world, memory)
    again = second.control.plans
    assert again.plan == memory.order.old
    assert again.is_busy
    run_until(second, rng, lambda w: len(w.reconfigurations) == 1)
    [record] = records(second)
    assert (record.decision_id, record.outcome) == (1, "done")
    assert [it.instance_id for it in record.plan.instances] == [*IDS, "vllm-3"]
    # The name of a replica that has ended is never used again.
    assert [it.replica_id for it in record.plan.hybrids] == ["hybrid-4"]
    assert second.kept_plans[-1].memory.order is None


def test_the_line_of_a_resumed_change_has_what_the_supervisor_before_did_of_it():
    world, rng = elastic(), Random(11)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2], [0, 1, 3]))
    run_until(world, rng, lambda w: "vllm-2" in w.processes)
    memory = world.kept_plans[-1].memory
    began_at = memory.order.begun_wall_ns / 1e9
    second = resumed(world, memory)
    second.now = began_at + 120.0
    run_until(second, rng, lambda w: len(w.reconfigurations) == 1)
    [record] = records(second)
    assert record.outcome == "done"
    assert record.total_s == pytest.approx(second.now - began_at, abs=1.0)
    assert record.total_s >= 120.0
    assert record.transitions[: len(memory.order.transitions)] == memory.order.transitions
    assert "start vllm-2 (TP 1, slots 3)" in record.transitions
    assert memory.order.phases.items() <= record.phases.items()
    assert set(memory.order.phases) >= {"start"}


def test_replicas_of_the_plan_in_force_are_attached_again_by_the_next_supervisor():
    world, rng = elastic(), Random(11)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2], [0], [1]), 5)
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    world.post(events.Ticked())
    memory = world.kept_plans[-1].memory
    assert (memory.order, memory.decision_id) == (None, 5)
    second = resumed(world, memory)
    run_until(second, rng, lambda w: len(w.reconfigurations) == 1)
    [record] = records(second)
    assert (record.outcome, record.attached) == ("done", ("hybrid-3",))
    assert second.replicas.members == {"hybrid-3"}


def test_a_change_that_turned_round_is_resumed_without_the_replicas_before_it():
    world, rng = elastic(), Random(11)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2], [0], [1]))
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    old = world.control.plans.plan
    assert old.hybrids
    wanted = msgspec.structs.replace(old, hybrids=(), instances=plan_of(IDS).instances)
    order = Order(
        decision_id=2, reason="r", old=old, wanted=wanted, is_turned=True, turned_by="a limit"
    )
    alone = msgspec.structs.replace(old, hybrids=())
    second = resumed(world, PlanMemory(plan=alone, next_number=9, order=order))
    run_until(second, rng, lambda w: len(w.reconfigurations) == 1)
    [record] = records(second)
    assert (record.outcome, record.plan.hybrids) == ("rolled_back", ())
    assert second.replicas.members == set()


def test_a_resumed_run_does_without_devices_that_are_gone():
    world, rng = elastic(), Random(11)
    run_until(world, rng, a_step_is_trained)
    before = world.control.plans.plan
    plans = world.control.plans
    plans.policy = msgspec.structs.replace(plans.policy, num_slots=3)
    lent = plan([2], [0, 1], [4]).hybrids
    memory = PlanMemory(plan=msgspec.structs.replace(before, hybrids=lent), next_number=9)
    second = resumed(world, memory)
    run_until(second, rng, lambda w: len(w.reconfigurations) == 1)
    [record] = records(second)
    assert (record.outcome, record.plan) == ("done", before)
    assert second.replicas.members == set()
    order = Order(decision_id=2, reason="r", old=before, wanted=plan([2], [0, 1, 3]))
    third = resumed(world, PlanMemory(plan=before, next_number=9, order=order))
    run_until(third, rng, lambda w: len(w.reconfigurations) == 1)
    [record] = records(third)
    assert (record.outcome, record.plan) == ("rolled_back", before)
    assert record.reason == "the plan uses more than the 3 devices there are"


def test_too_little_left_of_a_change_is_not_started_with_but_the_plan_before():
    small, whole = plan([2], [0]), plan([2], [0, 1])
    order = Order(decision_id=1, reason="r", old=whole, wanted=plan([2], [3, 4]))
    memory = PlanMemory(plan=small, next_number=9, order=order)
    assert memory.to_start_with(min_rollout_gpus=1) == small
    assert memory.to_start_with(min_rollout_gpus=2) == whole
    assert memory.in_force == whole


def test_a_process_that_does_not_end_keeps_its_slot_for_ever():
    world, rng = elastic(), Random(11)
    run_until(world, rng, a_step_is_trained)
    want(world, plan([2], [0]))
    clean = events.InstanceRetired(IDS[1], is_clean=True)
    run_until(world, rng, lambda w: clean in w.pending)
    world.pending.remove(clean)
    world.post(events.InstanceRetired(IDS[1], is_clean=False))
    [record] = records(world)
    # It was to go, and is gone from the plan; going back would need its slot.
    assert (record.outcome, record.reason) == (
        "failed",
        "vllm-1 cannot be ended",
    )
    assert [it.instance_id for it in record.plan.instances] == ["vllm-0"]
    assert world.kept_plans[-1].memory.lost_slots == (1,)
    want(world, plan([2], [0, 1]), 2)
    assert records(world)[1].reason == "slot 1 is held by a process that does not end"
    world.run(rng)
    assert world.ended.exit_code == 0
