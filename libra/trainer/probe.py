"""A fixed prompt whose logprobs tell whether an engine has the weights that the trainer has."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from libra.config.run import RunConfig
from libra.errors import DataError, InvariantError
from libra.trainer.assembly import Trainer
from libra.trainer.batch import SampleArrays, micro_batches
from libra.trainer.head import Sampling
from libra.trainer.world import sum_over_world
from libra.weights.judge import judge_acks
from libra.wire.rank import AcksJudged, JudgeAcks

PROBE_NAME = "probe.json"
TOLERANCE_FLOAT32 = 1e-3
TOLERANCE_BFLOAT16 = 3e-2


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Stored beside the weights, so that a restarted gang can still judge them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Entry i: logprob of token i+1 given tokens 0..i, at temperature 1 and without top-p."""


def probe_logprobs(trainer: Trainer, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Logprobs of all but the first token under the current weights; every rank takes part."""
    if len(token_ids) < 2:  # noqa: PLR2004 - nothing is predicted by one token
        return ()
    vocab_size = trainer.backend.vocab_size
    if not all(0 <= token < vocab_size for token in token_ids):
        raise DataError(f"the probe has a token outside the vocabulary of {vocab_size}")
    num_scored = len(token_ids) - 1
    sample = SampleArrays(
        token_ids=np.array(token_ids, np.int32),
        sampled=np.arange(1, len(token_ids)),
        # Under context parallelism a rank scores some of them; this says which.
        rollout_logprobs=np.arange(num_scored, dtype=np.float32),
        advantage=0.0,
        weight=0.0,
    )
    batches = micro_batches([sample], rows=1, arrangement=trainer.backend.arrangement)
    scores = trainer.backend.logprobs(
        batches, sampling=Sampling(), beat=lambda: trainer.learner.beat("probe")
    )
    # Every replica computes the same; one speaks.
    own = torch.zeros(num_scored, device=trainer.world.device)
    if trainer.world.has_results and trainer.world.at.data == 0:
        own[batches[0].rollout_logprobs.long()] = scores[0]
    return tuple(sum_over_world(trainer.world, own.tolist()))


def stored_probe(directory: Path) -> Probe:
    """Read what an export has left with its weights. Raises DataError."""
    path = directory / PROBE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Probe)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{path}: cannot judge an engine by these weights: {error}") from error


def judge(
    command: JudgeAcks, probe: Probe, config: RunConfig, *, checksum: str | None = None
) -> AcksJudged:
    """Judge an ACK batch against the request and what was computed when its weights were given out.

    `checksum` is of a transfer.
    """
    if probe.token_ids != command.request.probe_token_ids:
        raise InvariantError("the reload request probes with other tokens than the trainer did")
    return judge_acks(
        command.request,
        command.acks,
        trainer_probe_logprobs=probe.logprobs,
        probe_tolerance=probe_tolerance(config),
        checksum=checksum,
    )


def probe_tolerance(config: RunConfig) -> float:
    """Largest difference between two right computations, by the coarser of the two dtypes."""
    engine = config.rollout.rollout_dtype
    is_exact = config.training.train_dtype == "float32" and engine in {"auto", "float32"}
    return TOLERANCE_FLOAT32 if is_exact else TOLERANCE_BFLOAT16
