"""Evaluations beside rollouts, training and publications."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_runs import run_until, started
from libra_supervisor import events
from libra_supervisor.loop.cycle import Phase


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
