import msgspec
import pytest

from libra.config.planning import PlannerConfig
from libra.errors import InvariantError
from libra.ids import InstanceId, NodeRank, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, TrainPlacement
from libra.pools.change_order import Rules
from libra.pools.change_policy import Refusal, judged, matched_by, policy_of
from libra.pools.ground import Ground, Hybrid, Server, Stage
from libra.pools.reconfiguration import Order, Reconfiguration
from libra.pools.transition import in_words

A, B, C = (InstanceId(f"vllm-{n}") for n in range(3))


def instance(name: str, *slots: int) -> InstancePlacement:
    return InstancePlacement(
        instance_id=InstanceId(name), tp=len(slots), slots=tuple(map(SlotId, slots))
    )


def core(*slots: int, tp: int = 1) -> TrainPlacement:
    return TrainPlacement(
        tp=tp, pp=1, cp=1, ep=1, dp=len(slots) // tp, slots=tuple(map(SlotId, slots))
    )


def plan(train: TrainPlacement, *instances: InstancePlacement, hybrids=()) -> Plan:
    return Plan(strategy="grp", train=train, instances=instances, hybrids=tuple(hybrids))


def replica(name: str, *slots: int) -> HybridPlacement:
    return HybridPlacement(replica_id=ReplicaId(name), slots=tuple(map(SlotId, slots)))


def ground(of: Plan) -> Ground:
    return Ground(
        train=of.train,
        servers=tuple(Server(it, Stage.SERVING) for it in of.instances),
        hybrids=tuple(Hybrid(it, is_member=True) for it in of.hybrids),
    )


def policy(num_slots: int = 8, **options):
    options = {
        "runtime_dynamic_reconfiguration_enabled": True,
        "runtime_reconfigure_training": True,
        "runtime_cluster_swap_enabled": True,
        **options,
    }
    return policy_of(msgspec.convert(options, PlannerConfig), num_slots=num_slots)


def listed(old: Plan, wanted: Plan, num_slots: int = 8, **options) -> list[str]:
    """The transitions in words, or the refusal."""
    chosen = policy(num_slots, **options)
    wanted = matched_by(chosen, old, wanted, next_number=10)
    found = judged(chosen, ground(old), old, wanted)
    return [found.reason] if isinstance(found, Refusal) else list(map(in_words, found))


TWO = plan(core(0), instance(A, 1), instance(B, 2))
ONE_WIDE = plan(core(0), instance("x", 1, 2))


def test_diff_touches_only_what_changes():
    wanted = plan(core(0), instance("x", 1), instance("y", 2), instance("z", 3))
    assert listed(TWO, wanted) == [
        "start vllm-10 (TP 1, slots 3)",
        "wait until vllm-10 serves",
    ]
    assert listed(TWO, plan(core(0), instance("x", 1))) == ["drain vllm-1", "stop vllm-1"]


def test_without_draining_what_is_in_flight_goes_back_to_the_queue():
    words = listed(TWO, plan(core(0), instance("x", 1)), runtime_drain_before_reconfigure=False)
    assert words == ["take back what is in flight at vllm-1", "stop vllm-1"]


def test_restart_all_replaces_every_instance_in_waves_that_keep_the_minimum():
    assert listed(TWO, TWO, runtime_rollout_reconfigure_strategy="restart_all") == [
        "drain vllm-0",
        "stop vllm-0",
        "start vllm-10 (TP 1, slots 1)",
        "wait until vllm-10 serves",
        "drain vllm-1",
        "stop vllm-1",
        "start vllm-11 (TP 1, slots 2)",
        "wait until vllm-11 serves",
    ]


def test_a_lost_slot_is_not_spare():
    options = {"runtime_rollout_reconfigure_strategy": "blue_green"}
    lost = frozenset({(NodeRank(0), SlotId(3))})
    old, wanted = plan(core(0), instance(A, 1, 2)), plan(core(0), instance("x", 1))
    found = matched_by(policy(**options), old, wanted, next_number=10, lost=lost)
    assert found.instances[0].slots == (4,)


def test_blue_green_serves_from_spare_devices_before_anything_is_drained():
    options = {"runtime_rollout_reconfigure_strategy": "blue_green"}
    assert listed(TWO, ONE_WIDE, **options) == [
        "start vllm-10 (TP 2, slots 3+4)",
        "wait until vllm-10 serves",
        "drain vllm-0, vllm-1",
        "stop vllm-0, vllm-1",
    ]
    [why] = listed(TWO, ONE_WIDE, num_slots=4, **options)
    assert why == "blue_green: vllm-10 would need devices that nobody uses"


def test_prewarm_has_new_processes_wait_for_their_devices_before_anything_is_drained():
    [why] = listed(TWO, ONE_WIDE, runtime_rollout_reconfigure_strategy="prewarm")
    assert why == "prewarm: vllm-1 cannot go: 1 GPUs serve, and 1 have to"
    wanted = plan(core(0), instance("x", 1), instance("y", 2, 3))
    old = plan(core(0), instance(A, 1), instance(B, 2), instance(C, 3))
    assert listed(old, wanted, runtime_rollout_reconfigure_strategy="prewarm") == [
        "warm up vllm-10 (TP 2, slots 2+3)",
        "wait until vllm-10 needs a device",
        "drain vllm-1, vllm-2",
        "stop vllm-1, vllm-2",
        "start vllm-10 (TP 2, slots 2+3)",
        "wait until vllm-10 serves",
    ]


def test_prewarm_has_replicas_come_up_before_the_servers_whose_devices_they_get_are_drained():
    old, wanted = plan(core(0), instance(A, 1), instance(B, 2)), plan(core(0), instance(A, 1))
    lent = msgspec.structs.replace(wanted, hybrids=(replica("x", 2),))
    assert listed(old, lent, runtime_rollout_reconfigure_strategy="prewarm") == [
        "warm up hybrid-10",
        "wait until hybrid-10 needs a device",
        "drain vllm-1",
        "stop vllm-1",
        "attach hybrid-10",
    ]
    assert "warm up hybrid-10" not in listed(old, lent)
    # Of a core that is still to change nothing can be a copy.
    grown = msgspec.structs.replace(lent, train=core(0, 3))
    assert listed(old, grown, runtime_rollout_reconfigure_strategy="prewarm") == [
        "hold the trainer at a step boundary",
        "start the trainer as TP 1, PP 1, CP 1, DP 2 on slots 0, 3",
        "let the trainer go on",
        "warm up hybrid-10",
        "wait until hybrid-10 needs a device",
        "drain vllm-1",
        "stop vllm-1",
        "attach hybrid-10",
    ]


def test_a_replica_that_is_lost_while_it_is_warm_leaves_the_servers_as_they_are():
    old = plan(core(0), instance(A, 1), instance(B, 2))
    lent = plan(core(0), instance(A, 1), hybrids=[replica("hybrid-9", 2)])
    order = Order(decision_id=1, reason="r", old=old, wanted=lent)
    rules = Rules(min_rollout_gpus=1, warms_first=True)
    machine = Reconfiguration(order, ground(old), rules, timeout_s=10.0, now=0.0)
    assert said(machine.begin(now=0.0)) == [
        "warm up hybrid-9",
        "wait until hybrid-9 needs a device",
    ]
    machine.on_hybrid_lost(ReplicaId("hybrid-9"), "SIGKILL", now=1.0)
    assert (machine.result.outcome, machine.result.plan) == ("rolled_back", old)
    late = Reconfiguration(order, ground(old), rules, timeout_s=10.0, now=0.0)
    late.begin(now=0.0)
    assert said(late.on_tick(now=10.0)) == ["detach hybrid-9"]
    late.ground.check()
    assert late.on_hybrid_warm(ReplicaId("hybrid-9"), now=11.0) == ()
    late.on_hybrid_left(ReplicaId("hybrid-9"), now=12.0)
    assert late.result.outcome == "rolled_back"


def test_prewarm_lets_replicas_and_the_core_train_while_new_processes_come_up():
    lent = plan(core(0), instance(A, 1), hybrids=[replica("hybrid-2", 2)])
    assert listed(lent, TWO, runtime_rollout_reconfigure_strategy="prewarm") == [
        "warm up vllm-10 (TP 1, slots 2)",
        "wait until vllm-10 needs a device",
        "detach hybrid-2",
        "start vllm-10 (TP 1, slots 2)",
        "wait until vllm-10 serves",
    ]
    large = plan(core(0, 2), instance(A, 1))
    assert listed(large, TWO, runtime_rollout_reconfigure_strategy="prewarm") == [
        "warm up vllm-10 (TP 1, slots 2)",
        "wait until vllm-10 needs a device",
        "hold the trainer at a step boundary",
        "start the trainer as TP 1, PP 1, CP 1, DP 1 on slots 0",
        "let the trainer go on",
        "start vllm-10 (TP 1, slots 2)",
        "wait until vllm-10 serves",
    ]


def test_cluster_swap_frees_devices_on_one_side_before_the_other_takes_them():
    small = plan(core(0, 1), instance(A, 2), instance(B, 3))
    large = plan(core(0, 1, 2), instance("x", 3))
    options = {"runtime_rollout_reconfigure_strategy": "cluster_swap"}
    assert listed(small, large, **options) == [
        "drain vllm-0",
        "stop vllm-0",
        "hold the trainer at a step boundary",
        "start the trainer as TP 1, PP 1, CP 1, DP 3 on slots 0, 1, 2",
        "let the trainer go on",
    ]
    large = plan(core(0, 1, 2), instance(A, 3))
    assert listed(large, small, **options) == [
        "hold the trainer at a step boundary",
        "start the trainer as TP 1, PP 1, CP 1, DP 2 on slots 0, 1",
        "let the trainer go on",
        "start vllm-10 (TP 1, slots 2)",
        "wait until vllm-10 serves",
    ]


def test_replicas_leave_before_the_core_changes_and_join_after_it():
    old = plan(core(0), instance(A, 3), hybrids=[replica("hybrid-1", 2)])
    wanted = plan(core(0, 1), instance("x", 3), hybrids=[replica("h", 2)])
    assert listed(old, wanted) == [
        "detach hybrid-1",
        "hold the trainer at a step boundary",
        "start the trainer as TP 1, PP 1, CP 1, DP 2 on slots 0, 1",
        "let the trainer go on",
        "attach hybrid-10",
    ]


@pytest.mark.parametrize(
    ("wanted", "options", "why"),
    [
        (
            TWO,
            {"runtime_dynamic_reconfiguration_enabled": False},
            "runtime_dynamic_reconfiguration_enabled is false",
        ),
        (
            plan(core(0), instance(A, 1)),
            {"runtime_manage_rollout_processes": False},
            "the servers are run by somebody else: runtime_manage_rollout_processes is false",
        ),
        (
            plan(core(0, 3), instance(A, 1), instance(B, 2)),
            {"runtime_reconfigure_training": False},
            "the training side would change, and runtime_reconfigure_training is false",
        ),
        (
            plan(core(0, 2), instance(A, 1)),
            {"runtime_cluster_swap_enabled": False},
            (
                "slots 2 would change sides between the core and rollout, and "
                "runtime_cluster_swap_enabled is false"
            ),
        ),
        (
            plan(core(0), instance(A, 1)),
            {"min_rollout_gpus": 2},
            "rollout would have 1 GPUs, and has to keep 2",
        ),
        (
            plan(core(0), instance(A, 1), hybrids=[replica("h", 2)]),
            {"elastic_hybrid_min_rollout_gpus": 2},
            "rollout would have 1 GPUs, and has to keep 2",
        ),
        (
            plan(core(0), instance(A, 1), instance(B, 2), instance(C, 9)),
            {},
            "the plan uses more than the 8 devices there are",
        ),
        (
            plan(core(0, 3), instance(A, 1), instance(B, 2)),
            {"runtime_training_pool_plan_only": True},
            "runtime_training_pool_plan_only: written down, not made",
        ),
        (
            plan(core(0), instance(A, 1), instance(B, 2)),
            {"min_train_gpus": 2},
            "training would have 1 GPUs, min_train_gpus is 2",
        ),
    ],
)
def test_a_change_that_the_configuration_does_not_allow_is_refused_with_the_reason(
    wanted, options, why
):
    assert listed(TWO, wanted, **options) == [why]


def test_slots_that_the_core_gives_to_rollout_change_sides_too():
    old = plan(core(0, 3), instance(A, 1), instance(B, 2))
    wanted = plan(core(0), instance(A, 1), instance(B, 2), instance(C, 3))
    (why,) = listed(old, wanted, runtime_cluster_swap_enabled=False)
    assert why.startswith("slots 3 would change sides between the core and rollout")


def test_slots_of_a_process_that_does_not_end_are_never_used_again():
    wanted = plan(core(0), instance(A, 1), instance(B, 2), instance(C, 3))
    there = msgspec.structs.replace(ground(TWO), lost=frozenset({(0, SlotId(3))}))
    found = judged(policy(), there, TWO, wanted)
    assert found == Refusal("slot 3 is held by a process that does not end")


def change(old: Plan, wanted: Plan, **options) -> Reconfiguration:
    order = Order(decision_id=1, reason="r", old=old, wanted=wanted)
    rules = Rules(min_rollout_gpus=1)
    return Reconfiguration(order, ground(old), rules, timeout_s=10.0, now=0.0, **options)


def said(transitions) -> list[str]:
    return list(map(in_words, transitions))


def test_nobody_leaves_a_gap_before_a_large_server_that_others_come_after():
    """Without vllm-2 the large one could never go: 8 GPUs would serve, and 5 of them have to."""
    old = plan(
        core(0), *(instance(f"vllm-{n}", n + 2) for n in range(3)), instance("big", 5, 6, 7, 9)
    )
    wanted = plan(
        core(0),
        instance("vllm-100", 2),
        instance("vllm-101", 3),
        instance("vllm-102", 5, 6, 7, 9),
        instance("vllm-103", 1, 8),
    )
    order = Order(decision_id=1, reason="r", old=old, wanted=wanted)
    rules = Rules(min_rollout_gpus=5)
    machine = Reconfiguration(order, ground(old), rules, timeout_s=10.0, now=0.0)
    begun = said(machine.begin(now=0.0))
    assert begun == ["start vllm-103 (TP 2, slots 1+8)", "drain vllm-0, vllm-1"]
    machine.on_serving(InstanceId("vllm-103"), now=1.0)
    for name in (A, B):
        machine.on_drained(name, now=2.0)
    machine.on_gone(A, now=3.0)
    assert said(machine.on_gone(B, now=3.0)) == [
        "start vllm-100 (TP 1, slots 2), vllm-101 (TP 1, slots 3)",
        "wait until vllm-100, vllm-101 serves",
    ]
    machine.on_serving(InstanceId("vllm-100"), now=4.0)
    assert said(machine.on_serving(InstanceId("vllm-101"), now=4.0)) == ["drain big"]


@pytest.mark.case("R-B29")
def test_streams_that_do_not_end_are_waited_for_as_long_as_is_said_and_the_server_is_kept():
    machine = change(TWO, plan(core(0), instance(A, 1)))
    assert said(machine.begin(now=0.0)) == ["drain vllm-1"]
    assert machine.on_tick(now=9.9) == ()
    kept = ["keep vllm-1", "wait until vllm-1 serves"]
    assert said(machine.on_tick(now=10.0)) == kept
    machine.on_serving(B, now=11.0)
    assert (machine.result.outcome, machine.result.plan) == ("rolled_back", TWO)
    assert machine.result.reason == "drain vllm-1: not over within 10 s"


def test_a_server_that_does_not_come_up_in_time_is_stopped_and_the_plan_before_serves():
    wanted = plan(core(0), instance(B, 2), instance(C, 1))
    machine = change(TWO, wanted)
    assert said(machine.begin(now=0.0)) == ["drain vllm-0"]
    assert said(machine.on_drained(A, now=1.0)) == ["stop vllm-0"]
    started = machine.on_gone(A, now=3.0)
    assert said(started) == ["start vllm-2 (TP 1, slots 1)", "wait until vllm-2 serves"]
    assert machine.on_tick(now=12.9) == ()
    assert said(machine.on_tick(now=13.0)) == ["take back what is in flight at vllm-2"]
    assert said(machine.on_drained(C, now=13.0)) == ["stop vllm-2"]
    back = machine.on_gone(C, now=14.0)
    assert said(back) == ["start vllm-0 (TP 1, slots 1)", "wait until vllm-0 serves"]
    assert machine.on_serving(A, now=20.0) == ()
    assert machine.result.outcome == "rolled_back"
    assert machine.result.reason == "wait until vllm-2 serves: not over within 10 s"
    assert machine.result.plan == TWO
    assert machine.result.phases == {"drain": 1.0, "stop": 3.0, "start": 16.0}
    assert machine.result.total_s == 20.0


def test_the_trainer_is_let_go_when_it_comes_up_in_neither_layout():
    wanted = plan(core(0, 3), instance(A, 1), instance(B, 2))
    machine = change(TWO, wanted)
    assert said(machine.begin(now=0.0)) == ["hold the trainer at a step boundary"]
    [reshape] = said(machine.on_step_held(now=4.0))
    assert reshape == "start the trainer as TP 1, PP 1, CP 1, DP 2 on slots 0, 3"
    [back] = said(machine.on_training_failed("out of memory", now=6.0))
    assert back == "start the trainer as TP 1, PP 1, CP 1, DP 1 on slots 0"
    assert said(machine.on_tick(now=16.0)) == ["let the trainer go on"]
    assert machine.result.outcome == "failed"
    assert machine.result.stalled_s == 12.0
    assert "the trainer did not come up: out of memory; on the way back" in machine.result.reason


def test_a_replica_that_had_left_is_not_attached_again_on_the_way_back():
    old = plan(core(0), instance(A, 1), hybrids=[replica("hybrid-0", 2)])
    wanted = plan(core(0), instance(A, 1), instance(B, 2))
    machine = change(old, wanted)
    assert said(machine.begin(now=0.0)) == ["detach hybrid-0"]
    machine.on_hybrid_left(ReplicaId("hybrid-0"), now=1.0)
    assert said(machine.on_gave_up(B, "3 restarts", now=2.0)) == []
    assert machine.result.outcome == "rolled_back"
    assert machine.result.plan == plan(core(0), instance(A, 1))


def test_a_replica_that_is_lost_while_it_joins_turns_the_change_round():
    wanted = plan(core(0), instance(A, 1), hybrids=[replica("hybrid-0", 2)])
    machine = change(TWO, wanted)
    assert said(machine.begin(now=0.0)) == ["drain vllm-1"]
    machine.on_drained(B, now=1.0)
    assert said(machine.on_gone(B, now=2.0)) == ["attach hybrid-0"]
    back = machine.on_hybrid_lost(ReplicaId("hybrid-0"), "SIGKILL", now=3.0)
    assert said(back) == ["start vllm-1 (TP 1, slots 2)", "wait until vllm-1 serves"]
    machine.on_serving(B, now=9.0)
    assert (machine.result.outcome, machine.result.plan) == ("rolled_back", TWO)


@pytest.mark.case("R-B48")
def test_the_slot_of_a_replica_that_does_not_end_is_given_to_nobody():
    old = plan(core(0), instance(A, 1), hybrids=[replica("hybrid-0", 2)])
    machine = change(old, plan(core(0), instance(A, 1), instance(B, 2)))
    assert said(machine.begin(now=0.0)) == ["detach hybrid-0"]
    left = machine.on_hybrid_left(ReplicaId("hybrid-0"), now=1.0, lost=frozenset({(0, 2)}))
    assert left == ()
    assert machine.ground.lost == {(0, 2)}
    assert (machine.result.outcome, machine.result.reason, machine.result.plan) == (
        "rolled_back", "hybrid-0 cannot be ended", plan(core(0), instance(A, 1)),
    )  # fmt: skip


@pytest.mark.case("R-B48")
def test_a_server_does_not_come_back_to_a_slot_that_a_replica_keeps():
    wanted = plan(core(0), instance(A, 1), hybrids=[replica("hybrid-0", 2)])
    machine = change(TWO, wanted)
    machine.begin(now=0.0)
    machine.on_drained(B, now=1.0)
    assert said(machine.on_gone(B, now=2.0)) == ["attach hybrid-0"]
    keeps = frozenset({(0, 2)})
    assert machine.on_hybrid_lost(ReplicaId("hybrid-0"), "hangs", now=3.0, lost=keeps) == ()
    assert (machine.result.outcome, machine.result.plan) == (
        "failed",
        plan(core(0), instance(A, 1)),
    )
    assert machine.ground.lost == keeps


@pytest.mark.case("R-B48")
def test_a_change_that_does_not_need_what_a_lost_replica_keeps_goes_on():
    both = [replica("hybrid-0", 3)]
    old = plan(core(0), instance(A, 1), hybrids=both)
    machine = change(old, plan(core(0), instance(A, 1), instance(B, 2), hybrids=both))
    machine.begin(now=0.0)
    keeps = frozenset({(0, 3)})
    assert machine.on_hybrid_lost(ReplicaId("hybrid-0"), "hangs", now=3.0, lost=keeps) == ()
    machine.on_serving(B, now=4.0)
    assert (machine.result.outcome, machine.ground.lost) == ("done", keeps)


def test_an_instance_of_both_plans_that_is_given_up_is_left_out_of_what_is_in_force():
    wanted = plan(core(0), instance(A, 1), instance(B, 2), instance(C, 3))
    machine = change(TWO, wanted)
    machine.begin(now=0.0)
    assert machine.on_gave_up(A, "3 restarts", now=1.0) == ()
    machine.on_serving(C, now=2.0)
    assert machine.result.outcome == "done"
    assert [it.instance_id for it in machine.result.plan.instances] == [B, C]


def test_a_way_back_on_which_an_instance_is_given_up_has_not_brought_the_plan_back():
    machine = change(TWO, plan(core(0), instance(B, 2), instance(C, 1)))
    machine.begin(now=0.0)
    machine.on_drained(A, now=1.0)
    machine.on_gone(A, now=2.0)
    assert said(machine.on_gave_up(C, "no memory", now=3.0)) == [
        "start vllm-0 (TP 1, slots 1)",
        "wait until vllm-0 serves",
    ]
    assert machine.on_gave_up(A, "no memory", now=4.0) == ()
    assert (machine.result.outcome, machine.result.reason) == (
        "failed",
        "vllm-2 was given up: no memory",
    )
    assert machine.result.plan == plan(core(0), instance(B, 2))


def test_a_ground_with_two_owners_of_a_slot_is_a_bug():
    wanted = plan(core(0), instance(A, 1), instance(B, 1))
    with pytest.raises(InvariantError, match="two owners"):
        ground(wanted).check()


def test_a_process_that_never_had_a_device_takes_none_with_it_when_it_cannot_be_ended():
    one, other = plan(core(0), instance("vllm-0", 1)), plan(core(0), instance("vllm-1", 1))
    order = Order(decision_id=1, reason="test", old=one, wanted=other)
    rules = Rules(min_rollout_gpus=0, warms_first=True)
    change = Reconfiguration(order, ground(one), rules, timeout_s=10.0, now=0.0)
    change.begin(now=0.0)
    change.on_tick(now=10.0)
    assert change.order.is_turned
    change.on_tick(now=20.0)
    assert change.ground.find(InstanceId("vllm-1")) is None
    assert not change.ground.lost
