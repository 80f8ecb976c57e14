"""Plans that are changed over several nodes while nodes are lost and come back at any moment."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_nodes import ElasticNodeWorld
from libra.config.rollout import TpBucket
from libra.ids import InstanceId, NodeRank
from libra.planner.matching import slots_of
from libra_supervisor import events
from node_world import HOME, PATIENCE_S, TIMEOUT_S, happens

ONE, TWO = NodeRank(1), NodeRank(2)
pytestmark = pytest.mark.timeout(120)


def started(**options):
    world, rng = ElasticNodeWorld(**{"total_steps": 30, "batch_size": 24, **options}), Random(1)
    world.boot()
    world.until(rng, lambda: len(world.trained) > 1)
    return world, rng


def serving(count):
    return {"instances": (TpBucket(tp=1, count=count),)}


def until_records(world, rng, count, *, waits=False):
    world.until(rng, lambda: len(world.records) == count, waits=waits)
    return world.records[-1]


def outcomes(world):
    return [(it.cause, it.outcome) for it in world.records]


def test_servers_join_and_leave_on_any_node_and_the_core_grows_and_shrinks_over_nodes():
    world, rng = started()
    world.order(instances=(TpBucket(tp=1, count=5),))
    record = until_records(world, rng, 1)
    assert record.outcome == "done", record.reason
    assert [(it.node, it.slots) for it in record.plan.instances[3:]] == [(0, (2,)), (0, (3,))]
    # Where a server is, a replica or a larger core may be next.
    world.order(2, train_gpus=6, instances=(TpBucket(tp=1, count=3),))
    record = until_records(world, rng, 2)
    assert record.outcome == "done", record.reason
    assert record.plan.train.dp == 6
    assert set(record.plan.train.nodes) == {ONE, TWO}
    world.order(3, train_gpus=2, **serving(3))
    record = until_records(world, rng, 3)
    assert (record.outcome, record.plan.train.dp) == ("done", 2)
    assert world.train == record.plan.train
    world.run(rng)
    assert world.ended.exit_code == 0
    assert {step for _, step, _ in world.trained} == set(range(1, 31))


def test_replicas_join_on_a_follower_and_a_change_of_the_core_ends_them():
    world, rng = started()
    world.order(hybrids=2)
    record = until_records(world, rng, 1)
    assert record.attached == ("hybrid-3", "hybrid-4")
    assert {node for it in record.plan.hybrids for node in world.nodes_of(it)} == {TWO}
    world.order(2, train_gpus=2, hybrids=1)
    record = until_records(world, rng, 2)
    assert (record.outcome, record.attached) == ("done", ("hybrid-5",))
    assert set(world.replicas) == {"hybrid-5"}


def test_a_replica_ends_with_its_node_and_nothing_else_does():
    world, rng = started()
    # A core on node 1 alone, its replica on node 2.
    world.order(train_gpus=2, **serving(3))
    until_records(world, rng, 1)
    world.order(2, hybrids=1)
    record = until_records(world, rng, 2)
    assert {node for it in record.plan.hybrids for node in world.nodes_of(it)} == {TWO}
    attempt, num_trained = world.attempt, len(world.trained)
    world.lose(TWO)
    world.until(rng, lambda: len(world.trained) > num_trained + 2)
    assert world.attempt == attempt
    assert not world.replicas
    assert world.control.plans.plan.hybrids == ()
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: len(world.trained) > num_trained + 4)
    # Nothing that the run is made of was there: the plan goes on without the replica.
    [_, _, lost] = world.records
    assert (lost.cause, lost.outcome, lost.transitions) == ("replica_lost", "failed", ())
    assert "idle" not in lost.reason, "the device is not there"
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: len(world.trained) > num_trained + 6)
    assert len(world.records) == 3
    world.order(3, hybrids=1)
    assert until_records(world, rng, 4).attached == ("hybrid-4",)


def test_the_loss_of_another_node_leaves_replicas_where_the_core_goes_on():
    world, rng = started()
    world.order(train_gpus=2, instances=(TpBucket(tp=1, count=4),))
    until_records(world, rng, 1)
    world.order(2, hybrids=1)
    until_records(world, rng, 2)
    [name] = world.replicas
    assert world.nodes_of(world.replicas[name]) == {TWO}
    world.order(3, instances=(TpBucket(tp=1, count=2),))
    until_records(world, rng, 3)
    assert set(world.replicas) == {name}


def test_a_decided_plan_is_what_the_run_grows_back_to():
    world, rng = started(total_steps=60)
    world.order(train_gpus=3, **serving(4))
    decided = until_records(world, rng, 1).plan
    world.lose(TWO)
    world.pass_time(PATIENCE_S)
    record = until_records(world, rng, 2)
    assert (record.cause, record.plan.train.dp) == ("node_lost", 2)
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.plans.plan == decided)
    assert set(outcomes(world)[2:]) == {("node_back", "done")}
    world.run(rng)
    assert world.ended.exit_code == 0


def test_a_plan_that_is_decided_without_a_node_stays_when_it_is_back():
    world, rng = started(total_steps=60)
    world.lose(TWO)
    world.pass_time(PATIENCE_S)
    until_records(world, rng, 1)
    num_trained = len(world.trained)
    world.until(rng, lambda: len(world.trained) > num_trained)
    world.order(train_gpus=1, **serving(3))
    decided = until_records(world, rng, 2).plan
    assert world.records[-1].outcome == "done", world.records[-1].reason
    assert TWO not in {node for node, _ in slots_of(decided)}
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    num_trained = len(world.trained)
    world.until(rng, lambda: len(world.trained) > num_trained + 3)
    assert world.control.plans.plan == decided
    assert outcomes(world) == [("node_lost", "done"), ("decision", "done")]
    # Its slots are there for whoever asks next.
    world.order(3, train_gpus=4)
    assert until_records(world, rng, 3).plan.train.dp == 4


def test_a_change_under_way_is_given_up_when_the_loss_of_its_node_is_settled():
    world, rng = started()
    held = InstanceId("vllm-3")
    world.is_held = lambda event: getattr(event, "child_id", None) == held
    world.want(with_server_on(world, TWO))
    world.until(rng, lambda: held in world.processes)
    world.lose(TWO)
    world.pass_time(PATIENCE_S)
    until_records(world, rng, 2)
    given_up, loss = world.records
    assert (given_up.outcome, given_up.cause) == ("failed", "decision")
    assert given_up.reason == "overtaken: node 2 (its lease has ended) left"
    assert (loss.cause, loss.outcome, loss.plan.train.dp) == ("node_lost", "done", 2)
    assert held not in world.placed
    world.is_held = lambda event: False
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.plans.plan == HOME)
    world.run(rng)
    assert world.ended.exit_code == 0


def with_server_on(world, node):
    """The plan in force and one more server on a slot of the node that nobody has."""
    plan = world.control.plans.plan
    held = set(slots_of(plan))
    free = next(it for it in world.control.plans.policy.slots if it[0] == node and it not in held)
    new = msgspec.structs.replace(
        plan.instances[0], instance_id=InstanceId("x"), node=node, slots=(free[1],)
    )
    return msgspec.structs.replace(plan, instances=(*plan.instances, new))


def test_a_change_that_does_not_need_the_lost_node_goes_on():
    world, rng = started(total_steps=60)
    # The core on node 1 alone: node 2 has nothing of the run.
    world.order(train_gpus=2, **serving(3))
    until_records(world, rng, 1)
    held = InstanceId("vllm-3")
    world.is_held = lambda event: getattr(event, "child_id", None) == held
    world.want(with_server_on(world, NodeRank(0)), 2)
    world.until(rng, lambda: held in world.processes)
    world.lose(TWO)
    world.pass_time(PATIENCE_S)
    world.is_held = lambda event: False
    record = until_records(world, rng, 2)
    assert (record.cause, record.outcome) == ("decision", "done")
    assert world.control.plans.plan.instances[-1].instance_id == held


def test_in_a_run_that_waits_for_a_node_the_change_does_too():
    world, rng = started(waits=True, total_steps=60)
    held = InstanceId("vllm-3")
    world.is_held = lambda event: getattr(event, "child_id", None) == held
    world.want(with_server_on(world, TWO))
    world.until(rng, lambda: held in world.processes)
    world.lose(TWO)
    for _ in range(5):
        world.pass_time(TIMEOUT_S)
    assert not world.records
    world.is_held = lambda event: False
    world.join(TWO)
    record = until_records(world, rng, 1)
    assert (record.outcome, record.plan.instances[-1].node) == ("done", TWO)
    world.run(rng)
    assert world.ended.exit_code == 0
    assert {step for _, step, _ in world.trained} == set(range(1, 61))


def test_a_core_that_is_lost_while_the_change_turns_round_is_started_as_it_was():
    """It is started anew before the servers of the plan before are, so it never gets to a step."""
    world, rng = started(
        total_steps=60, planner={"runtime_rollout_reconfigure_strategy": "restart_all"}
    )
    world.joins = False
    world.order(train_gpus=2, hybrids=1)
    world.until(rng, lambda: world.replicas)
    world.is_held = lambda event: isinstance(event, events.GangReady)
    world.lose_gang()
    world.until(rng, lambda: not world.placed)
    world.is_held = lambda event: False
    record = until_records(world, rng, 1)
    assert (record.outcome, record.plan) == ("rolled_back", HOME)
    assert record.reason == "hybrid-6 was lost: the core was lost"
    world.run(rng)
    assert world.ended.exit_code == 0


@pytest.mark.parametrize("waits", [False, True])
def test_nothing_is_decided_while_the_run_waits_for_a_node(waits):
    world, rng = started(waits=waits)
    world.order(train_gpus=2, **serving(3))
    until_records(world, rng, 1)
    world.want(with_server_on(world, TWO), 2)
    until_records(world, rng, 2)
    world.lose(TWO)
    world.want(with_server_on(world, NodeRank(0)), 3)
    assert world.records[-1].outcome == "refused"
    assert world.records[-1].reason == "the run waits: node 2 is away"


def test_no_plan_is_made_for_a_node_that_is_away_or_has_just_come_back():
    world, rng = started()
    wanted = with_server_on(world, TWO)
    world.lose(TWO)
    world.pass_time(PATIENCE_S)
    until_records(world, rng, 1)
    num_trained = len(world.trained)
    world.until(rng, lambda: len(world.trained) > num_trained)
    world.want(wanted)
    assert world.records[-1].reason == "node 2 is away"
    world.join(TWO)
    world.want(wanted, 2)
    assert world.records[-1].reason == "node 2 is not counted on yet"
    assert {node for node, _ in world.control.plans.unusable} == {TWO}


def test_a_failed_change_leaves_nothing_out_for_good_in_a_run_that_shrinks():
    world, rng = started(total_steps=80)
    # Its devices are not free in time, and on the way back neither: then it comes anyhow.
    world.is_held = lambda event: isinstance(event, events.InstanceRetired)
    world.want(with_server_on_slot_of(world, "vllm-2"))
    world.until(rng, lambda: any(isinstance(it, events.InstanceRetired) for it in world.pending))
    world.pass_time(TIMEOUT_S + 1)
    world.pass_time(TIMEOUT_S + 1)
    record = until_records(world, rng, 1)
    assert record.outcome == "failed"
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended.exit_code == 0


def with_server_on_slot_of(world, name):
    plan = world.control.plans.plan
    old = next(it for it in plan.instances if it.instance_id == name)
    other = msgspec.structs.replace(old, instance_id=InstanceId("x"), tp=2, slots=(old.slots[0], 3))
    kept = tuple(it for it in plan.instances if it != old)
    return msgspec.structs.replace(plan, instances=(*kept, other))


FAULTS = ["lose", "join", "kill", "gang", "time", "steps", "order", "order", "joins"]
NAMED = st.fixed_dictionaries(
    {},
    optional={
        "instances": st.integers(1, 4).map(lambda n: (TpBucket(tp=1, count=n),)),
        "hybrids": st.integers(0, 2),
        "train_gpus": st.sampled_from([1, 2, 4]),
    },
)


anything = given(
    seed=st.integers(0, 2**32),
    doings=st.lists(
        st.tuples(st.sampled_from(FAULTS), st.integers(1, 60), st.sampled_from([ONE, TWO]), NAMED),
        max_size=20,
    ),
    method=st.sampled_from(["inplace", "restart"]),
    patience_s=st.sampled_from([0.0, PATIENCE_S]),
    waits=st.booleans(),
    strategy=st.sampled_from(["diff", "restart_all", "blue_green"]),
)


@anything
@settings(max_examples=60, deadline=None)
def test_whatever_is_lost_returns_and_is_wanted_no_slot_is_booked_twice_and_every_step_is_trained(
    seed, doings, method, patience_s, waits, strategy
):
    _live_through(world_with(method, patience_s, waits, strategy), Random(seed), doings)


@pytest.mark.long
@pytest.mark.timeout(1800)
@anything
@settings(max_examples=2000, deadline=None)
def test_the_same_for_long(seed, doings, method, patience_s, waits, strategy):
    _live_through(world_with(method, patience_s, waits, strategy), Random(seed), doings)


def world_with(method, patience_s, waits, strategy):
    return ElasticNodeWorld(
        reload_method=method,
        total_steps=12,
        batch_size=24,
        patience_s=patience_s,
        waits=waits,
        planner={"runtime_rollout_reconfigure_strategy": strategy},
    )


def _live_through(world, rng, doings):
    world.boot()
    if rng.random() < 0.7:
        world.until(rng, lambda: world.trained)
    for number, (doing, count, node, named) in enumerate(doings):
        if world.ended is not None:
            break
        _do(world, rng, doing, count, node, named, number)
    for node in (ONE, TWO):
        if node not in world.there and world.ended is None:
            world.join(node)
    world.joins = True
    world.run_out(rng)
    assert world.ended is not None, (world.control.cycle.phase, world.control.plans.change)
    assert world.ended.exit_code in (0, 4)
    if world.ended.exit_code == 4:
        assert "GPUs" in world.ended.reason
        return
    assert {step for _, step, _ in world.trained} == set(range(1, 13))


def _do(world, rng, doing, count, node, named, number):  # noqa: PLR0913, PLR0917
    match doing:
        case "order":
            world.order(number + 1, **named)
        case "joins":
            world.joins = not world.joins
        case _:
            happens(world, rng, doing, count, node)
