"""Servers that die, hang, are doubted, drained, restarted or given up."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_runs import A, B, run_until, started
from libra.ids import ChildId, Incarnation
from libra.pools.member import MemberState
from libra_supervisor import events
from libra_supervisor.loop import commands
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.moment import Moment


@pytest.mark.case("R-B86")
def test_an_engine_that_restarts_catches_up_before_it_is_routed_to():
    rng = Random(5)
    world = started(total_steps=30)
    run_until(world, rng, lambda w: w.control.cycle.step == 3)
    run_until(world, rng, lambda w: w.control.cycle.phase is Phase.COLLECTING)
    world.kill_process(A)
    assert A not in world.routes
    run_until(world, rng, lambda w: A in w.routes)
    assert world.processes[A].version == world.control.publication.committed


@pytest.mark.case("R-B41")
@pytest.mark.parametrize("is_reloading", [False, True])
def test_a_server_that_hangs_is_routed_past_before_it_is_ended(is_reloading):
    rng = Random(5)
    world = started(total_steps=30)
    run_until(world, rng, lambda w: w.control.cycle.step == 3)
    run_until(
        world, rng, lambda w: (w.control.pool[A].state is MemberState.RELOADING) is is_reloading
    )
    suspected = world.processes[A].incarnation
    world.suspect_process(A)
    # A reload in between neither waits for it nor brings it back.
    step = world.control.cycle.step
    run_until(world, rng, lambda w: w.control.cycle.step == step + 2)
    assert A not in world.routes
    assert world.control.pool[A].state is MemberState.QUARANTINED
    # Nobody ends it a second time: its supervision is at it.
    assert world.processes[A].incarnation == suspected
    world.kill_process(A)
    run_until(world, rng, lambda w: A in w.routes)
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0


@pytest.mark.case("R-B12")
@pytest.mark.parametrize("is_another", [False, True])
def test_doubts_about_a_process_end_with_its_own_word(is_another):
    rng = Random(5)
    world = started(total_steps=30)
    run_until(world, rng, lambda w: w.control.cycle.step == 3 and len(w.routes) == 2)
    process, num_known = world.processes[A], len(world.known)
    before = process.incarnation
    world.routes.pop(A)  # the scheduler does not route there while its version is in doubt
    if is_another:
        # Whoever restarted it told nobody; it holds the base model again.
        world.answers_as[A] = Incarnation("a stranger")
    world.post(events.InstanceDoubted(A))
    run_until(world, rng, lambda w: A in w.routes)
    assert (world.processes[A].incarnation != before) is is_another
    assert world.known[num_known].incarnation == world.processes[A].incarnation
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0


def test_doubts_about_a_process_that_is_gone_ask_nobody():
    world = started()
    world.post(events.InstanceDoubted(A))  # it has not answered yet
    assert not any(isinstance(e, events.InstanceAnswered) for e in world.pending)


def test_a_reload_by_restart_is_a_planned_restart_and_a_crash_is_not():
    rng = Random(5)
    world = started(total_steps=30, method="restart")
    run_until(world, rng, lambda w: w.control.cycle.step == 3)
    run_until(world, rng, lambda w: len(w.routes) == 2)
    first, later = world.known[:2], world.known[2:]
    assert [known.is_planned for known in first] == [False, False]
    assert {known.instance_id for known in later} == {A, B}
    assert all(known.is_planned for known in later)
    num_known = len(world.known)
    world.kill_process(A)
    run_until(world, rng, lambda w: len(w.known) > num_known)
    assert (world.known[num_known].instance_id, world.known[num_known].is_planned) == (A, False)


def test_a_process_that_dies_in_the_middle_of_its_reload_by_restart_is_an_unplanned_restart():
    rng = Random(5)
    world = started(total_steps=30, method="restart")
    run_until(world, rng, lambda w: w.control.cycle.step == 2)
    before = world.processes[A].incarnation
    run_until(world, rng, lambda w: w.processes[A].incarnation != before)
    num_known = sum(known.instance_id == A for known in world.known)
    world.kill_process(A)
    run_until(world, rng, lambda w: sum(k.instance_id == A for k in w.known) > num_known)
    assert [k for k in world.known if k.instance_id == A][num_known].is_planned is False


@given(seed=st.integers(0, 2**32), chance=st.floats(0.0, 0.2))
@settings(max_examples=60, deadline=None)
def test_an_operator_may_restart_an_engine_at_any_moment(seed, chance):
    rng = Random(seed)
    world = started(total_steps=4)
    num_asked = 0
    while world.step(rng):
        if world.ended is None and rng.random() < chance and num_asked < 20:
            num_asked += 1
            births = world.processes[A].incarnation
            world.post(events.RestartRequested(A))
            assert world.processes[A].incarnation != births
            assert A not in world.routes
    assert world.ended is not None, world.control.cycle.phase
    assert world.ended.exit_code == 0
    assert [step for _, step, _ in world.trained] == [1, 2, 3, 4]
    assert world.control.pool[A].num_restarts == num_asked, "one new process each time"
    assert world.control.pool[B].num_restarts == 0


def test_a_reload_that_is_on_its_way_does_not_wait_for_an_engine_that_is_restarted():
    rng = Random(1)
    world = started(total_steps=3)
    run_until(world, rng, lambda w: w.control.publication.waiting_for == (A, B))
    # Not through the world, which would end the process before anything else happens.
    done = world.control.on_event(events.RestartRequested(A), Moment(world.now, 1))
    assert commands.ReplaceInstance(A, "the operator asked for it") in done
    assert world.control.publication.waiting_for == (B,)
    assert world.control.pool[A].last_error == ""
    run_until(world, rng, lambda w: w.control.publication.committed is not None)
    assert A not in world.routes


def test_an_engine_given_up_below_the_minimum_ends_the_run_with_its_first_cause():
    world = started(min_rollout_gpus=2)
    gave_up = events.ChildGaveUp(
        ChildId(A), "5 restarts in 600 s", "killed by SIGKILL", 6, ("last words",), 1.0
    )
    world.post(gave_up)
    assert world.ended is not None
    assert world.ended.exit_code == 4
    assert "First cause: killed by SIGKILL" in world.ended.reason
    assert "last words" in world.ended.reason


def test_the_pool_goes_on_without_an_engine_while_the_minimum_holds():
    rng = Random(4)
    world = started(total_steps=3)
    run_until(world, rng, lambda w: w.control.cycle.step == 1)
    process = world.processes.pop(A)
    world.pending = [e for e in world.pending if getattr(e, "instance_id", None) != A]
    for event in (
        events.ChildExited(
            child_id=ChildId(A), incarnation=process.incarnation, exit_code=0, signal=None,
            asked_for=False, reason="exited with code 0", last_lines=(), at=1.0,
        ),
        events.ChildGaveUp(ChildId(A), "too often", "exited with code 0", 6, (), 1.0),
    ):  # fmt: skip
        world.post(event)
    (said,) = [it for it in world.said if it.event == "instance_given_up"]
    assert said.is_warning
    assert said.fields == {"instance": A, "why": "too often", "cause": "exited with code 0"}
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0


def test_a_drained_engine_gets_no_work_and_comes_back_when_undrained():
    rng = Random(8)
    world = started(total_steps=20)
    run_until(world, rng, lambda w: len(w.routes) == 2)
    world.post(events.DrainRequested(A, drain=True))
    assert list(world.routes) == [B]
    run_until(world, rng, lambda w: w.control.cycle.step == 2)
    assert A not in world.routes
    run_until(world, rng, lambda w: w.control.cycle.phase is Phase.COLLECTING)
    world.post(events.DrainRequested(A, drain=False))
    assert set(world.routes) == {A, B}


def test_a_drained_engine_is_unrouted_at_once_and_routed_to_again_when_undrained():
    rng = Random(3)
    world = started(total_steps=3)
    run_until(world, rng, lambda w: A in w.routes)
    world.post(events.DrainRequested(A, drain=True))
    assert A not in world.routes
    world.post(events.DrainRequested(A, drain=False))
    assert world.routes[A] == world.control.publication.committed
    world.post(events.DrainRequested(A, drain=True))
    world.run(rng)
    assert world.ended.exit_code == 0
    assert A not in world.routes, "reloads do not bring it back"
    assert world.processes[A].version == 3
