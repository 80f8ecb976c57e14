from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.planner.pace import RolloutPace, TrainPace, step_seconds

seconds = st.floats(0.01, 1000)


def train(train_s, *, export_s=0.0, sync_s=0.0):
    return TrainPace(train_s=train_s, export_s=export_s, sync_s=sync_s)


def rollout(one_s, all_s=None, *, num_batches=1, staleness=0.0, pause_s=0.0):
    return RolloutPace(
        one_batch_s=one_s,
        all_batches_s=one_s if all_s is None else all_s,
        num_batches=num_batches,
        max_staleness=staleness,
        pause_s=pause_s,
    )


def test_on_policy_the_two_sides_take_turns():
    both = step_seconds(train(100.0, export_s=10.0, sync_s=5.0), rollout(60.0, pause_s=2.0))
    assert both == pytest.approx(100 + 10 + 5 + 60 + 2)


def test_with_enough_staleness_the_slower_side_sets_the_pace():
    slow_rollout = rollout(50.0, 200.0, num_batches=8, staleness=20.0)
    assert step_seconds(train(10.0), slow_rollout) == pytest.approx(25.0)
    assert step_seconds(train(40.0), slow_rollout) == 40.0
    unbound = rollout(50.0, 200.0, num_batches=8, staleness=inf)
    assert step_seconds(train(10.0), unbound) == pytest.approx(25.0)


def test_one_version_of_staleness_is_not_enough_for_sides_that_are_equally_slow():
    """Two batches would end in 160 s, 80 s a step; but one must wait for the other's version."""
    pace = rollout(95.0, 160.0, num_batches=2, staleness=1.0)
    step_s = step_seconds(train(80.0), pace)
    allowed_s = 2 * step_s - 80
    assert 87.5 < step_s < 95
    assert pace.batches_s(allowed_s / step_s) == pytest.approx(allowed_s)
    assert step_seconds(train(20.0), pace) < step_s


def test_reloads_cost_the_trainer_nothing_while_they_are_shorter_than_training():
    far_behind = rollout(1.0, staleness=9.0, num_batches=9, all_s=1.0)
    assert step_seconds(train(50.0, export_s=4.0, sync_s=50.0), far_behind) == 54.0
    assert step_seconds(train(50.0, export_s=4.0, sync_s=70.0), far_behind) == 74.0


def test_what_is_dropped_has_to_be_made_again():
    once = rollout(60.0)
    again = RolloutPace(
        one_batch_s=60.0,
        all_batches_s=60.0,
        num_batches=1,
        max_staleness=0.0,
        waste_factor=1.5,
        pause_s=0.0,
    )
    assert step_seconds(train(100.0), once) == pytest.approx(160.0)
    assert step_seconds(train(100.0), again) == pytest.approx(190.0)


@given(
    training=st.builds(train, seconds, export_s=seconds, sync_s=seconds),
    one_s=seconds,
    share=st.floats(1, 8),
    num_batches=st.integers(2, 8),
    staleness=st.floats(0, 8),
    pause_s=seconds,
)
def test_a_step_is_never_shorter_than_either_side_and_more_staleness_never_makes_it_longer(
    training, one_s, share, num_batches, staleness, pause_s
):
    def step_s(versions):
        return step_seconds(
            training,
            rollout(
                one_s, one_s * min(share, num_batches), num_batches=num_batches,
                staleness=versions, pause_s=pause_s,
            ),
        )  # fmt: skip

    found = step_s(staleness)
    assert found >= training.busy_s
    assert found >= one_s * min(share, num_batches) / num_batches * (1 - 1e-9)
    assert step_s(staleness + 1) <= found * (1 + 1e-9)
