"""Nodes that are lost and come back at any moment under `node_loss_policy: shrink`."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.ids import InstanceId, NodeRank, SlotId
from libra.planner.plan import Plan, TrainPlacement
from libra.pools.member import MemberState
from libra.wire.rank import RecomputeProbed
from libra_supervisor import events
from libra_supervisor.loop.cycle import Phase
from node_world import (
    FIRST_PATIENCE_S,
    HOME,
    PATIENCE_S,
    RETRY_S,
    NodeWorld,
    happens,
    instance,
    lost,
    started,
)

ONE, TWO = NodeRank(1), NodeRank(2)


def test_training_goes_on_in_a_smaller_layout_and_grows_back_at_a_step_boundary():
    world, rng = started(total_steps=14)
    lost(world, rng, TWO)
    [record] = world.records
    assert (record.cause, record.outcome) == ("node_lost", "done")
    assert record.reason == "node 2 (its lease has ended) left"
    assert (record.decision_id, record.started, record.stopped) == (0, (), ())
    assert (record.plan.train.dp, record.plan.train.slots) == (2, (1, 2))
    assert (record.plan.train.node, record.plan.train.nodes) == (1, ())
    assert world.plan_in_force == record.plan
    num_steps = len(world.trained)
    world.until(rng, lambda: len(world.trained) > num_steps + 2)
    world.join(TWO)
    world.until(rng, lambda: len(world.trained) > num_steps + 4)
    assert len(world.records) == 1
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: len(world.records) == 2)
    assert (world.records[1].cause, world.records[1].outcome) == ("node_back", "done")
    assert world.records[1].plan.train == HOME.train
    assert world.records[1].stalled_s > 0
    world.run(rng)
    assert world.ended.exit_code == 0
    steps = [step for _, step, _ in world.trained]
    assert sorted(set(steps)) == list(range(1, 15))
    # What is trained twice is what the loss took, between two checkpoints; growing costs nothing.
    attempt_of_growth = world.attempt
    first = next(step for attempt, step, _ in world.trained if attempt == attempt_of_growth)
    assert steps.count(first) == 1


def test_servers_of_a_lost_node_leave_the_plan_and_start_there_again_under_their_names():
    world, rng = started(total_steps=14)
    lost(world, rng, ONE)
    [record] = world.records
    assert record.stopped == ("vllm-2",)
    assert record.plan.train.dp == 2
    assert record.plan.train.node == 2
    assert world.servers == ["vllm-0", "vllm-1"]
    assert InstanceId("vllm-2") not in world.control.pool
    world.join(ONE)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: len(world.records) == 3)
    servers, training = world.records[1:]
    assert (servers.started, servers.plan.train.dp) == (("vllm-2",), 2)
    assert (training.outcome, training.plan) == ("done", HOME)
    assert world.control.pool[InstanceId("vllm-2")].state is MemberState.SERVING
    world.run(rng)
    assert world.ended.exit_code == 0


def test_a_node_that_is_back_before_patience_ends_changes_nothing():
    world, rng = started()
    world.lose(TWO)
    world.pass_time(PATIENCE_S - 1)
    assert not world.records
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    num_steps = len(world.trained)
    world.until(rng, lambda: len(world.trained) > num_steps)
    assert not world.records
    assert world.train == HOME.train
    world.run(rng)
    assert world.ended.exit_code == 0


def test_a_node_that_comes_and_goes_is_not_counted_on_before_it_stays():
    world, rng = started(total_steps=14)
    lost(world, rng, TWO)
    for _ in range(3):
        world.join(TWO)
        world.pass_time(PATIENCE_S - 1)
        assert "does not count on it yet" in world.control.nodes.note(TWO)
        world.lose(TWO)
        world.pass_time(PATIENCE_S)
    assert len(world.records) == 1
    assert world.control.nodes.note(TWO) == "the run goes on without it"
    assert world.control.nodes.note(ONE) == ""
    world.run(rng)
    assert world.ended.exit_code == 0


def test_only_the_ranks_of_a_plan_are_waited_for():
    home = msgspec.structs.replace(HOME, instances=(*HOME.instances, instance(3, 2, 2)))
    train = TrainPlacement(
        tp=1, pp=1, cp=1, ep=1, dp=2, slots=(SlotId(1), SlotId(2)), node=NodeRank(1)
    )
    world, rng = started(home=msgspec.structs.replace(home, train=train))
    lost(world, rng, TWO)
    [record] = world.records
    assert record.stopped == ("vllm-3",)
    assert record.plan.train == train
    assert world.attempt == 1
    world.run(rng)
    assert world.ended.exit_code == 0


def test_too_few_servers_end_the_run_once_the_node_is_given_up():
    world, _ = started(min_rollout_gpus=3)
    world.lose(ONE)
    world.pass_time(PATIENCE_S - 1)
    assert world.ended is None
    world.pass_time(1)
    assert world.ended.exit_code == 4
    assert world.ended.reason == (
        "vllm-2 went with node 1 (its lease has ended); 2 rollout GPUs are left, "
        "min_rollout_gpus is 3"
    )


def test_where_no_layout_fits_the_run_waits_for_the_node_and_says_what_was_missing():
    # TP 2 x PP 2 needs all four slots, and servers give none.
    train = msgspec.structs.replace(HOME.train, tp=2, pp=2, dp=1)
    home = msgspec.structs.replace(HOME, train=train, instances=HOME.instances[:1])
    world, rng = started(home=home)
    world.lose(TWO)
    world.pass_time(PATIENCE_S)
    world.pass_time(1)
    [said] = [it for it in world.said if it.event == "nodes_waited_for"]
    assert said.fields == {"nodes": [2], "why": "no layout of the trainer fits on 2 GPUs"}
    assert said.is_warning
    assert world.control.nodes.note(TWO) == (
        "the run waits for it: no layout of the trainer fits on 2 GPUs"
    )
    assert not world.records
    world.join(TWO)
    world.run(rng)
    assert world.ended.exit_code == 0
    assert not world.records


def test_servers_give_their_slots_to_a_core_that_has_no_other():
    train = TrainPlacement(
        tp=1, pp=1, cp=1, ep=1, dp=2, slots=(SlotId(0), SlotId(1)), node=NodeRank(2)
    )
    home = msgspec.structs.replace(HOME, train=train)
    world, rng = started(home=home, total_steps=14)
    lost(world, rng, TWO)
    [record] = world.records
    assert record.stopped == ("vllm-2",)
    assert (record.plan.train.dp, record.plan.train.node) == (1, 1)
    assert record.plan.train.slots == (0,)
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: len(world.records) == 2)
    assert world.records[1].plan == home
    assert world.records[1].started == ("vllm-2",)
    world.run(rng)
    assert world.ended.exit_code == 0


def test_a_node_that_is_lost_while_the_run_grows_back_is_given_up_again():
    world, rng = started(total_steps=14)
    lost(world, rng, TWO)
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.cycle.phase is Phase.RESHAPING)
    # The gang is not up yet: nobody hears of its loss, and it waits for the node.
    world.gang_waits = True
    world.pending = [it for it in world.pending if not isinstance(it, events.GangReady)]
    world.lose(TWO)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: len(world.records) == 3)
    overtaken, again = world.records[1:]
    assert (overtaken.outcome, overtaken.cause) == ("failed", "node_back")
    assert overtaken.reason.startswith("overtaken: node 2")
    assert (again.cause, again.outcome, again.plan.train.dp) == ("node_lost", "done", 2)
    world.run(rng)
    assert world.ended.exit_code == 0
    steps = [step for _, step, _ in world.trained]
    assert sorted(set(steps)) == list(range(1, 15))


def test_a_growth_that_fails_is_tried_again_after_a_while():
    world, rng = started(total_steps=40)
    lost(world, rng, TWO)
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.cycle.phase is Phase.RESHAPING)
    world.until(rng, lambda: world.attempt == 3)
    world.lose_gang()
    world.until(rng, lambda: len(world.records) == 2)
    assert world.records[1].outcome == "rolled_back"
    assert world.train.dp == 2
    num_steps = len(world.trained)
    world.until(rng, lambda: len(world.trained) > num_steps + 2)
    assert len(world.records) == 2
    world.pass_time(RETRY_S)
    world.until(rng, lambda: len(world.records) == 3)
    assert world.records[2].plan == HOME
    world.run(rng)
    assert world.ended.exit_code == 0


def test_both_nodes_are_lost_one_after_the_other():
    world, rng = started(total_steps=14)
    lost(world, rng, TWO)
    world.lose(ONE)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: len(world.records) == 2)
    record = world.records[1]
    # Node 0 has servers alone: one of the two gives its slot.
    assert (record.plan.train.dp, record.plan.train.node) == (1, 0)
    assert world.servers == ["vllm-0"]
    world.join(ONE)
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.plans.plan == HOME)
    world.run(rng)
    assert world.ended.exit_code == 0


def test_a_gang_that_comes_up_on_nodes_that_are_back_is_moved_at_a_step_boundary():
    world, rng = started(total_steps=14)
    world.lose(ONE)
    world.lose(TWO)
    late = (events.InstanceDrained, events.InstanceAnswered)
    world.is_held = lambda event: isinstance(event, late)
    world.pass_time(PATIENCE_S)
    # A server that gives its slot has long answers; meanwhile both nodes are there again.
    world.join(ONE)
    world.join(TWO)
    world.until(rng, lambda: world.control.ready_step is not None)
    world.is_held = lambda event: isinstance(event, events.InstanceDrained)
    world.until(rng, lambda: world.control.cycle.phase is Phase.COLLECTING)
    world.is_held = lambda event: False
    world.until(rng, lambda: world.records)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.plans.plan == HOME)
    world.run(rng)
    assert world.ended.exit_code == 0
    assert {step for _, step, _ in world.trained} == set(range(1, 15))


def test_a_leader_that_begins_without_a_node_waits_as_long_as_a_start_may_take():
    world, rng = NodeWorld(), Random(1)
    world.boot(nodes=(1,))
    while world.step(rng):
        pass
    world.pass_time(FIRST_PATIENCE_S - 5)
    assert world.control.plans.change is None
    world.pass_time(5)
    world.until(rng, lambda: world.records)
    assert world.records[0].plan.train.dp == 2
    assert world.records[0].reason == "node 2 left"
    world.run(rng)
    assert world.ended.exit_code == 0


def test_a_server_that_was_given_up_is_not_started_by_the_loss_of_a_node():
    world, rng = started(total_steps=14)
    gone = InstanceId("vllm-1")
    world._end_process(gone, is_asked_for=False)
    world.post(events.ChildGaveUp("vllm-1", "5 restarts", "it crashes", 5, (), world.now))
    assert not world.records
    lost(world, rng, TWO)
    assert world.records[0].stopped == (gone,)
    assert world.servers == ["vllm-0", "vllm-2"]
    world.run(rng)
    assert world.ended.exit_code == 0
    assert gone not in world.processes


def test_what_a_later_supervisor_needs_is_the_plan_with_every_node():
    world, rng = started(total_steps=14)
    assert not world.kept_plans
    lost(world, rng, TWO)
    assert world.kept_plans[-1].memory.home == HOME
    assert isinstance(world.kept_plans[-1].memory.plan, Plan)


def test_a_run_that_is_stopping_begins_no_change():
    world, rng = started()
    world.lose(TWO)
    world.post(events.StopRequested("an operator", now=False))
    assert world.ended.exit_code == 0
    world, rng = started()
    lost(world, rng, TWO)
    world.post(events.StopRequested("an operator", now=False))
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    world.run(rng)
    assert world.ended.exit_code == 0
    assert len(world.records) == 1


def probed(world, rng):
    """Every rank of the gang says what its pass took."""
    num_before = len(world.judged)
    for rank in range(world.train.world_size):
        world.post(
            events.RankSaid(
                world.attempt, RecomputeProbed(rank=rank, before_bytes=1, peak_bytes=2, error="")
            )
        )
    assert len(world.judged) == num_before + 1
    return world.judged[-1]


def probing():
    """A run whose ranks were probed, and trained, before it lost node 2."""
    world, rng = NodeWorld(num_probes=4, total_steps=14, min_rollout_gpus=2), Random(1)
    world.boot()
    assert probed(world, rng).forced is None
    world.post(events.ProbeJudged(world.attempt, "kept", "it fits"))
    world.until(rng, lambda: len(world.trained) > 1)
    num_trained = len(world.trained)
    lost(world, rng, TWO)
    while world.step(rng):
        pass
    assert len(world.trained) == num_trained, "it trains before it has been probed"
    return world, rng


def test_a_layout_that_a_loss_forced_is_probed_before_it_trains_and_only_once():
    world, rng = probing()
    assert probed(world, rng).forced == world.records[0].plan.train
    world.post(events.ProbeJudged(world.attempt, "kept", "it fits"))
    num_trained = len(world.trained)
    world.until(rng, lambda: len(world.trained) > num_trained)
    world.lose_gang()
    num_trained = len(world.trained)
    world.until(rng, lambda: len(world.trained) > num_trained)
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.plans.plan == HOME)
    # Both layouts are known by now.
    lost(world, rng, TWO)
    num_trained = len(world.trained)
    world.until(rng, lambda: len(world.trained) > num_trained)
    world.run(rng)
    assert world.ended.exit_code == 0
    assert len(world.judged) == 2


def test_a_forced_layout_that_does_not_fit_gives_way_to_another_or_the_node_is_waited_for():
    world, rng = probing()
    probed(world, rng)
    world.post(events.ProbeJudged(world.attempt, "refused", "TP1 PP1 DP2: does not fit"))
    world.until(rng, lambda: world.train.dp == 1)
    while world.step(rng):
        pass
    assert probed(world, rng).forced.dp == 1
    world.post(events.ProbeJudged(world.attempt, "refused", "TP1 PP1 DP1: does not fit"))
    while world.step(rng):
        pass
    assert "did not fit its recompute probe" in world.control.nodes.note(TWO)
    num_trained = len(world.trained)
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.plans.plan == HOME)
    world.until(rng, lambda: len(world.trained) > num_trained)
    world.run(rng)
    assert world.ended.exit_code == 0
    assert {step for _, step, _ in world.trained} == set(range(1, 15))


FAULTS = ["lose", "join", "kill", "gang", "time", "steps"]


@given(
    seed=st.integers(0, 2**32),
    doings=st.lists(
        st.tuples(st.sampled_from(FAULTS), st.integers(1, 60), st.sampled_from([ONE, TWO])),
        max_size=14,
    ),
    method=st.sampled_from(["inplace", "restart"]),
    patience_s=st.sampled_from([0.0, PATIENCE_S]),
)
@settings(max_examples=150, deadline=None)
def test_whatever_leaves_and_returns_no_slot_has_two_owners_and_every_step_is_trained(
    seed, doings, method, patience_s
):
    rng = Random(seed)
    world = NodeWorld(reload_method=method, total_steps=8, patience_s=patience_s)
    world.boot()
    for doing, count, node in doings:
        if world.ended is not None:
            break
        happens(world, rng, doing, count, node)
    for node in (ONE, TWO):
        if node not in world.there and world.ended is None:
            world.join(node)
    world.run_out(rng)
    assert world.ended is not None, (world.control.cycle.phase, world.control.plans.change)
    assert world.ended.exit_code in (0, 4)
    if world.ended.exit_code == 4:
        assert "3 batches in a row" in world.ended.reason
        return
    assert {step for _, step, _ in world.trained} == set(range(1, 9))


pytestmark = pytest.mark.timeout(120)
