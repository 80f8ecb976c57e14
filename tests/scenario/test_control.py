"""A run of `Control` from its first step to its end: steps, staleness, checkpoints, stops."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_runs import A, B, run_until, started
from control_world import RandomWorld
from libra.errors import DataError
from libra_supervisor import events
from libra_supervisor.loop.cycle import Phase

METHODS = ["inplace", "restart", "transfer"]
STRATEGIES = ["parallel", "serial"]


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


def test_a_run_over_a_fixed_number_of_epochs_ends_when_no_batch_can_be_filled():
    world = started(total_steps=None, epochs=2)
    world.run(Random(2))
    assert world.ended is not None
    assert world.ended.exit_code == 0
    # Two epochs of 5 prompts make 10 groups; a batch takes 2.
    assert len(world.trained) == 5


@pytest.mark.case("T-B41")
@pytest.mark.parametrize("seed", range(5))
def test_a_last_batch_that_lacks_prompts_that_keep_failing_is_filled_from_the_next_epoch(seed):
    world = started(total_steps=None, epochs=1)
    world.hopeless = frozenset({"p1", "p2"})
    world.run(Random(seed))
    assert world.ended is not None
    assert world.ended.exit_code == 0
    # Three prompts are left of five, and a batch takes two.
    assert len(world.trained) == 2
    assert world.ended.reason == "every epoch is done; left out: 2 prompts that kept failing"
    assert world.control.desk.num_complete == 0


def test_of_epochs_without_a_loss_every_prompt_is_trained_on_as_often():
    world = started(total_steps=None, epochs=2)
    world.run(Random(3))
    assert world.ended is not None
    assert world.ended.reason == "every epoch is done"
    assert world.control.desk.counts.submitted == world.control.desk.counts.consumed


@pytest.mark.case("T-B41")
def test_epochs_in_which_every_prompt_keeps_failing_are_no_success():
    world = started(total_steps=None, epochs=1)
    world.hopeless = frozenset({"p0", "p1", "p2", "p3", "p4"})
    with pytest.raises(DataError, match="all 5 prompts failed 3 times each"):
        world.run(Random(2))


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
