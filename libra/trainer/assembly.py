"""Puts one rank's trainer together: a backend, and the learner that drives it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, assert_never

import numpy as np
import torch

from libra.config.run import RunConfig
from libra.errors import SiteError
from libra.trainer.backend import TrainBackend
from libra.trainer.batch import Layout, SampleArrays, micro_batches
from libra.trainer.head import Sampling
from libra.trainer.step import Learner
from libra.trainer.world import World


class Trainer(NamedTuple):
    """Everything a rank holds between commands."""

    config: RunConfig
    world: World
    backend: TrainBackend
    learner: Learner


def assemble(
    config: RunConfig,
    world: World,
    *,
    beat: Callable[[int, str], None],
    layout: Layout | None = None,
) -> Trainer:
    """Build the trainer of this rank with the weights of `model_path`.

    `beat(step, phase)` is called at every micro-batch and change of phase. `layout` overrides the
    backend's choice. Raises ConfigError or DataError, on every rank alike, for what cannot be run.
    """
    backend = _backend(config, world, partial(beat, 0), layout)
    if config.global_resource_planner.memory_budget_dry_run_enabled:
        beat(0, "dry run")
        dry_run(config, backend)
    learner = Learner(config, world, backend, beat)
    return Trainer(config=config, world=world, backend=backend, learner=learner)


def _backend(
    config: RunConfig, world: World, beat: Callable[[str], None], layout: Layout | None
) -> TrainBackend:
    # Imported here: neither backend needs the other's packages.
    match config.training.train_backend:
        case "megatron_core":
            from libra.trainer.megatron_backend import MegatronBackend  # noqa: PLC0415

            return MegatronBackend(config, world, beat=beat, layout=layout)
        case "fsdp":
            from libra.trainer.fsdp.backend import FsdpBackend  # noqa: PLC0415

            return FsdpBackend(config, world, beat=beat)
        case _:
            assert_never(config.training.train_backend)


def dry_run(config: RunConfig, backend: TrainBackend) -> None:
    """Score the largest temporary batch of `recompute_logprobs` once.

    Raises SiteError when the device's memory does not hold it: better now than at the first long
    answer.
    """
    length = config.rollout.max_model_len
    rows = config.training.recompute_micro_batch_size
    longest = SampleArrays(
        token_ids=np.zeros(length, np.int32),
        sampled=np.arange(1, length),
        rollout_logprobs=np.zeros(length - 1, np.float32),
        advantage=0.0,
        weight=0.0,
    )
    batches = micro_batches([longest] * rows, rows=rows, arrangement=backend.arrangement)
    sampling = Sampling(config.rollout.temperature, config.rollout.top_p)
    try:
        backend.logprobs(batches, sampling=sampling, beat=lambda: None)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise SiteError(
            f"recompute_logprobs does not fit: {rows} rows (recompute_micro_batch_size) of "
            f"{length} tokens (max_model_len) over {backend.vocab_size} words: {error}"
        ) from error
