from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.ids import PolicyVersion
from libra.rollouts.evaluation import Evaluation, EvaluationTerms, is_evaluated
from libra.rollouts.seeds import sampling_seed
from trajectories import trajectory

V3 = PolicyVersion(3)


def terms(**changes) -> EvaluationTerms:
    given = {"rows": (0, 1), "num_samples": 2, "max_concurrent": 8, "max_attempts": 2}
    return EvaluationTerms(**given | {"pass_reward": 1.0} | changes)


def finish(evaluation: Evaluation, group, reward: float = 1.0, *, version: int = 3, **changes):
    done = trajectory(group, version=version, reward=reward)
    evaluation.on_finished(msgspec.structs.replace(done, **changes))


@given(
    num_rows=st.integers(1, 5),
    num_samples=st.integers(1, 4),
    max_concurrent=st.integers(1, 6),
    failures=st.lists(st.booleans(), max_size=40),
)
def test_every_row_is_evaluated_exactly_as_often_as_wanted(
    num_rows, num_samples, max_concurrent, failures
):
    wanted = terms(
        rows=tuple(range(num_rows)), num_samples=num_samples, max_concurrent=max_concurrent
    )
    evaluation = Evaluation(wanted, V3)
    running, ended, fails = [], Counter(), iter(failures)
    while not evaluation.is_done:
        running += evaluation.admit()
        assert 0 < len(running) <= max_concurrent
        group = running.pop(0)
        if next(fails, False):
            evaluation.on_failed(group.group_id)
            # Said once more by somebody late: it counts once.
            evaluation.on_failed(group.group_id)
        else:
            finish(evaluation, group)
            ended[group.prompt.row, group.prompt.epoch] += 1
    assert evaluation.admit() == []
    summary = evaluation.summary()
    assert set(ended.values()) <= {1}
    assert summary.num_trajectories == len(ended)
    assert summary.num_trajectories + summary.num_failed == num_rows * num_samples
    assert evaluation.progress == (num_rows * num_samples, num_rows * num_samples)


def test_means_are_over_rows_and_pass_at_k_over_their_samples():
    evaluation = Evaluation(terms(num_samples=3), V3)
    rewards = {0: [1.0, 0.0, 0.0], 1: [0.5, 0.25, 0.75]}
    for group in evaluation.admit():
        finish(evaluation, group, rewards[group.prompt.row].pop(0))
    summary = evaluation.summary()
    assert summary.reward_mean == pytest.approx((1 / 3 + 0.5) / 2)
    assert summary.pass_at == pytest.approx({"1": (1 / 3) / 2, "2": (2 / 3) / 2, "3": 0.5})
    assert summary.num_rows == 2
    assert summary.response_tokens_mean == 2.0
    assert summary.truncated_fraction == 0.0


def test_a_lower_pass_reward_counts_partial_answers():
    evaluation = Evaluation(terms(rows=(0,), num_samples=2, pass_reward=0.5), V3)
    for group, reward in zip(evaluation.admit(), (0.5, 0.4), strict=True):
        finish(evaluation, group, reward)
    assert evaluation.summary().pass_at == {"1": 0.5, "2": 1.0}


def test_an_answer_in_which_another_version_had_a_part_is_asked_for_again():
    evaluation = Evaluation(terms(rows=(0,), num_samples=1), V3)
    (first,) = evaluation.admit()
    finish(evaluation, first, version=2)
    assert not evaluation.is_done
    (second,) = evaluation.admit()
    assert second.group_id != first.group_id
    finish(evaluation, second, version=3)
    assert evaluation.summary().num_trajectories == 1
    assert evaluation.summary().num_failed == 0


def test_a_row_that_always_fails_is_counted_and_in_no_mean():
    evaluation = Evaluation(terms(rows=(0, 1), num_samples=1), V3)
    good, bad = evaluation.admit()
    finish(evaluation, good, 1.0)
    evaluation.on_failed(bad.group_id)
    (again,) = evaluation.admit()
    evaluation.on_failed(again.group_id)
    summary = evaluation.summary()
    assert (summary.num_failed, summary.reward_mean, summary.pass_at) == (1, 1.0, {"1": 1.0})


def test_samples_have_seeds_of_their_own_and_versions_share_them():
    seeds = [
        [sampling_seed(7, group, sample_index=0) for group in Evaluation(terms(), version).admit()]
        for version in (V3, PolicyVersion(4))
    ]
    assert len(set(seeds[0])) == 4
    assert seeds[0] == seeds[1]


def test_groups_of_an_evaluation_are_told_from_those_of_training():
    (group, *_) = Evaluation(terms(), V3).admit()
    assert is_evaluated(group.group_id)
    assert not is_evaluated("row-0/e0/a0")
