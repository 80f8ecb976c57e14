import numpy as np
import pytest

from libra.algorithms.advantage import group_advantages
from libra.config.algorithm import AlgorithmConfig
from libra.errors import InvariantError
from libra.ids import PolicyVersion
from libra.rollouts.batch import BatchShape, balanced_shares, shard, trained_mini_batches
from libra.rollouts.group import CompleteGroup
from libra.rollouts.seeds import sampling_seed
from libra.rollouts.summary import summarize
from trajectories import admitted, complete, trajectory


def groups(num_groups=4, n_samples=2):
    return [complete(admitted(row, n_samples=n_samples)) for row in range(num_groups)]


def samples_of(shards):
    return [s for mini_batches in shards for m in mini_batches for s in m.samples]


def test_every_trajectory_reaches_exactly_one_rank_with_its_advantage():
    batch = groups()
    advantages = [float(i) for i in range(8)]
    shards = shard(batch, advantages, BatchShape(dp_size=2, mini_batch_size=4))
    assert [len(m.samples) for mini_batches in shards for m in mini_batches] == [2, 2, 2, 2]
    advantage_of = {s.trajectory_id: s.advantage for s in samples_of(shards)}
    ids = [t.trajectory_id for g in batch for t in g.trajectories]
    assert advantage_of == dict(zip(ids, advantages, strict=True))


def test_mini_batches_keep_the_order_of_the_groups():
    batch = groups()
    shards = shard(batch, [0.0] * 8, BatchShape(dp_size=2, mini_batch_size=4))
    first_step = {s.trajectory_id for rank in shards for s in rank[0].samples}
    assert first_step == {t.trajectory_id for g in batch[:2] for t in g.trajectories}


@pytest.mark.case("T-B19")
def test_counts_are_those_of_the_whole_mini_batch_on_every_rank():
    group = admitted(0)
    long, short = trajectory(group, 0, num_response=5), trajectory(group, 1, num_response=1)
    batch = [CompleteGroup(group, (long, short))]
    shards = shard(batch, [1.0, -1.0], BatchShape(dp_size=2, mini_batch_size=2))
    assert [m.global_num_tokens for (m,) in shards] == [6, 6]
    assert [m.global_num_sequences for (m,) in shards] == [2, 2]


def test_arrays_are_little_endian_and_as_long_as_the_trajectory():
    (sample,) = samples_of(
        shard(
            [CompleteGroup(admitted(0, n_samples=1), (trajectory(admitted(0)),))],
            [0.5],
            BatchShape(dp_size=1, mini_batch_size=1),
        )
    )
    assert np.frombuffer(sample.token_ids, "<i4").tolist() == [1, 2, 10, 11]
    assert np.frombuffer(sample.loss_mask, np.uint8).tolist() == [0, 0, 1, 1]
    assert np.frombuffer(sample.rollout_logprobs, "<f4").tolist() == [0.0, 0.0, -0.5, -0.5]


@pytest.mark.case("T-B14")
def test_masked_truncated_trajectories_stay_in_the_batch_without_a_token():
    group = admitted(0)
    cut = trajectory(group, 0, finish_reason="length", num_response=3)
    batch = [CompleteGroup(group, (cut, trajectory(group, 1)))]
    shape = BatchShape(dp_size=1, mini_batch_size=2, mask_truncated=True)
    ((mini_batch,),) = shard(batch, [1.0, -1.0], shape)
    assert (mini_batch.global_num_tokens, mini_batch.global_num_sequences) == (2, 1)
    assert len(mini_batch.samples) == 2
    all_cut = [CompleteGroup(group, (cut, trajectory(group, 1, finish_reason="length")))]
    ((mini_batch,),) = shard(all_cut, [1.0, -1.0], shape)
    assert (mini_batch.global_num_tokens, mini_batch.global_num_sequences) == (0, 0)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(InvariantError, match="8 trajectories do not divide"):
        shard(groups(), [0.0] * 8, BatchShape(dp_size=3, mini_batch_size=4))


def test_shards_of_hybrids_come_last_and_may_be_one_sample_smaller():
    shape = BatchShape(dp_size=2, mini_batch_size=4, num_hybrid_shards=1)
    shards = shard(groups(), [0.0] * 8, shape)
    assert [[len(m.samples) for m in mini_batches] for mini_batches in shards] == [
        [2, 2],
        [1, 1],
        [1, 1],
    ]
    assert {m.global_num_sequences for mini_batches in shards for m in mini_batches} == {4}
    assert len({s.trajectory_id for s in samples_of(shards)}) == 8


def test_a_mini_batch_without_a_token_is_not_trained():
    group = admitted(0)
    cut = [trajectory(group, i, finish_reason="length", num_response=3) for i in range(2)]
    batch = [CompleteGroup(group, tuple(cut)), *groups(num_groups=1)]
    shape = BatchShape(dp_size=1, mini_batch_size=2)
    assert trained_mini_batches(batch, shape) == (0, 1)
    masked = BatchShape(dp_size=1, mini_batch_size=2, mask_truncated=True)
    assert trained_mini_batches(batch, masked) == (1,)


def test_shares_have_equal_counts_and_nearly_equal_lengths():
    lengths = [100, 1, 50, 50, 99, 2]
    shares = balanced_shares(lengths, 2)
    assert sorted(len(s) for s in shares) == [3, 3]
    assert sorted(i for s in shares for i in s) == list(range(6))
    totals = [sum(lengths[i] for i in s) for s in shares]
    assert abs(totals[0] - totals[1]) <= 2


def test_a_batch_is_summed_up_for_the_metrics():
    first, second = admitted(0), admitted(1)
    batch = [
        complete(first, version=3, rewards=[0.0, 1.0]),
        complete(second, version=2, rewards=[1.0, 1.0]),
    ]
    summary = summarize(batch, version=PolicyVersion(3))
    assert summary.reward_mean == 0.75
    assert summary.reward_std == pytest.approx(0.4330127)
    assert summary.frac_zero_std == 0.5
    assert (summary.staleness_mean, summary.staleness_max) == (0.5, 1)
    assert (summary.num_trajectories, summary.num_tokens) == (4, 16)
    assert (summary.response_tokens_mean, summary.response_tokens_max) == (2.0, 2)


def test_long_and_cut_answers_are_told_apart_in_the_metrics():
    group = admitted(0)
    made = (
        trajectory(group, 0, num_response=2),
        trajectory(group, 1, num_response=5, finish_reason="length"),
    )
    summary = summarize([CompleteGroup(group, made)], version=PolicyVersion(0))
    assert (summary.response_tokens_mean, summary.response_tokens_max) == (3.5, 5)
    assert summary.truncated_fraction == 0.5
    assert summary.num_tokens == 11


@pytest.mark.case("T-B22")
@pytest.mark.parametrize("rewards", [[0.3, 0.1 + 0.2], [5.0, 5.0], [1e9, 1e9 + 1]])
def test_a_group_counts_as_flat_exactly_when_it_has_no_advantage(rewards):
    group = complete(admitted(0), rewards=rewards)
    assert group_advantages(rewards, AlgorithmConfig()) == [0.0, 0.0]
    assert group.is_flat
    assert not complete(admitted(1), rewards=[0.3, 0.30001]).is_flat
    assert summarize([group], version=PolicyVersion(0)).frac_zero_std == 1.0


def test_sampling_seeds_differ_in_everything_that_makes_a_request_another_one():
    seeds = {
        sampling_seed(
            run_seed, admitted(row, epoch=epoch, attempt=attempt), sample_index=i, turn=turn
        )
        for run_seed in (0, 1)
        for row in (0, 1)
        for epoch in (0, 1)
        for attempt in (0, 1)
        for i in (0, 1)
        for turn in (0, 1)
    }
    assert len(seeds) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_sampling_seed_is_the_same_on_every_machine_and_after_a_resume():
    assert sampling_seed(7, admitted(3), sample_index=2) == 2355612529637396985


def test_a_batch_that_is_not_full_ends_with_what_is_left_and_counts_what_is_there():
    batch = groups(num_groups=3)
    shards = shard(batch, [float(i) for i in range(6)], BatchShape(dp_size=2, mini_batch_size=4))
    assert [[len(m.samples) for m in rank] for rank in shards] == [[2, 1], [2, 1]]
    tokens = [t.num_response_tokens for g in batch for t in g.trajectories]
    for rank in shards:
        assert [m.global_num_tokens for m in rank] == [sum(tokens[:4]), sum(tokens[4:])]
        assert [m.global_num_sequences for m in rank] == [4, 2]
    assert len({s.trajectory_id for s in samples_of(shards)}) == 6


def test_what_is_left_has_to_divide_over_the_ranks():
    with pytest.raises(InvariantError, match="do not divide"):
        shard(groups(num_groups=3), [0.0] * 6, BatchShape(dp_size=4, mini_batch_size=4))
