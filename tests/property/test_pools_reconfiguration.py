"""Changes of the plan in a world where everything that can fail fails, at any moment."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from change_world import World, begun, driven, settled
from libra.ids import InstanceId, NodeRank, ReplicaId, SlotId
from libra.planner.matching import matched, slots_of
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, TrainPlacement
from libra.pools.change_order import Rules, Stuck, transitions
from libra.pools.ground import Stage, is_lent

NUM_SLOTS = 10


@st.composite
def plans(draw):
    """Any plan on NUM_SLOTS slots that leaves rollout something."""
    dp, tp = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2]))
    order = draw(st.permutations(range(NUM_SLOTS)))
    used = dp * tp
    train = TrainPlacement(tp=tp, pp=1, cp=1, ep=1, dp=dp, slots=tuple(map(SlotId, order[:used])))
    hybrids = []
    for index in range(draw(st.integers(0, 2))):
        slots = tuple(map(SlotId, order[used : used + tp]))
        hybrids.append(HybridPlacement(replica_id=ReplicaId(f"hybrid-{index}"), slots=slots))
        used += tp
    instances = []
    for degree in draw(st.lists(st.sampled_from([1, 1, 2, 4]), min_size=1, max_size=5)):
        if used + degree <= NUM_SLOTS:
            slots = tuple(map(SlotId, order[used : used + degree]))
            instance_id = InstanceId(f"vllm-{len(instances)}")
            instances.append(InstancePlacement(instance_id=instance_id, tp=degree, slots=slots))
            used += degree
    return Plan(strategy="grp", train=train, instances=tuple(instances), hybrids=tuple(hybrids))


@st.composite
def changes(draw):
    """(old, wanted, rules, sleepers of old) that can be carried out."""
    old, drawn = draw(plans()), draw(plans())
    asleep = [
        InstancePlacement(
            instance_id=InstanceId(f"vllm-{50 + n}"), tp=len(it.slots), slots=it.slots
        )
        for n, it in enumerate(old.hybrids)
        if draw(st.booleans())
    ]
    strategy = draw(st.sampled_from(["diff", "restart_all", "blue_green", "prewarm"]))
    spare = range(NUM_SLOTS, 2 * NUM_SLOTS) if strategy == "blue_green" else ()
    wanted = matched(
        old,
        drawn,
        next_number=100,
        spare=tuple((NodeRank(0), SlotId(slot)) for slot in spare),
        keeps_instances=strategy != "restart_all",
        asleep=asleep,
    )
    most = min(old.num_rollout_gpus, wanted.num_rollout_gpus)
    rules = Rules(
        min_rollout_gpus=draw(st.integers(0, most)),
        warms_first=strategy == "prewarm",
        serves_first=strategy == "blue_green",
        gives_back=draw(st.booleans()),
        sleeps=draw(st.booleans()),
    )
    return old, wanted, rules, asleep


@given(change=changes(), seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_without_faults_a_change_that_is_possible_ends_with_the_wanted_plan_in_force(change, seed):
    old, wanted, rules, asleep = change
    expected = transitions(settled(old, asleep), wanted, rules)
    world = World(old, rules, Random(seed), asleep=asleep)
    machine = driven(world, begun(old, wanted, rules, asleep), {})
    result = machine.result
    if isinstance(expected, Stuck):
        assert result.outcome in ("rolled_back", "failed")
        return
    assert result.outcome == "done"
    assert result.plan == wanted
    sleepers = {n for n, stage in world.stage.items() if stage is Stage.ASLEEP}
    assert {n: world.placement[n] for n in world.stage.keys() - sleepers} == {
        it.instance_id: it for it in wanted.instances
    }
    assert set(world.stage.values()) <= {Stage.SERVING, Stage.ASLEEP}
    # Whoever can be asked back is there, and nobody else.
    before = {it.instance_id for it in (*old.instances, *asleep)} - {
        it.instance_id for it in wanted.instances
    }
    known = {it.instance_id: it for it in (*old.instances, *asleep)}
    assert sleepers == {n for n in before if rules.sleeps and is_lent(known[n], wanted)}
    assert world.train == wanted.train
    assert world.members == {it.replica_id for it in wanted.hybrids}
    assert not world.warming | world.warm
    assert not world.is_hold_wanted
    both = {it.instance_id for it in old.instances} & {it.instance_id for it in wanted.instances}
    assert not [w for w in result.transitions for name in both if f"stop {name}" == w]


FAULTS = [
    "crash",
    "give up",
    "unkillable",
    "gang",
    "replica",
    "stuck replica",
    "sleep",
    "hang",
    "hang",
    "supervisor",
]


@given(
    change=changes(),
    seed=st.integers(0, 2**32),
    faults=st.dictionaries(st.integers(0, 40), st.sampled_from(FAULTS), max_size=6),
)
@settings(max_examples=500, deadline=None)
def test_whatever_fails_and_whenever_a_change_ends_and_what_it_says_is_in_force_is_there(
    change, seed, faults
):
    old, wanted, rules, asleep = change
    world = World(old, rules, Random(seed), asleep=asleep)
    machine = driven(world, begun(old, wanted, rules, asleep), faults)
    result = machine.result
    gone = (Stage.STOPPING, Stage.COOLING, Stage.FALLING_ASLEEP, Stage.ASLEEP)
    here = {n for n, stage in world.stage.items() if stage not in gone}
    resting = [n for n, stage in world.stage.items() if stage is Stage.ASLEEP]
    assert all(is_lent(world.placement[n], result.plan) for n in resting), "it sleeps for ever"
    if result.outcome == "failed":
        assert {it.instance_id for it in result.plan.instances} <= here
    else:
        assert {it.instance_id for it in result.plan.instances} == here
    assert all(world.placement[it.instance_id] == it for it in result.plan.instances)
    assert result.plan.train in (world.train, world.coming_train)
    assert not world.is_hold_wanted, "the trainer stands still for ever"
    assert result.outcome == "failed" or not world.warming | world.warm
    if set(faults.values()) <= {"crash", "sleep", "supervisor"} and not isinstance(
        transitions(settled(old, asleep), wanted, rules), Stuck
    ):
        assert result.outcome == "done"


@pytest.mark.case("R-B48")
@given(change=changes(), seed=st.integers(0, 2**32), at=st.integers(0, 12))
@settings(max_examples=300, deadline=None)
def test_whenever_a_replica_does_not_end_nobody_gets_what_it_holds(change, seed, at):
    old, wanted, rules, asleep = change
    world = World(old, rules, Random(seed), asleep=asleep)
    machine = driven(world, begun(old, wanted, rules, asleep), {at: "stuck replica"})
    used = {slot for _, slot in slots_of(machine.result.plan)}
    assert not used & world.lost_slots
    assert {slot for _, slot in machine.ground.lost} == world.lost_slots


@given(change=changes(), seed=st.integers(0, 2**32), prefix=st.integers(0, 30))
@settings(max_examples=300, deadline=None)
def test_from_every_interrupted_prefix_the_rest_is_made_again(change, seed, prefix):
    old, wanted, rules, asleep = change
    if isinstance(transitions(settled(old, asleep), wanted, rules), Stuck):
        return
    world = World(old, rules, Random(seed), asleep=asleep)
    machine = driven(world, begun(old, wanted, rules, asleep), {prefix: "supervisor"})
    assert machine.result.outcome == "done", machine.result
    awake = {n for n, stage in world.stage.items() if stage is not Stage.ASLEEP}
    assert {it.instance_id for it in machine.result.plan.instances} == awake
    assert {world.stage[n] for n in awake} <= {Stage.SERVING}
