"""Servers that are kept asleep: the order of a change, what it is called, and who comes back."""

import msgspec
import pytest

from change_world import settled
from libra.config.planning import PlannerConfig
from libra.errors import InvariantError
from libra.ids import InstanceId, ReplicaId, SlotId
from libra.planner.matching import matched
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, TrainPlacement
from libra.pools.change_order import Rules, transitions
from libra.pools.change_policy import matched_by, policy_of
from libra.pools.ground import Ground, Hybrid, Server, Stage
from libra.pools.member import MemberState
from libra.pools.pool import RolloutPool
from libra.pools.reconfiguration import Order, Reconfiguration
from libra.pools.transition import Sleep, Wake, in_words

SLEEPS = Rules(min_rollout_gpus=1, sleeps=True)
CORE = TrainPlacement(tp=1, pp=1, cp=1, ep=1, dp=1, slots=(SlotId(4),))


def instance(number: int, *slots: int) -> InstancePlacement:
    name = InstanceId(f"vllm-{number}")
    return InstancePlacement(instance_id=name, tp=len(slots), slots=tuple(map(SlotId, slots)))


def replica(number: int, *slots: int) -> HybridPlacement:
    return HybridPlacement(
        replica_id=ReplicaId(f"hybrid-{number}"), slots=tuple(map(SlotId, slots))
    )


def plan(*instances: InstancePlacement, hybrids=(), train=CORE) -> Plan:
    return Plan(strategy="grp", train=train, instances=instances, hybrids=tuple(hybrids))


A, B, WIDE = instance(0, 0), instance(1, 1), instance(2, 2, 3)


def words(old, wanted, *, asleep=(), rules=SLEEPS):
    return list(map(in_words, transitions(settled(old, asleep), wanted, rules)))


@pytest.mark.parametrize(
    ("wanted", "end"),
    [
        (plan(A, hybrids=[replica(9, 1)]), "put vllm-1 to sleep"),
        # Nobody has its slot, or another server.
        (plan(A), "stop vllm-1"),
        (plan(A, instance(7, 1)), "stop vllm-1"),
        (plan(A, hybrids=[replica(9, 5)]), "stop vllm-1"),
    ],
)
def test_whose_slots_training_gets_sleeps_and_everybody_else_ends(wanted, end):
    assert words(plan(A, B), wanted)[:2] == ["drain vllm-1", end]
    never = msgspec.structs.replace(SLEEPS, sleeps=False)
    assert words(plan(A, B), wanted, rules=never)[:2] == ["drain vllm-1", "stop vllm-1"]


def test_a_server_of_which_training_gets_a_part_ends():
    both, half = [replica(9, 2), replica(8, 3)], [replica(9, 2)]
    assert "put vllm-2 to sleep" in words(plan(A, WIDE), plan(A, hybrids=both))
    assert "stop vllm-2" in words(plan(A, WIDE), plan(A, hybrids=half))


def test_a_sleeper_wakes_once_its_slots_are_free_and_stays_while_they_are_not():
    lent = plan(A, hybrids=[replica(9, 1)])
    assert words(lent, plan(A, B), asleep=[B]) == [
        "detach hybrid-9",
        "wake up vllm-1",
        "wait until vllm-1 serves",
    ]
    more = plan(A, instance(5, 2), hybrids=[replica(9, 1)])
    assert words(lent, more, asleep=[B]) == [
        "start vllm-5 (TP 1, slots 2)",
        "wait until vllm-5 serves",
    ]


def test_a_sleeper_that_nobody_comes_back_to_is_ended_first():
    lent = plan(A, hybrids=[replica(9, 1)])
    assert words(lent, plan(A), asleep=[B])[0] == "stop vllm-1"
    assert words(lent, plan(A, instance(5, 1)), asleep=[B])[0] == "stop vllm-1"
    # Its degree is another one than what is wanted there.
    assert words(lent, plan(A, instance(5, 1, 2)), asleep=[B])[0] == "stop vllm-1"


def test_a_sleeper_is_not_warmed_up_again():
    lent = plan(A, hybrids=[replica(9, 1)])
    rules = msgspec.structs.replace(SLEEPS, warms_first=True)
    assert words(lent, plan(A, B), asleep=[B], rules=rules)[0] == "detach hybrid-9"


def test_an_instance_that_comes_is_a_sleeper_where_one_waits_for_free_slots():
    lent, wanted = plan(A, hybrids=[replica(9, 1)]), plan(instance(0, 0), instance(1, 3))
    got = matched(lent, wanted, next_number=20, asleep=[B])
    assert got.instances == (A, B)
    # Also on slots that nobody has, after its replica was lost.
    assert matched(plan(A), wanted, next_number=20, asleep=[B]).instances == (A, B)
    # Neither where a replica keeps them, nor of another degree, nor where all are to be new.
    kept = plan(instance(0, 0), instance(1, 3), hybrids=[replica(1, 1)])
    assert "vllm-1" not in names(matched(lent, kept, next_number=20, asleep=[B]))
    wide = plan(instance(0, 0), instance(1, 2, 3))
    assert "vllm-1" not in names(matched(lent, wide, next_number=20, asleep=[B]))
    fresh = matched(lent, wanted, next_number=20, asleep=[B], keeps_instances=False)
    assert names(fresh) == {"vllm-20", "vllm-21"}


def names(of: Plan) -> set[str]:
    return {it.instance_id for it in of.instances}


def test_on_several_nodes_it_is_one_on_the_very_same_slots():
    away = msgspec.structs.replace(CORE, node=1)
    there = msgspec.structs.replace(B, node=1)
    old = plan(A, train=away)
    assert names(matched(old, plan(A, there, train=away), next_number=20, asleep=[there])) == {
        "vllm-0",
        "vllm-1",
    }
    other = msgspec.structs.replace(instance(5, 2), node=1)
    assert names(matched(old, plan(A, other, train=away), next_number=20, asleep=[there])) == {
        "vllm-0",
        "vllm-20",
    }


def test_the_policy_hands_its_sleepers_on():
    options = {"runtime_dynamic_reconfiguration_enabled": True, "runtime_lent_servers": "sleep"}
    policy = policy_of(msgspec.convert(options, PlannerConfig), num_slots=8)
    wanted = plan(instance(0, 0), instance(1, 3))
    assert matched_by(policy, plan(A), wanted, next_number=20, asleep=[B]).instances == (A, B)
    assert policy.rules(wanted).sleeps
    assert not policy_of(PlannerConfig(), num_slots=8).rules(wanted).sleeps


def change(old, wanted, *, asleep=(), ground=None, **order):
    made = Order(decision_id=1, reason="test", old=old, wanted=wanted, **order)
    standing = ground or settled(old, asleep)
    return Reconfiguration(made, standing, SLEEPS, timeout_s=100.0, now=0.0)


def test_a_change_that_turns_round_while_a_server_falls_asleep_waits_and_wakes_it_up():
    machine = change(plan(A, B), plan(A, hybrids=[replica(9, 1)]))
    machine.begin(now=0.0)
    assert machine.on_drained(B.instance_id, now=1.0) == (Sleep((B.instance_id,)),)
    assert machine.on_tick(now=100.0) == ()
    assert machine.on_tick(now=101.0) == (Sleep((B.instance_id,)),)
    woken = machine.on_asleep(B.instance_id, now=102.0)
    assert woken[0] == Wake((B.instance_id,))
    machine.on_serving(B.instance_id, now=103.0)
    assert machine.result.outcome == "rolled_back"
    assert machine.result.phases["sleep"] == pytest.approx(101.0)


def test_one_that_ended_instead_of_falling_asleep_is_no_hindrance():
    machine = change(plan(A, B), plan(A, hybrids=[replica(9, 1)]))
    machine.begin(now=0.0)
    machine.on_drained(B.instance_id, now=1.0)
    attached = machine.on_gone(B.instance_id, now=2.0)
    assert list(map(in_words, attached)) == ["attach hybrid-9"]


def test_a_sleeper_whose_slot_stays_with_a_replica_that_hangs_is_ended_with_the_change():
    machine = change(plan(A, B), plan(A, hybrids=[replica(9, 1)]))
    machine.begin(now=0.0)
    machine.on_drained(B.instance_id, now=1.0)
    machine.on_asleep(B.instance_id, now=2.0)
    machine.on_tick(now=102.0)  # it does not become a member
    assert in_words(machine.current) == "detach hybrid-9"
    last = machine.on_tick(now=202.0)  # nor does it leave
    assert (machine.result.outcome, machine.result.plan) == ("failed", plan(A))
    assert list(map(in_words, last)) == ["stop vllm-1"]
    assert machine.ground.ids_in(Stage.ASLEEP) == ()


def test_a_sleeper_that_cannot_be_ended_loses_nobody_a_slot():
    lent = plan(A, hybrids=[replica(9, 1)])
    moved = plan(A, instance(5, 2), hybrids=[replica(9, 3)])
    machine = change(lent, moved, asleep=[B])
    machine.begin(now=0.0)
    assert in_words(machine.current) == "stop vllm-1"
    machine.on_unkillable(B.instance_id, now=1.0)
    assert machine.ground.lost == frozenset()
    assert not machine.order.is_turned


def test_a_slot_may_be_anothers_while_a_server_sleeps_but_not_while_it_falls_asleep():
    held = (Hybrid(replica(9, 1), is_member=True),)
    Ground(train=CORE, servers=(Server(B, Stage.ASLEEP),), hybrids=held).check()
    with pytest.raises(InvariantError, match="two owners"):
        Ground(train=CORE, servers=(Server(B, Stage.FALLING_ASLEEP),), hybrids=held).check()


def pool_of_two() -> RolloutPool:
    pool = RolloutPool([(it.instance_id, 1) for it in (A, B)], now=0.0)
    for it in (A, B):
        pool.on_started(it.instance_id, f"{it.instance_id}-a", now=0.0)
        pool.on_answering(it.instance_id, now=0.0)
        pool.on_version_confirmed(it.instance_id, f"{it.instance_id}-a", 3, committed=3, now=0.0)
    return pool


def test_a_member_falls_asleep_only_when_it_answers_and_is_stale_when_it_is_back():
    pool, name = pool_of_two(), B.instance_id
    pool.on_drain_requested(name, now=1.0)
    pool.on_leave_wanted(name, now=1.0)
    assert pool.on_asleep(name, now=2.0)
    asleep = pool[name]
    assert (asleep.state, asleep.version, asleep.is_drained_by_operator) == (
        MemberState.ASLEEP,
        None,
        False,
    )
    assert not pool.on_asleep(name, now=2.0)
    assert not pool.on_version_confirmed(name, asleep.incarnation, 3, committed=3, now=2.5)
    pool.on_reload_failed(name, "late", now=2.5)
    pool.on_suspected(name, "late", now=2.5)
    pool.on_rewound(now=2.5)
    assert pool[name] == asleep
    assert pool.num_possible_gpus == 1
    assert pool.answering_ids == (A.instance_id,)
    assert pool.is_settled
    pool.on_wake_wanted(name, now=3.0)
    waking = pool[name]
    assert (waking.state, waking.is_leaving, waking.is_leaving_plan) == (
        MemberState.WAKING,
        False,
        False,
    )
    assert not pool.is_settled
    assert pool.num_possible_gpus == 2
    assert not pool.on_version_confirmed(name, asleep.incarnation, 3, committed=3, now=3.5)
    pool.on_answering(name, now=4.0)
    assert pool[name].state is MemberState.STALE
    assert pool.on_version_confirmed(name, asleep.incarnation, 3, committed=3, now=5.0)


def test_one_that_is_down_does_not_fall_asleep():
    pool, name = pool_of_two(), B.instance_id
    pool.on_exited(name, "SIGKILL", now=1.0)
    assert not pool.on_asleep(name, now=2.0)
    pool.on_wake_wanted(name, now=2.0)
    assert pool[name].state is MemberState.RESTARTING
