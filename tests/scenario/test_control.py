from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_world import RandomWorld
from libra.ids import ChildId, Incarnation, InstanceId
from libra.pools.member import MemberState
from libra.wire.rank import AcksJudged, WeightsExported
from libra_supervisor import events
from libra_supervisor.loop import commands
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.moment import Moment
from transfer_world import TransferWorld

A, B = InstanceId("vllm-0"), InstanceId("vllm-1")


METHODS = ["inplace", "restart", "transfer"]
STRATEGIES = ["parallel", "serial"]


def started(*, method="inplace", **knobs) -> RandomWorld:
    if method == "transfer":
        world = TransferWorld(**knobs)
    else:
        world = RandomWorld(reload_method=method, **knobs)
    world.boot()
    return world


def run_until(world: RandomWorld, rng: Random, condition) -> None:
    for _ in range(5000):
        if condition(world):
            return
        assert world.step(rng), "nothing is left to happen"
    raise AssertionError("it never came to that")


@given(
    seed=st.integers(0, 2**32),
    total=st.integers(1, 6),
    sync=st.integers(1, 3),
    save=st.integers(0, 3),
    slack=st.integers(0, 2),
    method=st.sampled_from(METHODS),
)
@settings(max_examples=60, deadline=None)
def test_a_run_without_faults_trains_every_step_once_within_the_staleness_bound(
    seed, total, sync, save, slack, method
):
    # At least sync_interval - 1, else nothing could ever be trained.
    bound = sync - 1 + slack
    world = started(
        total_steps=total,
        sync_interval=sync,
        save_interval=save,
        offpolicyness=bound,
        method=method,
    )
    world.run(Random(seed))
    assert world.ended is not None, world.control.cycle.phase
    assert world.ended.exit_code == 0
    assert [step for _, step, _ in world.trained] == list(range(1, total + 1))
    assert max(lag for _, _, lag in world.trained) <= bound
    assert [w.record.step for w in world.written] == list(range(1, total + 1))
    assert total in world.checkpoints


def strike(world: RandomWorld, rng: Random, fault: str) -> None:
    instance_id = A if fault.endswith("a") else B
    if fault == "gang":
        world.lose_gang()
    elif fault.startswith("load"):
        world.loads_to_fail.append(instance_id)
    elif fault.startswith("hang"):
        world.suspect_process(instance_id)
        world.step(rng)
        world.kill_process(instance_id)
    else:
        world.kill_process(instance_id)


@given(
    seed=st.integers(0, 2**32),
    faults=st.lists(
        st.tuples(
            st.integers(1, 120),
            st.sampled_from(["a", "b", "gang", "hang a", "load a", "load b"]),
        ),
        max_size=6,
    ),
    failures=st.floats(0.0, 0.15),
    method=st.sampled_from(METHODS),
    strategy=st.sampled_from(STRATEGIES),
)
@settings(max_examples=120, deadline=None)
def test_with_engines_and_gangs_dying_at_any_moment_every_step_is_still_trained(
    seed, faults, failures, method, strategy
):
    rng = Random(seed)
    if method == "transfer":
        strategy = "parallel"  # all receive at once
    world = started(total_steps=4, save_interval=1, method=method, reload_strategy=strategy)
    world.failure_chance = failures
    for wait, fault in faults:
        for _ in range(wait):
            if not world.step(rng):
                break
        if world.ended is not None:
            break
        strike(world, rng, fault)
    world.run(rng)
    assert world.ended is not None, world.control.cycle.phase
    if world.ended.exit_code == 4:
        # The one legal failure: every engine was lost in three batches of reloads in a row.
        assert len([fault for _, fault in faults if fault != "gang"]) >= 6
        assert "3 batches in a row" in world.ended.reason
        return
    assert world.ended.exit_code == 0, world.ended.reason
    # The weights of the last attempt at each step are the ones that count: no step is missing.
    final = {}
    for attempt, step, lag in world.trained:
        final[step] = attempt
        assert lag <= world.offpolicyness
    assert sorted(final) == [1, 2, 3, 4]
    assert list(final.values()) == sorted(final.values())


def test_training_and_rollouts_go_on_while_a_checkpoint_is_written():
    rng = Random(4)
    world = started(total_steps=6, save_interval=2)
    world.is_disk_stuck = True
    while world.step(rng):
        pass
    # Step 4 is due to be saved while step 2 still is: that far, and no further.
    assert [step for _, step, _ in world.trained] == [1, 2, 3, 4]
    assert world.control.cycle.phase is Phase.SAVING
    assert list(world.saving) == [2]
    counts = world.control.desk.counts
    assert counts.enqueued + counts.running == 0, "a group waits for the disk"
    assert world.control.desk.num_complete >= 4, "no further batch was made meanwhile"
    world.is_disk_stuck = False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert sorted(world.checkpoints) == [2, 4, 6]


@given(
    seed=st.integers(0, 2**32),
    total=st.integers(1, 7),
    sync=st.integers(1, 2),
    interval=st.integers(1, 4),
    failures=st.floats(0.0, 0.2),
)
@settings(max_examples=60, deadline=None)
def test_each_version_that_is_due_is_evaluated_once_by_itself_alone(
    seed, total, sync, interval, failures
):
    world = started(
        total_steps=total, sync_interval=sync, eval_rows=3, eval_interval=interval, save_interval=2
    )
    world.failure_chance = failures
    world.run(Random(seed))
    assert world.ended is not None, world.control.cycle.phase
    assert world.ended.exit_code == 0
    published = range(0, total + 1, sync)
    due = [v for v in published if v == 0 or v // interval > (v - sync) // interval]
    if published[-1] == total and total not in due:
        due.append(total)
    assert [command.record.policy_version for command in world.evaluated] == due
    for command in world.evaluated:
        summary, version = command.record.summary, command.record.policy_version
        assert summary.num_trajectories + summary.num_failed == 6
        assert len({t.trajectory_id.rsplit("/a", 1)[0] for t in command.trajectories}) == len(
            command.trajectories
        )
        assert {t.oldest_version for t in command.trajectories} <= {version}
    # Training is not changed by it.
    assert [step for _, step, _ in world.trained] == list(range(1, total + 1))


def test_rollouts_and_training_go_on_beside_an_evaluation_and_the_next_version_waits():
    rng = Random(11)
    world = started(total_steps=4, eval_rows=4, eval_interval=2)
    world.is_evaluation_stuck = True
    while world.step(rng):
        pass
    assert [step for _, step, _ in world.trained] == [1]
    assert world.control.cycle.phase is Phase.EVALUATING
    assert set(world.routes.values()) == {0}
    assert world.control.desk.num_complete >= 4
    world.is_evaluation_stuck = False
    world.run(rng)
    assert world.ended is not None
    assert [c.record.policy_version for c in world.evaluated] == [0, 2, 4]


@pytest.mark.case("T-B80")
def test_a_stop_does_not_wait_for_an_evaluation():
    rng = Random(11)
    world = started(total_steps=9, eval_rows=4, eval_interval=2)
    world.is_evaluation_stuck = True
    while world.step(rng):
        pass
    world.post(events.StopRequested("SIGTERM", now=False))
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert world.evaluated == []
    assert sorted(world.checkpoints) == [1]
    # Nothing of it is left in the engines.
    assert not any(getattr(e, "group_id", "").startswith("eval-") for e in world.pending)


def test_a_version_whose_evaluation_was_lost_with_the_gang_is_evaluated_again():
    rng = Random(11)
    world = started(total_steps=3, save_interval=1, eval_rows=2, eval_interval=2)
    world.is_evaluation_stuck = True
    run_until(world, rng, lambda w: w.control.evaluator.progress is not None)
    world.lose_gang()
    world.is_evaluation_stuck = False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert [c.record.policy_version for c in world.evaluated] == [0, 2, 3]


def test_a_run_waits_for_its_last_checkpoint_before_it_ends():
    rng = Random(4)
    world = started(total_steps=2, save_interval=0)
    world.is_disk_stuck = True
    while world.step(rng):
        pass
    assert world.ended is None
    assert world.control.cycle.phase is Phase.SAVING
    world.is_disk_stuck = False
    world.run(rng)
    assert world.ended is not None
    assert 2 in world.checkpoints


@pytest.mark.case("T-B50")
def test_a_gang_lost_while_a_checkpoint_is_written_goes_on_from_the_one_before():
    rng = Random(4)
    world = started(total_steps=6, save_interval=2)
    run_until(world, rng, lambda w: 2 in w.checkpoints)
    world.is_disk_stuck = True
    run_until(world, rng, lambda w: [s for _, s, _ in w.trained][-1] == 5)
    world.is_disk_stuck = False
    world.lose_gang()
    assert world.gang_version == 2
    world.run(rng)
    assert world.ended is not None
    assert [step for _, step, _ in world.trained] == [1, 2, 3, 4, 5, 3, 4, 5, 6]
    assert sorted(world.checkpoints) == [2, 4, 6]


@pytest.mark.case("T-B59")
def test_with_no_slack_every_batch_is_exactly_on_policy():
    world = started(total_steps=5, offpolicyness=0)
    world.run(Random(1))
    assert {lag for _, _, lag in world.trained} == {0}


@pytest.mark.case("T-B59")
def test_one_version_of_slack_is_used_but_never_exceeded():
    world = started(total_steps=8, offpolicyness=1)
    world.run(Random(3))
    assert max(lag for _, _, lag in world.trained) == 1


@pytest.mark.case("T-B47")
def test_after_a_lost_gang_no_burst_of_stale_work_is_let_in():
    rng = Random(7)
    world = started(total_steps=12, save_interval=1)
    run_until(world, rng, lambda w: 9 in w.checkpoints)
    world.lose_gang()
    world.run(rng)
    assert world.ended is not None
    assert max(lag for _, _, lag in world.trained) <= 1


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


def test_an_engine_whose_probe_disagrees_a_lot_ends_the_run_with_exit_code_6():
    world = started(probe_error_of=lambda i: 0.5 if i == B else 0.0)
    world.run(Random(0))
    assert world.ended is not None
    assert world.ended.exit_code == 6
    assert "differ by 0.5" in world.ended.reason


def test_a_run_over_a_fixed_number_of_epochs_ends_when_no_batch_can_be_filled():
    world = started(total_steps=None, epochs=2)
    world.run(Random(2))
    assert world.ended is not None
    assert world.ended.exit_code == 0
    # Two epochs of 5 prompts make 10 groups; a batch takes 2.
    assert len(world.trained) == 5


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


@pytest.mark.case("T-B80")
def test_a_second_stop_ends_at_once_with_130():
    rng = Random(6)
    world = started(total_steps=9)
    run_until(world, rng, lambda w: w.control.cycle.phase is Phase.TRAINING)
    world.post(events.StopRequested("SIGINT", now=False, exit_code=130))
    assert world.ended is None
    world.post(events.StopRequested("SIGINT", now=True))
    assert world.ended is not None
    assert world.ended.exit_code == 130


def test_a_batch_of_reloads_that_is_open_when_the_run_ends_has_its_line():
    rng = Random(6)
    world = started(total_steps=9)
    run_until(world, rng, lambda w: w.control.publication.waiting_for and w.control.cycle.step)
    version = world.control.cycle.step
    assert version not in [it.record.policy_version for it in world.reloads]
    world.post(events.StopRequested("SIGINT", now=True))
    assert world.ended is not None
    assert (world.reloads[-1].record.policy_version, world.reloads[-1].record.outcome) == (
        version, "cancelled: the run ended",
    )  # fmt: skip
    assert world.control.publication.is_idle


def test_one_stop_saves_the_step_that_was_being_trained():
    rng = Random(6)
    world = started(total_steps=9, save_interval=0)
    run_until(world, rng, lambda w: w.control.cycle.phase is Phase.TRAINING)
    step = world.control.cycle.step + 1
    world.post(events.StopRequested("SIGTERM", now=False))
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert list(world.checkpoints) == [step]


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


def test_a_reload_on_demand_brings_the_committed_version_once_more_and_disturbs_no_step():
    rng = Random(9)
    world = started(total_steps=6)
    run_until(world, rng, lambda w: w.control.cycle.step == 2)
    world.is_held = lambda event: isinstance(event, events.SampleStarted)
    run_until(world, rng, lambda w: w.control.publication.committed == 2)
    num_reloads, committed = len(world.reloads), world.control.publication.committed
    world.post(events.ReloadRequested())
    run_until(world, rng, lambda w: len(w.reloads) > num_reloads)
    world.is_held = lambda event: False
    again = world.reloads[num_reloads].record
    assert again.is_catch_up
    assert again.policy_version == committed
    assert set(again.accepted) == {A, B}
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert [step for _, step, _ in world.trained] == [1, 2, 3, 4, 5, 6]


@pytest.mark.case("T-B63")
def test_a_version_that_no_engine_lived_to_prove_is_tried_again_with_their_replacements():
    rng = Random(10)
    world = started(total_steps=5, num_instances=1)
    run_until(world, rng, lambda w: w.control.cycle.step == 2)
    run_until(world, rng, lambda w: w.control.publication.waiting_for == (A,))
    world.kill_process(A)
    assert world.ended is None
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert [step for _, step, _ in world.trained] == [1, 2, 3, 4, 5]
    outcomes = [w.record.outcome.split(":")[0] for w in world.reloads]
    assert outcomes.count("failed") == 1


def test_a_version_that_fails_everywhere_three_times_ends_the_run():
    rng = Random(11)
    world = started(total_steps=5, num_instances=1)
    run_until(world, rng, lambda w: w.control.cycle.phase is Phase.COLLECTING)
    for _ in range(3):
        run_until(world, rng, lambda w: w.control.publication.waiting_for == (A,))
        run_until(world, rng, lambda w: any(r.instance_id == A for r in reload_answers(w)))
        world.kill_process(A)
    assert world.ended is not None
    assert world.ended.exit_code == 4
    assert "3 batches in a row" in world.ended.reason


def reload_answers(world: RandomWorld) -> list[events.ReloadAnswered]:
    return [e for e in world.pending if isinstance(e, events.ReloadAnswered)]


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


def is_reload_answer(event: object) -> bool:
    return isinstance(event, events.ReloadAnswered)


def is_export(event: object) -> bool:
    return isinstance(event, events.RankSaid) and isinstance(event.event, WeightsExported)


def is_verdict(event: object) -> bool:
    return isinstance(event, events.RankSaid) and isinstance(event.event, AcksJudged)


def run_until_stuck(world: RandomWorld, rng: Random) -> None:
    while world.step(rng):
        pass


@pytest.mark.parametrize("held", [is_reload_answer, is_verdict])
def test_the_trainer_trains_the_next_batch_while_engines_load_and_waits_before_it_publishes(held):
    rng = Random(12)
    world = started(total_steps=5, offpolicyness=1)
    run_until(world, rng, lambda w: w.publishing == 1)
    world.is_held = held
    run_until_stuck(world, rng)
    assert [step for _, step, _ in world.trained] == [1, 2]
    assert world.trained_while_publishing[-1] == 2
    assert world.published[-1] == (1, 1)
    assert world.control.cycle.phase is Phase.SETTLING
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert [version for _, version in world.published] == [0, 1, 2, 3, 4, 5]
    assert world.written[1].record.publish_wait_s > 0


def test_with_no_slack_the_trainer_cannot_go_ahead_of_the_engines():
    rng = Random(13)
    world = started(total_steps=3, offpolicyness=0)
    run_until(world, rng, lambda w: w.publishing == 1)
    world.is_held = is_reload_answer
    run_until_stuck(world, rng)
    assert [step for _, step, _ in world.trained] == [1]
    assert world.control.cycle.phase is Phase.COLLECTING
    world.is_held = lambda event: False
    world.run(rng)
    assert {lag for _, _, lag in world.trained} == {0}
    assert {w.record.publish_wait_s for w in world.written} == {0.0}


def test_weights_trained_past_a_version_that_disagrees_are_never_published():
    rng = Random(14)
    wrong = []
    world = started(total_steps=9, probe_error_of=lambda i: 7.0 if wrong else 0.0)
    run_until(world, rng, lambda w: w.publishing == 2)
    wrong.append(True)
    world.is_held = lambda event: isinstance(event, events.ExportChecked)
    run_until_stuck(world, rng)
    world.is_held = is_verdict
    run_until_stuck(world, rng)
    assert [step for _, step, _ in world.trained] == [1, 2, 3]
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 6
    assert world.published[-1] == (1, 2)


def test_a_broken_export_ends_the_run_though_the_trainer_went_on():
    rng = Random(15)
    world = started(total_steps=9)
    run_until(world, rng, lambda w: w.publishing == 1)
    world.is_held = lambda event: isinstance(event, events.ExportChecked)
    run_until_stuck(world, rng)
    (checked,) = (e for e in world.pending if isinstance(e, events.ExportChecked))
    world.pending.remove(checked)
    served = dict(world.routes)
    world.post(msgspec.structs.replace(checked, error="model.safetensors is missing"))
    assert world.ended is not None
    assert world.ended.exit_code == 4
    assert "model.safetensors is missing" in world.ended.reason
    # No engine was asked for it.
    assert set(served.values()) == {0}
    assert {process.version for process in world.processes.values()} == {0}


def test_the_run_ends_only_when_the_last_version_is_committed():
    rng = Random(16)
    world = started(total_steps=2)
    run_until(world, rng, lambda w: w.publishing == 2)
    world.is_held = is_reload_answer
    run_until_stuck(world, rng)
    assert world.ended is None
    assert 2 in world.checkpoints
    assert world.control.cycle.phase is Phase.SETTLING
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert set(world.routes.values()) == {2}


def test_a_gang_lost_while_engines_load_publishes_its_checkpoint_anew():
    rng = Random(17)
    world = started(total_steps=4, save_interval=1)
    run_until(world, rng, lambda w: w.publishing == 2)
    world.is_held = is_reload_answer
    run_until_stuck(world, rng)
    world.lose_gang()
    assert world.routes == {}
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert next(v for attempt, v in world.published if attempt == 2) == 2
    assert any(said.event == "ack_refused" for said in world.said)


def test_a_reload_on_demand_is_refused_while_a_version_is_being_checked():
    rng = Random(18)
    world = started(total_steps=3)
    run_until(world, rng, lambda w: w.publishing == 1)
    world.is_held = lambda event: isinstance(event, events.ExportChecked)
    run_until_stuck(world, rng)
    num_reloads = len(world.reloads)
    world.post(events.ReloadRequested())
    assert world.said[-1].event == "reload_refused"
    world.is_held = lambda event: False
    world.run(rng)
    assert not any(w.record.is_catch_up for w in world.reloads[num_reloads:])


@pytest.mark.case("R-B89")
def test_an_engine_whose_load_failed_is_loaded_once_more_from_the_good_version_and_lives():
    rng = Random(19)
    world = started(total_steps=5)
    run_until(world, rng, lambda w: w.publishing == 2)
    world.loads_to_fail.append(A)
    run_until(world, rng, lambda w: w.control.publication.committed == 2)
    assert A not in world.routes
    assert world.control.pool[A].state is not MemberState.SERVING
    (record,) = (w.record for w in world.reloads if w.record.policy_version == 2)
    assert "loading failed" in record.quarantined[A]
    assert record.accepted == (B,)
    assert [ack.error for ack in record.acks if ack.instance_id == A] == ["loading failed"]
    world.run(rng)
    rescue = next(w.record for w in world.reloads if w.record.is_catch_up)
    assert (rescue.policy_version, rescue.accepted, rescue.outcome) == (2, (A,), "committed")
    assert world.num_births_of[A] == 1
    assert set(world.routes) == {A, B}


@pytest.mark.case("R-B89")
def test_an_engine_that_fails_the_good_version_too_is_replaced():
    rng = Random(20)
    world = started(total_steps=5)
    run_until(world, rng, lambda w: w.publishing == 2)
    world.loads_to_fail += [A, A]
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert world.num_births_of[A] == 2
    assert set(world.routes) == {A, B}
    assert world.control.publication.counts.num_quarantined == 2


def test_without_a_good_version_an_engine_whose_load_failed_is_replaced_at_once():
    rng = Random(21)
    world = started(total_steps=3, num_instances=1)
    run_until(world, rng, lambda w: w.publishing == 1)
    world.loads_to_fail.append(A)
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert world.num_births_of[A] == 2


def test_a_failed_engine_does_not_outlive_its_gang_unreplaced():
    rng = Random(22)
    world = started(total_steps=3)
    run_until(world, rng, lambda w: w.publishing == 1)
    world.loads_to_fail.append(A)
    world.is_held = is_verdict
    run_until_stuck(world, rng)
    world.lose_gang()
    assert world.num_births_of[A] == 2
    assert world.reloads[-1].record.outcome == "cancelled: the gang was lost"
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert set(world.routes) == {A, B}


@pytest.mark.case("R-B87")
def test_only_what_is_not_newer_is_forced_upon_a_server():
    rng = Random(23)
    asked = []
    world = started(total_steps=4, save_interval=2)
    send = world._reload
    world._reload = lambda i, n, request: (asked.append(request), send(i, n, request))
    run_until(world, rng, lambda w: w.publishing == 3)
    run_until(world, rng, lambda w: w.control.publication.committed == 3)
    forced = {r.policy_version: r.force for r in asked}
    # Of the first one nobody knows what servers of an earlier supervisor hold.
    assert forced == {0: True, 1: False, 2: False, 3: False}
    world.lose_gang()
    asked.clear()
    world.run(rng)
    assert {r.policy_version: r.force for r in asked} == {2: True, 3: True, 4: False}


def test_a_duplicate_ack_is_refused_logged_and_recorded_with_the_batch():
    rng = Random(24)
    world = started(total_steps=2)
    run_until(world, rng, lambda w: w.publishing == 1)
    run_until(world, rng, lambda w: any(is_reload_answer(e) for e in w.pending))
    answer = next(e for e in world.pending if is_reload_answer(e))
    world.pending.remove(answer)
    world.post(answer)
    world.post(answer)
    assert world.said[-1].event == "ack_refused"
    world.run(rng)
    (record,) = (w.record for w in world.reloads if w.record.policy_version == 1)
    assert [(r.ack, r.reason) for r in record.refused_acks] == [
        (answer.ack, "the instance has answered already")
    ]
    assert world.control.publication.counts.num_refused_acks == 1


def test_an_ack_that_comes_after_its_batch_is_recorded_by_itself():
    rng = Random(26)
    world = started(total_steps=2)
    run_until(world, rng, lambda w: any(is_reload_answer(e) for e in w.pending))
    answer = next(e for e in world.pending if is_reload_answer(e))
    run_until(world, rng, lambda w: w.control.publication.committed == 0)
    assert world.control.publication.is_idle
    num_reloads = len(world.reloads)
    world.post(answer)
    (stray,) = (written.record for written in world.stray_acks)
    assert (stray.outcome, stray.nonce, stray.policy_version) == ("no batch", answer.nonce, 0)
    assert [(r.ack, r.reason) for r in stray.refused_acks] == [
        (answer.ack, "no reload batch is open")
    ]
    assert stray.wall_time_ns == int(world.now * 1e9)
    assert len(world.reloads) == num_reloads
    assert world.control.publication.counts.num_refused_acks == 1


def test_an_ack_of_another_server_than_the_one_that_was_asked_proves_nothing():
    rng = Random(27)
    world = started(total_steps=2)
    run_until(world, rng, lambda w: w.publishing == 1)
    run_until(world, rng, lambda w: len([e for e in w.pending if is_reload_answer(e)]) == 2)
    of_a, of_b = sorted(
        (e for e in world.pending if is_reload_answer(e)), key=lambda e: e.instance_id
    )
    world.pending.remove(of_a)
    world.post(msgspec.structs.replace(of_a, ack=of_b.ack))
    assert world.control.publication.waiting_for == (B,), "nobody waits for what cannot come"
    assert A not in world.routes
    world.run(rng)
    record = next(w.record for w in world.reloads if w.record.policy_version == 1)
    assert record.accepted == (B,)
    assert [(r.ack, r.reason) for r in record.refused_acks] == [
        (of_b.ack, f"{A} was asked and answered as {B}")
    ]
    assert record.quarantined == {A: f"{A} was asked and answered as {B}"}
    assert world.num_births_of[A] == 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"run_id": "run-2"}, "another run or an earlier try"),
        ({"nonce": "earlier"}, "another run or an earlier try"),
        ({"incarnation": "vllm-0-99"}, "it comes from the incarnation vllm-0-99"),
        ({"method": "restart"}, "it reports restart/parallel"),
        ({"strategy": "serial"}, "it reports inplace/serial"),
    ],
)
def test_a_server_whose_answer_is_refused_is_not_waited_for_until_the_timeout(wrong, why):
    rng = Random(28)
    world = started(total_steps=2)
    run_until(world, rng, lambda w: w.publishing == 1)
    run_until(world, rng, lambda w: len([e for e in w.pending if is_reload_answer(e)]) == 2)
    answer = next(e for e in world.pending if is_reload_answer(e) and e.instance_id == A)
    world.pending.remove(answer)
    ack = msgspec.structs.replace(answer.ack, **wrong)
    world.post(msgspec.structs.replace(answer, ack=ack))
    assert world.control.publication.waiting_for == (B,)
    world.run(rng)
    record = next(w.record for w in world.reloads if w.record.policy_version == 1)
    assert record.accepted == (B,)
    assert [r.ack for r in record.refused_acks] == [ack]
    assert why in record.quarantined[A]
    assert world.ended.exit_code == 0


def test_a_late_engine_is_judged_by_the_probe_of_the_version_it_was_asked_for():
    """The next version may be written while an engine still catches up with the one before."""
    rng = Random(25)
    world = started(total_steps=9)
    run_until(world, rng, lambda w: w.control.publication.committed == 1)
    world.kill_process(A)
    world.is_held = lambda event: is_reload_answer(event) or is_export(event)
    run_until_stuck(world, rng)
    world.is_held = lambda event: is_reload_answer(event) or isinstance(event, events.ExportChecked)
    run_until_stuck(world, rng)
    (late,) = (event for event in world.pending if is_reload_answer(event))
    assert world.publishing == 2
    world.pending.remove(late)
    world.post(late)
    assert world.ended is None
    assert world.routes[A] == 1
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0


def test_with_serial_reloads_the_others_serve_until_it_is_their_turn():
    rng = Random(28)
    world = started(total_steps=2, reload_strategy="serial")
    run_until(world, rng, lambda w: w.publishing == 1)
    world.is_held = is_reload_answer
    run_until_stuck(world, rng)
    (first,) = (e for e in world.pending if is_reload_answer(e))
    assert (first.instance_id, world.routes) == (A, {B: 0})
    world.pending.remove(first)
    world.post(first)
    (second,) = (e for e in world.pending if is_reload_answer(e))
    assert (second.instance_id, world.routes) == (B, {})
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended.exit_code == 0
    assert set(world.routes.values()) == {2}


def test_why_nothing_can_be_reloaded_now_is_told():
    rng = Random(29)
    world = started(total_steps=3)
    publication = world.control.publication
    assert publication.why_not_refresh(None) == "no published version is served"
    run_until(world, rng, lambda w: w.control.publication.committed == 0)
    assert publication.why_not_refresh(None) == ""
    world.is_held = lambda event: isinstance(event, events.ExportChecked)
    run_until_stuck(world, rng)
    assert publication.why_not_refresh(None) == "v1 is on its way"
    world.is_held = is_reload_answer
    run_until_stuck(world, rng)
    assert publication.why_not_refresh(None) == "a reload is on its way"


@pytest.mark.case("R-B82")
def test_the_version_of_a_server_that_is_leaving_is_kept_with_the_committed_one():
    rng = Random(30)
    world = started(total_steps=2)
    run_until(world, rng, lambda w: w.control.publication.committed == 0)
    world.control.pool.on_replace_requested(A, now=world.now)
    run_until(world, rng, lambda w: w.control.publication.committed == 1)
    assert world.pinned[-1] == {0, 1}


def test_after_a_lost_gang_no_version_is_committed_for_a_new_process_to_start_from():
    rng = Random(31)
    world = started(total_steps=3)
    run_until(world, rng, lambda w: w.control.publication.committed == 1)
    world.lose_gang()
    assert world.control.publication.committed is None
    world.run(rng)
    assert world.ended.exit_code == 0


@pytest.mark.case("R-B82")
def test_who_comes_up_gets_no_version_that_has_not_been_checked():
    rng = Random(32)
    world = started(total_steps=5)
    run_until(world, rng, lambda w: w.publishing == 2)
    world.is_held = lambda event: isinstance(event, events.ExportChecked)
    run_until_stuck(world, rng)
    world.kill_process(A)
    run_until_stuck(world, rng)
    assert world.control.publication.committed == 1
    assert not any(is_reload_answer(event) for event in world.pending)
    assert all(process.version < 2 for process in world.processes.values())
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended.exit_code == 0


@pytest.mark.case("R-B89")
def test_a_process_that_was_to_be_rescued_and_died_is_not_asked_under_its_successors_name():
    rng = Random(33)
    world = started(total_steps=5)
    run_until(world, rng, lambda w: w.publishing == 2)
    world.loads_to_fail.append(A)
    world.is_held = lambda event: is_reload_answer(event) and event.instance_id == B
    run_until_stuck(world, rng)
    assert world.control.pool[A].state is MemberState.QUARANTINED
    world.is_held = lambda event: isinstance(event, events.InstanceAnswered)
    world.kill_process(A)
    run_until(world, rng, lambda w: w.control.publication.committed == 2)
    asked = [event for event in world.pending if is_reload_answer(event)]
    assert not any(event.instance_id == A for event in asked)
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended.exit_code == 0
    assert world.num_births_of[A] == 2
