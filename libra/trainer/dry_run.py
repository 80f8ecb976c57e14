"""One complete recompute pass over the largest batch that can come, before training."""

import numpy as np

from libra.trainer.assembly import Trainer
from libra.trainer.batch import SampleArrays, micro_batches
from libra.trainer.head import Sampling
from libra.trainer.memory import is_out_of_memory, rise_of
from libra.wire.rank import RecomputeProbed


def probe_recompute(trainer: Trainer) -> RecomputeProbed:
    """Score `recompute_micro_batch_size` rows of `max_model_len` tokens and say what it took.

    Every rank takes part. Running out of memory is an answer, not an error: the supervisor plans
    anew. The ranks beside one that ran out may wait for it in a collective until they are ended.
    """
    config, rank = trainer.config, trainer.world.at.rank
    length, rows = config.rollout.max_model_len, config.training.recompute_micro_batch_size
    longest = SampleArrays(
        token_ids=np.zeros(length, np.int32),
        sampled=np.arange(1, length),
        rollout_logprobs=np.zeros(length - 1, np.float32),
        advantage=0.0,
        weight=0.0,
    )
    sampling = Sampling(config.rollout.temperature, config.rollout.top_p)

    def score() -> None:
        batches = micro_batches(
            [longest] * rows, rows=rows, arrangement=trainer.backend.arrangement
        )
        trainer.backend.logprobs(
            batches, sampling=sampling, beat=lambda: trainer.learner.beat("dry run")
        )

    try:
        before, peak = rise_of(score, trainer.world.device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        said = (
            f"recompute_logprobs does not fit: {rows} rows (recompute_micro_batch_size) of "
            f"{length} tokens (max_model_len) over {trainer.backend.vocab_size} words: {error}"
        )
        return RecomputeProbed(rank=rank, before_bytes=0, peak_bytes=0, error=said)
    return RecomputeProbed(rank=rank, before_bytes=before, peak_bytes=peak, error="")
