"""Plans that an operator orders over several nodes, matched with the one before."""

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from libra.config.rollout import TpBucket
from libra.errors import InfeasiblePlanError
from libra.ids import InstanceId, NodeRank, ReplicaId, SlotId
from libra.planner.groups import seats_of_groups
from libra.planner.matching import matched, slots_of
from libra.planner.placement import place
from libra.planner.plan import (
    HybridPlacement,
    InstancePlacement,
    Plan,
    TrainPlacement,
    slots_in_words,
    with_hybrids_in_core,
)
from libra.planner.replan_order import ordered_plan
from libra.planner.replan_seating import Room
from libra.planner.train_layout import TrainLayout
from libra.pools.change_order import Rules, Stuck, transitions
from libra.pools.ground import Ground, Hybrid, Server, Stage
from libra.wire.api import PlanOrder


def slot(node, number):
    return NodeRank(node), SlotId(number)


def nodes_of(placement):
    return placement.nodes or (placement.node,) * len(placement.slots)


def groups_of(placement, tp):
    seats = list(zip(nodes_of(placement), placement.slots, strict=True))
    return [seats[first : first + tp] for first in range(0, len(seats), tp)]


def num_agents(placement):
    """One starts the ranks that follow each other on a node."""
    nodes = nodes_of(placement)
    return sum(k == 0 or node != nodes[k - 1] for k, node in enumerate(nodes))


@st.composite
def orders(draw):
    """(plan in force, order, room)."""
    num_nodes, per_node = draw(st.integers(2, 3)), draw(st.integers(2, 4))
    num_gpus = num_nodes * per_node
    tp, dp = draw(st.sampled_from([1, 1, 2])), draw(st.integers(1, 3))
    layout = TrainLayout(tp=tp, ep=1, pp=1, cp=1, dp=dp, micro_batch_size=1)
    tps = draw(st.lists(st.sampled_from([1, 1, 2]), min_size=1, max_size=4))
    plan = place(layout, tps, num_gpus=num_gpus, gpus_per_node=per_node)
    assume(plan is not None)
    free = sorted(set(every_slot(num_gpus, per_node)) - set(slots_of(plan)))
    lost = draw(st.sets(st.sampled_from(free), max_size=2)) if free else set()
    room = Room(num_gpus=num_gpus - len(lost), gpus_per_node=per_node, lost=frozenset(lost))
    for number in range(draw(st.integers(0, 2))):
        plan = tried(plan, PlanOrder(hybrids=number + 1), room) or plan
    counts = draw(st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(1, 3)), max_size=2))
    order = PlanOrder(
        instances=tuple(TpBucket(tp=it, count=n) for it, n in counts) or None,
        hybrids=draw(st.none() | st.integers(0, 2)),
        train_gpus=draw(st.none() | st.integers(1, 5)),
        train_tp_size=draw(st.none() | st.sampled_from([1, 2])),
    )
    return plan, order, room


def every_slot(num_gpus, per_node):
    return [slot(*divmod(number, per_node)) for number in range(num_gpus)]


def tried(plan, order, room):
    try:
        return ordered_plan(plan, order, room)
    except InfeasiblePlanError:
        return None


@given(drawn=orders(), has_spare=st.booleans(), keeps=st.booleans())
def test_whatever_is_ordered_groups_stay_in_a_node_and_no_slot_is_booked_twice(
    drawn, has_spare, keeps
):
    plan, order, room = drawn
    wanted = tried(plan, order, room)
    assume(wanted is not None)
    there = set(every_slot(room.num_gpus + len(room.lost), room.gpus_per_node)) - room.lost
    spare = sorted(there - set(slots_of(plan))) if has_spare else ()
    found = matched(plan, wanted, next_number=100, spare=spare, keeps_instances=keeps)
    used = slots_of(found)
    assert len(used) == len(set(used)) == len(slots_of(wanted))
    assert set(used) <= there
    for placement in (found.train, *found.hybrids):
        for group in groups_of(placement, found.train.tp):
            assert len({node for node, _ in group}) == 1
        assert num_agents(placement) == len(set(nodes_of(placement)))
        assert bool(placement.nodes) == (len(set(nodes_of(placement))) > 1)
    before = {it.instance_id: it for it in plan.instances}
    for it in found.instances:
        assert before.get(it.instance_id, it) == it
        assert keeps or it.instance_id not in before
    kept = {it.replica_id for it in plan.hybrids} & {it.replica_id for it in found.hybrids}
    assert not kept or plan.train == found.train
    merged = with_hybrids_in_core(found)
    assert sorted(slots_of(merged)) == sorted(used)
    assert num_agents(merged.train) == len(set(nodes_of(merged.train)))
    for group in groups_of(merged.train, merged.train.tp):
        assert len({node for node, _ in group}) == 1


@given(drawn=orders())
def test_what_is_ordered_over_several_nodes_is_reached(drawn):
    plan, order, room = drawn
    wanted = tried(plan, order, room)
    assume(wanted is not None)
    found = matched(plan, wanted, next_number=100)
    ground = Ground(
        train=plan.train,
        servers=tuple(Server(it, Stage.SERVING) for it in plan.instances),
        hybrids=tuple(Hybrid(it, is_member=True) for it in plan.hybrids),
        lost=room.lost,
    )
    listed = transitions(ground, found, Rules(min_rollout_gpus=0))
    assert not isinstance(listed, Stuck), listed.reason


def instance(name, tp, node, *slots):
    return InstancePlacement(
        instance_id=InstanceId(name), tp=tp, slots=tuple(map(SlotId, slots)), node=NodeRank(node)
    )


def core(*slots, tp=1):
    nodes = tuple(node for node, _ in slots)
    return TrainPlacement(
        tp=tp, pp=1, cp=1, ep=1, dp=len(slots) // tp,
        slots=tuple(number for _, number in slots), node=nodes[0],
        nodes=() if len(set(nodes)) == 1 else nodes,
    )  # fmt: skip


def test_a_core_that_grows_where_it_was_has_one_agent_on_each_node():
    plan = Plan(
        strategy="grp",
        train=core(slot(1, 1), slot(2, 0), slot(2, 1)),
        instances=(instance("vllm-0", 1, 0, 0),),
    )
    grown = tried(plan, PlanOrder(train_gpus=4), Room(num_gpus=6, gpus_per_node=2))
    assert (grown.train.nodes, grown.train.slots) == ((1, 1, 2, 2), (1, 0, 0, 1))


def test_a_new_instance_goes_to_spare_slots_of_its_own_node_rather_than_another_s():
    old = Plan(
        strategy="grp",
        train=core(slot(1, 0)),
        instances=(instance("vllm-0", 2, 1, 1, 2), instance("vllm-1", 1, 0, 0)),
    )
    wanted = msgspec.structs.replace(
        old, instances=(instance("a", 1, 1, 1), instance("b", 1, 1, 2), instance("c", 2, 0, 0, 1))
    )
    spare = (slot(0, 3), slot(1, 5), slot(2, 0), slot(2, 1))
    got = matched(old, wanted, next_number=7, spare=spare)
    assert [(it.instance_id, it.node, it.slots) for it in got.instances] == [
        ("vllm-7", 1, (5,)),
        ("vllm-8", 0, (3,)),
        ("vllm-9", 2, (0, 1)),
    ]
    # Without spare ones they take the slots of those that go.
    bare = matched(old, wanted, next_number=7)
    assert [(it.node, it.slots) for it in bare.instances] == [(1, (1,)), (1, (2,)), (0, (0, 1))]


def test_a_replica_of_a_core_that_starts_anew_gets_another_name():
    name = ReplicaId("hybrid-4")
    replica = HybridPlacement(replica_id=name, slots=(SlotId(3),), node=NodeRank(1))
    old = Plan(strategy="grp", train=core(slot(1, 0)), instances=(), hybrids=(replica,))
    assert matched(old, old, next_number=7).hybrids == (replica,)
    moved = msgspec.structs.replace(old, train=core(slot(1, 1)))
    [found] = matched(old, moved, next_number=7).hybrids
    assert (found.replica_id, found.slots) == ("hybrid-7", (3,))


def test_groups_take_what_comes_first_and_cross_nodes_only_where_they_fit_into_none():
    slots = [slot(1, 3), slot(0, 0), slot(1, 1), slot(0, 2), slot(2, 0)]
    assert seats_of_groups(2, 2, slots) == (slot(1, 3), slot(1, 1))
    assert seats_of_groups(2, 4, slots) == (slot(1, 3), slot(1, 1), slot(0, 0), slot(0, 2))
    assert seats_of_groups(4, 4, slots) is None
    assert seats_of_groups(4, 4, slots, crosses_nodes=True) == tuple(sorted(slots[:4]))
    assert seats_of_groups(2, 6, slots, crosses_nodes=True) is None


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ([slot(0, 3)], "3"),
        ([slot(0, 0), slot(0, 2)], "0, 2"),
        ([slot(1, 0)], "0 of node 1"),
        ([slot(0, 1), slot(2, 0), slot(2, 1)], "1 of node 0, 0, 1 of node 2"),
    ],
)
def test_slots_are_named_with_their_node_where_there_are_several(slots, words):
    assert slots_in_words(slots) == words
