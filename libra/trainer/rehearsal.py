"""Steps from which nothing is learned, for a rank that others will wait for at its first."""

from collections.abc import Iterator

import numpy as np

from libra.config.run import RunConfig
from libra.ids import TrajectoryId
from libra.wire.rank import MiniBatch, Sample, TrainStep

LENGTHS = (48, 32)
"""In tokens. Two, since kernels are compiled for one size first and for any size at the next."""

ROWS = 2


def rehearsals(config: RunConfig) -> Iterator[TrainStep]:
    """Commands of one data-parallel rank whose trajectories have no advantage.

    Where a batch has several mini-batches there are two, so that old logprobs are computed too.
    """
    training = config.training
    has_several = 0 < training.mini_batch_size < training.batch_size
    for length in LENGTHS:
        length = min(length, config.rollout.max_model_len)  # noqa: PLW2901
        mini_batch = MiniBatch(
            samples=(_sample(length),) * ROWS,
            global_num_tokens=ROWS * (length - 1),
            global_num_sequences=ROWS,
        )
        yield TrainStep(step=1, mini_batches=(mini_batch,) * (2 if has_several else 1))


def _sample(length: int) -> Sample:
    return Sample(
        trajectory_id=TrajectoryId("rehearsal"),
        token_ids=np.zeros(length, "<i4").tobytes(),
        loss_mask=bytes([0] + [1] * (length - 1)),
        rollout_logprobs=np.zeros(length, "<f4").tobytes(),
        advantage=0.0,
    )
