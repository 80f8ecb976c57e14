from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from libra.ids import InstanceId, NodeRank, ReplicaId, SlotId
from libra.planner.matching import matched, slots_of
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, TrainPlacement

NUM_SLOTS = 12


def train(dp: int, slots, tp: int = 1) -> TrainPlacement:
    return TrainPlacement(tp=tp, pp=1, cp=1, ep=1, dp=dp, slots=tuple(map(SlotId, slots)))


@st.composite
def plans(draw, *, prefix: str = "vllm"):
    """Any plan on one node of NUM_SLOTS slots, drawn anywhere on it."""
    order = draw(st.permutations(range(NUM_SLOTS)))
    tp = draw(st.sampled_from([1, 2]))
    dp = draw(st.integers(1, 2))
    used = tp * dp
    core = train(dp, order[:used], tp)
    hybrids = []
    for index in range(draw(st.integers(0, 2))):
        slots = tuple(map(SlotId, order[used : used + tp]))
        hybrids.append(HybridPlacement(replica_id=ReplicaId(f"hybrid-{50 + index}"), slots=slots))
        used += tp
    instances = []
    for degree in draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=6)):
        if used + degree > NUM_SLOTS:
            break
        slots = tuple(map(SlotId, order[used : used + degree]))
        used += degree
        instance_id = InstanceId(f"{prefix}-{len(instances)}")
        instances.append(InstancePlacement(instance_id=instance_id, tp=degree, slots=slots))
    return Plan(strategy="grp", train=core, instances=tuple(instances), hybrids=tuple(hybrids))


def degrees(plan: Plan) -> Counter[int]:
    return Counter(it.tp for it in plan.instances)


@given(old=plans(), new=plans(prefix="other"))
def test_as_many_instances_stay_untouched_as_both_plans_have_of_a_degree(old, new):
    got = matched(old, new, next_number=100)
    assert degrees(got) == degrees(new)
    before = {it.instance_id: it for it in old.instances}
    stays = [it for it in got.instances if it.instance_id in before]
    assert all(it == before[it.instance_id] for it in stays)
    assert Counter(it.tp for it in stays) == degrees(old) & degrees(new)
    fresh = [it.instance_id for it in got.instances if it.instance_id not in before]
    assert all(int(name.split("-")[1]) >= 100 for name in fresh)
    assert len(set(fresh)) == len(fresh)


@given(old=plans(), new=plans(prefix="other"))
def test_no_slot_has_two_owners_and_none_is_used_that_neither_plan_has(old, new):
    got = matched(old, new, next_number=100)
    slots = slots_of(got)
    assert len(slots) == len(set(slots)) == len(slots_of(new))
    assert set(slots) <= set(slots_of(old)) | set(slots_of(new))


@given(old=plans(), new=plans(prefix="other"))
def test_the_core_keeps_its_slots_and_one_that_grows_or_shrinks_keeps_what_it_can(old, new):
    got = matched(old, new, next_number=100)
    if old.train.layout == new.train.layout:
        assert got.train == old.train
        kept = min(len(old.hybrids), len(new.hybrids))
        assert got.hybrids[:kept] == old.hybrids[:kept]
    else:
        assert not {it.replica_id for it in got.hybrids} & {it.replica_id for it in old.hybrids}
    common = min(old.train.world_size, new.train.world_size)
    assert got.train.slots[:common] == old.train.slots[:common]
    assert got.train.layout == new.train.layout


@given(old=plans(), new=plans(prefix="other"))
def test_a_plan_in_force_is_its_own_match(old, new):
    got = matched(old, new, next_number=100)
    assert matched(got, got, next_number=500) == got


@given(old=plans())
def test_without_keeping_every_instance_is_new_on_the_slots_of_one_that_goes(old):
    got = matched(old, old, next_number=100, keeps_instances=False)
    assert not {it.instance_id for it in got.instances} & {it.instance_id for it in old.instances}
    assert [(it.tp, it.slots) for it in got.instances] == [
        (it.tp, it.slots) for it in old.instances
    ]


def test_new_instances_go_to_slots_that_nobody_holds_first():
    old = Plan(
        strategy="grp",
        train=train(1, [0]),
        instances=(
            InstancePlacement(instance_id=InstanceId("vllm-0"), tp=2, slots=(SlotId(1), SlotId(2))),
        ),
    )
    wanted = msgspec.structs.replace(
        old,
        instances=tuple(
            InstancePlacement(instance_id=InstanceId(f"x-{n}"), tp=1, slots=(SlotId(1 + n),))
            for n in range(2)
        ),
    )
    got = matched(
        old, wanted, next_number=7, spare=((NodeRank(0), SlotId(5)), (NodeRank(0), SlotId(6)))
    )
    assert [(it.instance_id, it.slots) for it in got.instances] == [
        ("vllm-7", (5,)),
        ("vllm-8", (6,)),
    ]


def test_over_several_nodes_only_what_lies_on_the_same_slots_is_the_same():
    def instance(name: str, node: int, slot: int) -> InstancePlacement:
        return InstancePlacement(
            instance_id=InstanceId(name), tp=1, slots=(SlotId(slot),), node=NodeRank(node)
        )

    core = train(1, [0])
    old = Plan(
        strategy="grp", train=core, instances=(instance("vllm-0", 0, 1), instance("vllm-1", 1, 1))
    )
    wanted = msgspec.structs.replace(old, instances=(instance("a", 1, 1), instance("b", 1, 2)))
    got = matched(old, wanted, next_number=2)
    assert [(it.instance_id, it.node, it.slots) for it in got.instances] == [
        ("vllm-1", 1, (1,)),
        ("vllm-2", 1, (2,)),
    ]
