"""Servers that sleep while training has their devices, and all that can come between."""

from random import Random

import msgspec
import pytest

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
    want,
)
from libra.ids import ChildId, Incarnation, PolicyVersion, ReplicaId, SlotId
from libra.pools.member import MemberState
from libra.wire.instance import InstanceState
from libra_supervisor import events
from libra_supervisor.app.operator import waiting_for
from libra_supervisor.loop import commands

TWO, LENT = plan([2], [0, 1]), plan([2], [0], [1])
LENDER = IDS[1]


def lent(seed=5, **options):
    """A run whose second server sleeps while its slot trains."""
    world, rng = elastic(runtime_lent_servers="sleep", **options), Random(seed)
    run_until(world, rng, a_step_is_trained)
    change(world, rng, LENT)
    return world, rng


def change(world, rng, wanted):
    number = len(world.reconfigurations) + 1
    want(world, wanted, number)
    run_until(world, rng, lambda w: len(w.reconfigurations) == number)
    return records(world)[-1]


def state_of(world):
    member = world.control.pool.get(LENDER)
    return None if member is None else member.state


def births(world):
    return world.num_births_of[LENDER]


def goes_on(world, rng):
    """Nothing of what happened is in the way of the rest of the run."""
    world.run(rng)
    assert world.ended.exit_code == 0, world.ended
    assert [step for _, step, _ in world.trained] == [1, 2, 3, 4, 5, 6]


def test_a_lent_server_sleeps_and_is_the_same_process_at_the_committed_version_afterwards():
    world, rng = lent(total_steps=12)
    [there] = records(world)
    assert (there.outcome, there.stopped, there.asleep) == ("done", (LENDER,), (LENDER,))
    assert there.transitions == ("drain vllm-1", "put vllm-1 to sleep", "attach hybrid-2")
    assert spent_on(there)["vllm-1"] == ["drain", "sleep"]
    assert state_of(world) is MemberState.ASLEEP
    incarnation = world.processes[LENDER].incarnation
    run_until(world, rng, lambda w: len(w.trained) > 6)
    back = change(world, rng, TWO)
    assert back.transitions == ("detach hybrid-2", "wake up vllm-1", "wait until vllm-1 serves")
    assert (back.outcome, back.started, back.asleep) == ("done", (LENDER,), ())
    assert spent_on(back)["vllm-1"] == ["load", "wake"]
    assert world.processes[LENDER].incarnation == incarnation
    assert births(world) == 1
    assert LENDER in world.routes  # the world checks that it holds what it is routed to for
    assert len(world.known) == 3, "its capacity was not read again"
    world.run(rng)
    assert world.ended.exit_code == 0


def test_a_sleeper_counts_for_no_publication_and_no_minimum():
    world, rng = lent(total_steps=12)
    committed = world.control.publication.committed
    run_until(world, rng, lambda w: w.control.publication.committed > committed + 1)
    newest = [it.record for it in world.reloads if it.record.policy_version > committed + 1]
    assert {name for record in newest for name in record.accepted} == {"vllm-0"}
    pool = world.control.pool
    assert pool.num_possible_gpus == 1
    assert pool.is_settled
    refused = change(world, rng, plan([2], [], [0, 1]))
    assert refused.outcome == "refused"


def test_a_server_that_does_not_fall_asleep_is_stopped_and_another_starts_on_the_way_back():
    world, rng = elastic(runtime_lent_servers="sleep"), Random(5)
    run_until(world, rng, a_step_is_trained)
    world.sleepless = [LENDER]
    there = change(world, rng, LENT)
    assert (there.outcome, there.asleep, state_of(world)) == ("done", (), None)
    back = change(world, rng, TWO)
    assert (back.outcome, back.started) == ("done", ("vllm-3",))
    goes_on(world, rng)


def test_a_server_that_does_not_wake_up_is_replaced_by_a_new_process_of_its_name():
    world, rng = lent()
    world.sleepless = [LENDER]
    back = change(world, rng, TWO)
    assert (back.outcome, back.started) == ("done", (LENDER,))
    assert births(world) == 2
    goes_on(world, rng)


@pytest.mark.parametrize("reason", ["killed", "gave up"])
def test_a_sleeper_that_dies_is_not_restarted_and_costs_nothing_but_itself(reason):
    world, rng = lent(min_rollout_gpus=1)
    incarnation = world.processes[LENDER].incarnation
    world.kill_process(LENDER)
    if reason == "gave up":
        child = ChildId(LENDER)
        world.post(events.ChildGaveUp(child, "3 restarts", "SIGKILL", 4, (), world.now))
    assert births(world) == 1
    run_until(world, rng, lambda w: state_of(w) is None)
    assert [it.fields["instance"] for it in world.said if it.event == "sleeper_ended"] == [LENDER]
    assert world.control.plans.asleep == ()
    back = change(world, rng, TWO)
    assert (back.outcome, back.started) == ("done", ("vllm-3",))
    assert world.processes["vllm-3"].incarnation != incarnation
    goes_on(world, rng)


def test_a_sleeper_that_dies_when_it_is_to_wake_is_started_anew():
    world, rng = lent()
    want(world, TWO, 2)
    run_until(world, rng, lambda w: state_of(w) is MemberState.WAKING)
    world.kill_process(LENDER)
    run_until(world, rng, lambda w: len(w.reconfigurations) == 2)
    assert records(world)[1].outcome == "done"
    assert births(world) == 2
    goes_on(world, rng)


def test_a_sleeper_that_is_ended_as_it_is_to_wake_is_started_cold():
    world, rng = lent()
    world.kill_process(LENDER)
    retired = events.InstanceRetired(LENDER, is_clean=True)
    assert retired in world.pending
    world.pending.remove(retired)
    want(world, TWO, 2)
    run_until(world, rng, lambda w: state_of(w) is MemberState.WAKING)
    world.post(retired)
    run_until(world, rng, lambda w: len(w.reconfigurations) == 2)
    assert records(world)[1].outcome == "done"
    assert births(world) == 2
    goes_on(world, rng)


def test_a_plan_that_does_not_come_back_to_a_sleeper_ends_it():
    world, rng = lent()
    # Nobody has slot 1 any more; the second server is on slot 3.
    spare = msgspec.structs.replace(LENT, hybrids=())
    ended = change(world, rng, spare)
    assert ended.transitions[0] == "stop vllm-1"
    assert (ended.outcome, ended.asleep, state_of(world)) == ("done", (), None)
    goes_on(world, rng)


def test_a_change_that_fails_on_its_way_there_wakes_the_server_up_again():
    world, rng = elastic(runtime_lent_servers="sleep"), Random(5)
    world.replicas.joins = False
    run_until(world, rng, a_step_is_trained)
    want(world, LENT)
    run_until(world, rng, lambda w: w.replicas.members)
    assert state_of(world) is MemberState.ASLEEP
    world.now += TIMEOUT_S
    world.post(events.Ticked())
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    [record] = records(world)
    assert (record.outcome, record.asleep) == ("rolled_back", ())
    assert births(world) == 1
    goes_on(world, rng)


def test_a_sleeper_whose_replica_was_lost_comes_back_by_itself():
    world, rng = lent()
    world.post(events.HybridLost(ReplicaId("hybrid-2"), "SIGKILL"))
    assert world.plan_in_force.hybrids == ()
    run_until(world, rng, lambda w: len(w.reconfigurations) == 2)
    back = records(world)[1]
    assert (back.cause, back.decision_id, back.outcome) == ("replica_lost", 0, "done")
    assert (back.started, back.asleep) == ((LENDER,), ())
    assert back.reason == "hybrid-2 was lost: SIGKILL"
    assert world.plan_in_force.instances == back.plan.instances
    assert (births(world), world.control.plans.idle) == (1, frozenset())
    goes_on(world, rng)


def test_a_sleeper_that_does_not_come_back_leaves_its_device_idle_and_that_is_said():
    world, rng = lent()
    world.kill_process(LENDER)
    run_until(world, rng, lambda w: state_of(w) is None)
    world.post(events.HybridLost(ReplicaId("hybrid-2"), "SIGKILL"))
    [_, lost] = records(world)
    assert (lost.cause, lost.outcome, lost.plan.hybrids) == ("replica_lost", "failed", ())
    assert lost.reason == (
        "hybrid-2 was lost: SIGKILL; slots 1 are idle until the plan is changed: "
        "no server sleeps there"
    )
    assert "slots 1 are idle since a replica was lost" in waiting_for(world.control)
    change(world, rng, TWO)
    assert "idle" not in waiting_for(world.control)
    goes_on(world, rng)


def test_a_sleeper_that_would_come_back_to_a_run_that_is_stopping_is_let_be():
    world, rng = lent()
    world.post(events.StopRequested("enough", now=False))
    world.post(events.HybridLost(ReplicaId("hybrid-2"), "SIGKILL"))
    run_out(world, rng)
    assert len(records(world)) == 1
    assert world.ended.exit_code == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_server_that_lent_to_two_replicas_is_ended_when_one_is_lost(seed):
    """One of its devices is still lent: it cannot serve on the other alone."""
    wide = msgspec.structs.replace(
        TWO,
        instances=(
            TWO.instances[0],
            msgspec.structs.replace(TWO.instances[1], tp=2, slots=(SlotId(1), SlotId(3))),
        ),
    )
    world, rng = elastic(runtime_lent_servers="sleep"), Random(seed)
    run_until(world, rng, a_step_is_trained)
    change(world, rng, wide)
    there = change(world, rng, plan([2], [0], [1, 3]))
    [sleeper] = there.asleep
    world.post(events.HybridLost(there.attached[0], "SIGKILL"))
    run_until(world, rng, lambda w: len(w.reconfigurations) == 3)
    ended = records(world)[2]
    assert (ended.cause, ended.outcome, ended.asleep) == ("replica_lost", "done", ())
    assert world.control.pool.get(sleeper) is None
    assert ended.plan.hybrids == there.plan.hybrids[1:]


def test_the_core_may_have_the_slots_of_a_sleeper_too():
    world, rng = elastic(runtime_lent_servers="sleep"), Random(5)
    run_until(world, rng, a_step_is_trained)
    there = change(world, rng, plan([2, 1], [0]))
    assert (there.outcome, there.asleep) == ("done", (LENDER,))
    assert change(world, rng, TWO).started == (LENDER,)
    assert births(world) == 1
    goes_on(world, rng)


def test_no_operator_and_no_late_word_reaches_a_sleeper():
    world, rng = lent()
    member, process = world.control.pool[LENDER], world.processes[LENDER]
    for drain in (True, False):
        world.post(events.DrainRequested(LENDER, drain=drain))
    world.post(events.RestartRequested(LENDER))
    world.post(events.InstanceDoubted(LENDER))
    state = InstanceState(
        instance_id=LENDER,
        incarnation=process.incarnation,
        run_id="run",
        policy_version=PolicyVersion(1),
        is_paused=False,
        manifest_hash=None,
    )
    num_known = len(world.known)
    world.post(events.InstanceAnswered(LENDER, process.incarnation, "http://x", state, None))
    reason = "it has been silent for 60 s"
    world.post(events.ChildSuspected(ChildId(LENDER), process.incarnation, reason, world.now))
    world.post(events.ReloadRequested())
    assert world.control.pool[LENDER] == member
    assert world.processes[LENDER] == process
    assert len(world.known) == num_known
    assert change(world, rng, TWO).outcome == "done"
    goes_on(world, rng)


def test_an_operators_drain_ends_with_the_servers_sleep():
    world, rng = elastic(runtime_lent_servers="sleep"), Random(5)
    run_until(world, rng, a_step_is_trained)
    world.post(events.DrainRequested(LENDER, drain=True))
    there = change(world, rng, LENT)
    assert (there.outcome, there.asleep) == ("done", (LENDER,))
    assert change(world, rng, TWO).outcome == "done"
    assert LENDER in world.routes
    goes_on(world, rng)


def test_whoever_fell_asleep_for_nobody_is_ended():
    world, rng = elastic(runtime_lent_servers="sleep"), Random(5)
    run_until(world, rng, a_step_is_trained)
    told = list(world.control.on_event(asleep(world, "vllm-1-7"), moment(world)))
    assert commands.RetireInstance(LENDER) in told
    assert list(world.control.on_event(events.InstanceAsleep("vllm-9", "x"), moment(world))) == []
    woken = events.InstanceWoken(LENDER, world.processes[LENDER].incarnation)
    assert [it for it in world.control.on_event(woken, moment(world)) if is_question(it)] == []


def test_what_the_process_before_says_of_its_sleep_puts_nobody_to_sleep():
    world, rng = elastic(runtime_lent_servers="sleep"), Random(5)
    run_until(world, rng, a_step_is_trained)
    want(world, LENT)
    run_until(world, rng, lambda w: LENDER in w.asleep)
    said = list(world.control.on_event(asleep(world, "vllm-1-7"), moment(world)))
    assert said[0] == commands.RetireInstance(LENDER)
    assert state_of(world) is not MemberState.ASLEEP


def test_only_the_process_that_woke_up_is_asked_what_it_holds():
    world, rng = lent()
    want(world, TWO, 2)
    run_until(world, rng, lambda w: state_of(w) is MemberState.WAKING)
    woken = events.InstanceWoken(LENDER, Incarnation("vllm-1-7"))
    assert not any(map(is_question, world.control.on_event(woken, moment(world))))
    woken = events.InstanceWoken(LENDER, world.processes[LENDER].incarnation)
    assert any(map(is_question, world.control.on_event(woken, moment(world))))


def moment(world):
    from libra_supervisor.loop.moment import Moment  # noqa: PLC0415

    return Moment(world.now, int(world.now * 1e9))


def asleep(world, incarnation):
    assert world.processes[LENDER].incarnation != incarnation
    return events.InstanceAsleep(LENDER, Incarnation(incarnation))


def is_question(command):
    return isinstance(command, commands.AskInstance)


def test_a_supervisor_that_comes_after_starts_without_the_sleepers():
    world, rng = lent()
    world.post(events.Ticked())
    memory = world.kept_plans[-1].memory
    second = resumed(world, memory)
    assert [it.instance_id for it in second.control.pool.members] == ["vllm-0"]
    run_until(second, rng, lambda w: len(w.reconfigurations) == 1)
    back = change(second, rng, TWO)
    assert (back.outcome, back.started) == ("done", ("vllm-4",)), "a name was used twice"
