"""What a rank refuses to train on, by name of the trajectory."""

import numpy as np
import pytest

from libra.errors import DataError
from libra.ids import TrajectoryId
from libra.trainer.batch import decode_mini_batch
from libra.wire.rank import MiniBatch, Sample

pytestmark = pytest.mark.system


def decoded(*, token_ids=(5, 6, 7), loss_mask=(0, 1, 1), logprobs=(0.0, -1.0, -2.0)):
    sample = Sample(
        trajectory_id=TrajectoryId("row-3/e0/a0/s1"),
        token_ids=np.array(token_ids, "<i4").tobytes(),
        loss_mask=np.array(loss_mask, np.uint8).tobytes(),
        rollout_logprobs=np.array(logprobs, "<f4").tobytes(),
        advantage=1.0,
    )
    mini_batch = MiniBatch(samples=(sample,), global_num_tokens=2, global_num_sequences=1)
    return decode_mini_batch(mini_batch, aggregation="token-mean", horizon_tokens=8, vocab_size=10)


def test_positions_logprobs_and_weight_are_those_of_the_sampled_tokens():
    (sample,) = decoded()
    assert sample.sampled.tolist() == [1, 2]
    assert sample.rollout_logprobs.tolist() == [-1.0, -2.0]
    assert sample.weight == 0.5


def test_a_logprob_under_the_mask_is_not_looked_at():
    (sample,) = decoded(logprobs=(float("nan"), -1.0, -2.0))
    assert sample.rollout_logprobs.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loss_mask": (0, 1)}, "3 tokens, 2 mask entries and 3 logprobs"),
        ({"logprobs": (0.0,)}, "3 tokens, 3 mask entries and 1 logprobs"),
        ({"token_ids": (), "loss_mask": (), "logprobs": ()}, "must be one number above 0"),
        ({"token_ids": (5, 6, 10)}, "a token id outside the vocabulary of 10"),
        ({"token_ids": (-1, 6, 7)}, "a token id outside the vocabulary of 10"),
        ({"loss_mask": (1, 1, 1)}, "its first token is marked as sampled"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(change, reason):
    with pytest.raises(DataError, match=r"trajectory row-3/e0/a0/s1: ") as raised:
        decoded(**change)
    assert reason in str(raised.value)
