"""Control while hybrid replicas have the only server's slot: nothing serves, and steps go on."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lending_world import (
    ALONE,
    SERVER,
    TIMEOUT_S,
    lending,
    lent,
    num_batches,
    obey_one,
    until,
    until_ahead,
)
from libra.planner.plan import Plan
from libra_supervisor import events
from libra_supervisor.app.operator import waiting_for
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.server_need import lead_steps
from metrics_source import metric_values


def want(world, plan: Plan, decision_id=1):
    world.post(events.ReconfigurationWanted(decision_id, plan, "test"))


def records(world):
    return [it.record for it in world.reconfigurations]


def changed(world, rng, count):
    until(world, rng, lambda: len(world.reconfigurations) >= count)
    return records(world)[count - 1]


def borrowed(world, rng, *, batches=8):
    """The server's slot has gone to a replica, with so many batches left to train on."""
    until_ahead(world, rng, batches)
    want(world, lent())
    record = changed(world, rng, 1)
    assert (record.outcome, record.attached) == ("done", ("hybrid-1",)), record
    assert record.plan.instances == ()
    return record


def ends_well(world, rng, *, total_steps=40):
    until(world, rng, lambda: world.ended is not None)
    assert world.ended.exit_code == 0, world.ended
    assert [step for _, step, _ in world.trained] == list(range(1, total_steps + 1))


def steps_with(world, name):
    return [step for step, members in sorted(world.members_of.items()) if name in members]


@pytest.mark.parametrize("seed", range(5))
def test_the_only_server_is_lent_and_comes_back_by_order_at_the_newest_version(seed):
    world, rng = lending(), Random(seed)
    record = borrowed(world, rng)
    assert record.transitions == (
        "drain vllm-0",
        "stop vllm-0",
        "attach hybrid-1",
    )
    before = world.control.cycle.step
    num_reloads = len(world.reloads)
    until(world, rng, lambda: world.control.cycle.committed >= before + 2)
    # Versions go on being published, to nobody, and that is written down.
    alone = [it.record for it in world.reloads[num_reloads:]]
    assert alone
    assert {(it.outcome, it.acks, it.accepted) for it in alone} == {("committed", (), ())}
    want(world, ALONE, 2)
    back = changed(world, rng, 2)
    assert (back.outcome, back.cause, back.detached) == ("done", "decision", ("hybrid-1",))
    assert back.transitions == ("detach hybrid-1", "start vllm-2 (TP 1, slots 0)",
                                "wait until vllm-2 serves")  # fmt: skip
    assert steps_with(world, "hybrid-1")
    assert world.control.plans.lent_from is None
    assert world.routes["vllm-2"] == world.control.cycle.committed
    ends_well(world, rng)


@pytest.mark.parametrize("seed", range(5))
def test_the_server_comes_back_by_itself_while_the_last_batch_is_trained(seed):
    world, rng = lending(), Random(seed)
    borrowed(world, rng)
    assert lead_steps(world.control, now=world.now) == num_batches(world) > 0
    until(world, rng, lambda: world.control.plans.change is not None)
    change = world.control.plans.change
    assert num_batches(world) == 0
    assert world.control.cycle.phase is Phase.TRAINING, "the trainer waited before it began"
    last = world.trained[-1][1]
    assert change.order.reason == f"there is no batch for step {last + 1}, and nothing serves"
    back = changed(world, rng, 2)
    assert (back.outcome, back.cause, back.decision_id) == ("done", "starved", 0)
    # The replica had its share of the step that was going on.
    assert steps_with(world, "hybrid-1")[-1] == last
    ends_well(world, rng)


def test_nothing_is_asked_for_while_nothing_serves_and_status_says_what_is_left():
    world, rng = lending(), Random(3)
    borrowed(world, rng)
    opened = set(world.open_groups)
    left = world.control.desk.num_batches(world.control.cycle.step)
    assert f"nothing serves: {left} batches are left before a server comes back" in waiting_for(
        world.control
    )
    until(world, rng, lambda: world.control.plans.change is not None)
    assert set(world.open_groups) == opened
    assert "the plan changes: detach hybrid-1" in waiting_for(world.control)
    until(world, rng, lambda: "vllm-2" in world.processes)
    # Nor before the server answers: thousands of requests would fill the queue.
    assert set(world.open_groups) == opened
    ends_well(world, rng)


def test_the_metrics_page_shows_no_slot_of_rollout_and_nothing_can_be_reloaded():
    world, rng = lending(), Random(3)
    borrowed(world, rng)
    values = metric_values(world)
    assert values["libra_plan_slots", "rollout"] == 0
    publication, cycle = world.control.publication, world.control.cycle
    until(world, rng, lambda: publication.is_idle and not publication.is_being_checked)
    assert publication.why_not_refresh(cycle.held_version) == "nothing serves"


def test_a_server_that_leaves_nothing_to_train_on_is_kept_once_it_is_drained():
    world, rng = lending(), Random(3)
    until(world, rng, lambda: bool(world.trained))
    process = world.processes[SERVER].incarnation
    want(world, lent())
    # Nobody is asked but for what is in flight, which is not even a batch.
    for group_id in list(world.open_groups):
        world._drop_samples({group_id})
    world.post(events.Ticked())
    assert num_batches(world) == 0
    assert "drain vllm-0" in waiting_for(world.control), "what is in flight was not waited for"
    record = changed(world, rng, 1)
    assert record.outcome == "rolled_back"
    assert "stop vllm-0" not in record.transitions
    assert world.processes[SERVER].incarnation == process
    assert "there is no batch for step" in record.reason


def test_a_replica_that_is_not_there_when_the_batches_end_gives_way_to_the_server():
    world, rng = lending(), Random(3)
    until_ahead(world, rng, 3)
    world.is_held = lambda event: isinstance(event, events.ReplicaReady)
    want(world, lent())
    record = changed(world, rng, 1)
    assert (record.outcome, record.plan.hybrids) == ("rolled_back", ())
    assert record.reason.startswith("there is no batch for step ")
    assert record.total_s < TIMEOUT_S, "it waited for a limit"
    assert [it.instance_id for it in record.plan.instances] == [SERVER]
    ends_well(world, rng)


def test_a_replica_that_dies_alone_gives_way_to_the_server_at_once():
    world, rng = lending(), Random(3)
    borrowed(world, rng)
    world.kill("hybrid-1")
    back = changed(world, rng, 2)
    assert (back.outcome, back.cause) == ("done", "starved")
    assert back.reason == "no replica is left, and nothing serves"
    ends_well(world, rng)


@pytest.mark.parametrize("when", ["lent", "on the way"])
def test_a_core_that_is_lost_while_nothing_serves_gets_a_server_to_begin_with(when):
    world, rng = lending(save_interval=2), Random(3)
    if when == "lent":
        borrowed(world, rng)
        world.lose_gang()
        assert changed(world, rng, 2).reason == "the trainer starts anew, and nothing serves"
    else:
        until_ahead(world, rng, 8)
        want(world, lent())
        until(world, rng, lambda: "hybrid-1" in world.replicas)
        world.lose_gang()
        assert changed(world, rng, 1).outcome == "rolled_back"
    until(world, rng, lambda: world.ended is not None)
    assert world.ended.exit_code == 0
    assert world.trained[-1][1] == 40


def test_an_evaluation_that_falls_due_brings_the_server_back_and_none_is_begun_without():
    world, rng = lending(eval_rows=2, eval_interval=8), Random(3)
    until_ahead(world, rng, 8)
    until(world, rng, lambda: world.control.evaluator.progress is None)
    begun = world.control.cycle.step
    assert lead_steps(world.control, now=world.now) <= 8 - begun % 8
    want(world, lent())
    first = changed(world, rng, 1)
    if first.outcome == "done":
        first = changed(world, rng, 2)
    assert first.reason == "v8 is to be evaluated, and nothing serves"
    ends_well(world, rng)
    assert [it.record.policy_version for it in world.evaluated] == [0, 8, 16, 24, 32, 40]


def test_the_last_server_is_not_lent_while_something_is_evaluated():
    world, rng = lending(eval_rows=2, eval_interval=8), Random(3)
    world.is_evaluation_stuck = True
    until(world, rng, lambda: world.control.evaluator.progress is not None)
    want(world, lent())
    assert records(world)[0].reason == "nothing would serve, and an evaluation is going on"


def test_no_other_plan_that_serves_nothing_may_follow():
    world, rng = lending(), Random(3)
    borrowed(world, rng)
    want(world, lent(), 2)
    assert records(world)[1].reason.startswith("nothing serves, and would not serve either")


@pytest.mark.parametrize(
    ("plan", "planner", "least"),
    [
        (lent(), {"elastic_hybrid_min_rollout_gpus": 1}, 1),
        (lent(), {"elastic_hybrid_min_rollout_gpus": 2}, 2),
    ],
)
def test_without_leave_the_last_server_is_not_lent(plan, planner, least):
    world, rng = lending(planner=planner), Random(3)
    until(world, rng, lambda: bool(world.trained))
    want(world, plan)
    assert records(world)[0].reason == f"rollout would have 0 GPUs, and has to keep {least}"


def test_a_publication_that_was_to_be_tried_again_is_not_waited_for_once_nobody_is_left():
    world, rng = lending(), Random(3)
    until_ahead(world, rng, 8)
    world.loads_to_fail = [SERVER]
    until(world, rng, lambda: any(it.event == "reload_failed" for it in world.said))
    want(world, lent())
    assert changed(world, rng, 1).outcome == "done"
    assert world.control.publication.is_idle
    ends_well(world, rng)


def test_a_supervisor_that_comes_after_begins_with_the_server():
    world, rng = lending(), Random(3)
    borrowed(world, rng)
    memory = world.kept_plans[-1].memory
    assert memory.lent_from == ALONE
    second = lending(memory=memory, total_steps=5)
    (server,) = second.control.plans.plan.instances
    assert (server.instance_id, server.slots) == ("vllm-2", ALONE.instances[0].slots)
    assert not second.control.plans.is_busy
    ends_well(second, rng, total_steps=5)
    assert second.kept_plans[-1].memory.lent_from is None


def test_one_that_is_killed_on_the_way_back_begins_with_the_server_too():
    world, rng = lending(), Random(3)
    borrowed(world, rng)
    want(world, ALONE, 2)
    until(world, rng, lambda: "vllm-2" in world.processes)
    memory = world.kept_plans[-1].memory
    assert memory.order is not None
    second = lending(memory=memory, total_steps=5)
    assert [it.instance_id for it in second.control.plans.plan.instances] == ["vllm-2"]
    ends_well(second, rng, total_steps=5)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_server_that_is_late_on_the_way_back_stays_in_the_plan(is_ordered):
    world, rng = lending(), Random(3)
    borrowed(world, rng)
    world.is_held = lambda event: isinstance(event, events.ChildReady)
    if is_ordered:
        want(world, ALONE, 2)
    late = changed(world, rng, 2)
    assert (late.outcome, late.reason) == (
        "failed",
        "wait until vllm-2 serves: not over within 50 s",
    )
    assert [it.instance_id for it in late.plan.instances] == ["vllm-2"]
    del world.is_held
    ends_well(world, rng)
    assert len(world.reconfigurations) == 2


def test_a_replica_that_does_not_leave_in_time_keeps_its_slot_until_it_has():
    world, rng = lending(), Random(3)
    borrowed(world, rng)
    world.is_held = lambda event: isinstance(event, events.ReplicaDown)
    want(world, ALONE, 2)
    late = changed(world, rng, 2)
    assert (late.outcome, late.reason) == ("failed", "detach hybrid-1: not over within 50 s")
    assert "vllm-2" not in world.placed
    again = changed(world, rng, 3)
    assert (again.outcome, again.cause) == ("failed", "starved")
    del world.is_held
    assert changed(world, rng, 4).outcome == "done"
    ends_well(world, rng)


def test_a_server_that_cannot_come_back_ends_the_run_in_words():
    world, rng = lending(), Random(3)
    borrowed(world, rng)
    world.control.plans.lost = frozenset({(0, 0)})
    until(world, rng, lambda: world.ended is not None)
    assert world.ended.exit_code == 4
    assert "no server can come back: slot 0 is held by a process that does" in world.ended.reason


FAULTS = ["kill", "gang", "hang", "wait", "replica", "lend", "return", "drain", "undrain"]


@given(
    seed=st.integers(0, 2**32),
    doings=st.lists(st.tuples(st.integers(1, 120), st.sampled_from(FAULTS)), max_size=8),
    batches=st.integers(0, 9),
    method=st.sampled_from(["inplace", "restart"]),
    strategy=st.sampled_from(["diff", "restart_all", "blue_green"]),
    eval_rows=st.sampled_from([0, 2]),
)
@settings(max_examples=80, deadline=None)
def test_whatever_is_lent_and_whatever_dies_every_step_is_trained(
    seed, doings, batches, method, strategy, eval_rows
):
    rng = Random(seed)
    world = lending(
        total_steps=16,
        save_interval=3,
        reload_method=method,
        eval_rows=eval_rows,
        eval_interval=5,
        planner={"runtime_rollout_reconfigure_strategy": strategy},
    )
    until_ahead(world, rng, batches)
    want(world, lent())
    for number, (wait, doing) in enumerate(doings, 2):
        for _ in range(wait):
            obey_one(world, rng)
            world.step(rng)
        if world.ended is not None:
            break
        strike(world, rng, doing, number)
    if world.ended is None:
        world.post(events.DrainRequested(SERVER, drain=False))
    until(world, rng, lambda: world.ended is not None)
    if world.ended.exit_code == 4:
        assert "3 batches in a row" in world.ended.reason
        return
    assert world.ended.exit_code == 0
    assert {step for _, step, _ in world.trained} == set(range(1, 17))
    assert world.written[-1].record.step == 16


def strike(world, rng, doing, number):
    match doing:
        case "lend" | "return":
            want(world, lent() if doing == "lend" else ALONE, number)
        case "gang":
            world.lose_gang()
        case "wait":
            world.now += TIMEOUT_S
            world.post(events.Ticked())
        case "replica" if world.replicas:
            world.kill(rng.choice(sorted(world.replicas)))
        case "drain" | "undrain":
            world.post(events.DrainRequested(SERVER, drain=doing == "drain"))
        case "kill" | "hang" if world.processes:
            instance_id = rng.choice(sorted(world.processes))
            if doing == "hang":
                world.suspect_process(instance_id)
            world.kill_process(instance_id)
