"""Plans that an operator names."""

import tracemalloc

import pytest
from msgspec.structs import replace

from libra.config.rollout import TpBucket
from libra.errors import InfeasiblePlanError
from libra.ids import InstanceId, NodeRank, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, TrainPlacement
from libra.planner.replan_order import kind_of, ordered_plan
from libra.planner.replan_seating import Room
from libra.wire.api import PlanOrder


def instance(number, *slots, node=0):
    return InstancePlacement(
        instance_id=InstanceId(f"vllm-{number}"),
        tp=len(slots),
        slots=tuple(map(SlotId, slots)),
        node=NodeRank(node),
    )


def core(*slots, tp=1, **rest):
    placed = tuple(map(SlotId, slots))
    return TrainPlacement(tp=tp, pp=1, cp=1, ep=1, dp=len(slots) // tp, slots=placed, **rest)


def plan_of(train, *instances, hybrids=()):
    return Plan(strategy="configured", train=train, instances=instances, hybrids=hybrids)


PLAN = plan_of(core(4, 5), instance(0, 0), instance(1, 1), instance(2, 2), instance(3, 3))
ROOM = Room(num_gpus=6, gpus_per_node=6)


def ordered(plan=PLAN, room=ROOM, **named):
    return ordered_plan(plan, PlanOrder(**named), room)


def buckets(*pairs):
    return tuple(TpBucket(count=count, tp=tp) for count, tp in pairs)


def held_by(plan):
    return [
        *plan.train.slots,
        *(slot for it in (*plan.instances, *plan.hybrids) for slot in it.slots),
    ]


def test_what_is_not_named_stays_as_it_is():
    assert ordered() == PLAN
    fewer = ordered(instances=buckets((2, 1)))
    assert fewer == replace(PLAN, instances=PLAN.instances[:2])


def test_a_replica_has_the_cores_layout_on_slots_that_instances_left():
    found = ordered(instances=buckets((3, 1)), hybrids=1)
    assert found.train == PLAN.train
    assert found.instances == PLAN.instances[:3]
    assert [it.slots for it in found.hybrids] == [(3,)]
    pair = ordered(plan_of(core(4, 5, tp=2), *PLAN.instances), instances=buckets((2, 1)), hybrids=1)
    assert [it.slots for it in pair.hybrids] == [(2, 3)]


def test_replicas_that_are_there_stay_and_go_with_another_layout_of_the_core():
    replica = HybridPlacement(replica_id=ReplicaId("hybrid-7"), slots=(SlotId(3),))
    plan = plan_of(core(4, 5), instance(0, 0), hybrids=(replica,))
    more = ordered(plan, hybrids=2)
    assert more.hybrids[0] == replica
    assert len(more.hybrids) == 2
    split = ordered(plan, train_tp_size=2)
    assert (split.train.tp, split.train.dp, split.train.slots) == (2, 1, (4, 5))
    assert [len(it.slots) for it in split.hybrids] == [2]
    assert ordered(plan, hybrids=0).hybrids == ()


def test_a_core_that_grows_keeps_its_slots_and_takes_idle_ones_before_those_of_instances():
    plan = plan_of(core(4, 5), instance(0, 0), instance(1, 1), instance(2, 2))
    grown = ordered(plan, train_gpus=4, instances=buckets((2, 1)))
    assert grown.train.slots == (4, 5, 3, 2)
    assert grown.train.dp == 4
    assert [it.instance_id for it in grown.instances] == ["vllm-0", "vllm-1"]
    shrunk = ordered(plan, train_gpus=1)
    assert shrunk.train.slots == (4,)


def test_a_core_grows_on_its_own_node_first_and_says_where_its_ranks_are():
    train = core(2, 3, node=NodeRank(1))
    plan = plan_of(train, instance(0, 0), instance(1, 1), instance(2, 0, node=1))
    room = Room(num_gpus=8, gpus_per_node=4)
    near = ordered(plan, room, train_gpus=3)
    assert (near.train.slots, near.train.node, near.train.nodes) == ((2, 3, 1), 1, ())
    far = ordered(plan, room, train_gpus=4, instances=buckets((2, 1)))
    assert (far.train.slots, far.train.nodes) == ((2, 3, 1, 0), ())
    wide = ordered(plan, room, train_gpus=6, instances=buckets((2, 1)))
    assert wide.train.nodes == (1, 1, 1, 1, 0, 0)
    assert wide.train.slots == (2, 3, 1, 0, 2, 3)


def test_nobody_shares_a_slot():
    found = ordered(train_gpus=3, instances=buckets((1, 2)), hybrids=1)
    assert sorted(held_by(found)) == sorted(set(held_by(found)))


def test_lost_slots_are_not_used():
    room = Room(num_gpus=5, gpus_per_node=6, lost=frozenset({(NodeRank(0), SlotId(3))}))
    plan = replace(PLAN, instances=PLAN.instances[:3])
    with pytest.raises(InfeasiblePlanError, match="needs 6 GPUs, and the run has 5"):
        ordered(plan, room, hybrids=1)
    assert [it.slots for it in ordered(plan, room, instances=buckets((2, 1)), hybrids=1).hybrids]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"train_tp_size": 3}, "train_gpus 2 is not a multiple of TP x PP x CP = 3"),
        ({"train_gpus": 7}, "train_gpus 7, and the run has 6 GPUs"),
        ({"hybrids": 1}, "this needs 7 GPUs, and the run has 6"),
        ({"instances": buckets((1, 5))}, "this needs 7 GPUs, and the run has 6"),
    ],
)
def test_what_does_not_fit_is_said(named, words):
    with pytest.raises(InfeasiblePlanError, match=words):
        ordered(**named)


def test_an_order_of_a_million_servers_is_refused_before_they_are_counted_out():
    tracemalloc.start()
    try:
        with pytest.raises(InfeasiblePlanError, match="this needs 1000002 GPUs"):
            ordered(instances=buckets((1_000_000, 1)))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_node_boundaries_are_said():
    plan = plan_of(core(0), instance(0, 1), instance(1, 0, node=1))
    room = Room(num_gpus=4, gpus_per_node=2)
    with pytest.raises(InfeasiblePlanError, match="node boundaries"):
        ordered(plan, room, instances=buckets((1, 3)))


def test_the_kind_of_a_change_is_that_of_its_largest_part():
    lent = ordered(instances=buckets((3, 1)), hybrids=1)
    assert kind_of(PLAN, lent) == "to_training"
    assert kind_of(lent, PLAN) == "to_rollout"
    assert kind_of(PLAN, ordered(instances=buckets((1, 1)))) == "rollout"
    assert kind_of(PLAN, ordered(train_gpus=1, hybrids=1)) == "reshape"


def test_servers_of_others_stay_beside_a_replica():
    theirs = InstancePlacement(instance_id=InstanceId("vllm-0"), tp=2, slots=())
    plan = plan_of(core(0), theirs)
    found = ordered(plan, Room(num_gpus=2, gpus_per_node=2), hybrids=1)
    assert found.instances == (theirs,)
    assert [it.slots for it in found.hybrids] == [(1,)]
