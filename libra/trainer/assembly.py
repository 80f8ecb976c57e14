"""Puts one rank's trainer together: model, weights, optimizer, pipelines, learner."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from libra.config.run import RunConfig
from libra.trainer.architecture import Architecture, read_architecture
from libra.trainer.batch import Arrangement, Layout
from libra.trainer.capabilities import fallbacks, refuse_unsupported
from libra.trainer.hf_weights import hash_of_weights, load_hf_weights
from libra.trainer.model import build_model, seed_everything, with_gradients
from libra.trainer.optimizer import build_optimizer
from libra.trainer.pipeline import Pipeline
from libra.trainer.step import Learner, LearnerParts
from libra.trainer.world import World


class Trainer(NamedTuple):
    """Everything a rank holds between commands."""

    config: RunConfig
    world: World
    architecture: Architecture
    model: Any
    """With gradient buffers."""

    optimizer: Any
    policy: Pipeline
    arrangement: Arrangement
    learner: Learner
    reference_hash: str | None
    """Of the files that the KL reference was loaded from; None without a KL term."""

    @property
    def num_parameters(self) -> int:
        """On this rank."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def assemble(
    config: RunConfig,
    world: World,
    *,
    beat: Callable[[int, str], None],
    layout: Layout | None = None,
) -> Trainer:
    """Build the trainer of this rank with the weights of `model_path`.

    `beat(step, phase)` is called at every micro-batch and change of phase. `layout` overrides the
    choice of `arrange`. Raises ConfigError or DataError, on every rank alike, for what cannot be
    run.
    """
    model_path = Path(config.model.model_path)
    architecture = read_architecture(model_path)
    refuse_unsupported(config, architecture, world.sizes, is_cuda=world.device.type == "cuda")
    for notice in fallbacks(config, architecture):
        logging.getLogger(__name__).warning(notice)
    seed_everything(config.control.seed, 0)
    beat(0, "build")
    model = build_model(config, architecture, world)
    beat(0, "load")
    load_hf_weights(model, architecture, model_path, world)
    trained = with_gradients(model, config)
    optimizer = build_optimizer(trained, config)
    reference, reference_hash = None, None
    if config.algorithm.kl_coefficient:
        beat(0, "load reference")
        # Always the base model, never the weights a resumed run begins with.
        reference, reference_hash = _reference(config, architecture, world, model_path)
    policy = _pipeline(trained, config, architecture, world)
    arrangement = arrange(config, world, layout)
    learner = Learner(
        config,
        architecture,
        world,
        LearnerParts(
            model=trained,
            optimizer=optimizer,
            policy=policy,
            reference=reference,
            arrangement=arrangement,
        ),
        beat,
    )
    return Trainer(
        config=config,
        world=world,
        architecture=architecture,
        model=trained,
        optimizer=optimizer,
        policy=policy,
        arrangement=arrangement,
        learner=learner,
        reference_hash=reference_hash,
    )


def arrange(config: RunConfig, world: World, layout: Layout | None = None) -> Arrangement:
    """Choose how sequences are laid out on this rank.

    Packed where a kernel for it is there (CUDA, bfloat16) and where context parallelism needs it;
    else padded rows, which cost a CPU less than attention sequence by sequence.
    """
    has_kernel = world.device.type == "cuda" and config.training.train_dtype == "bfloat16"
    if layout is None:
        layout = "packed" if has_kernel or world.sizes.context > 1 else "padded"
    # Sequence parallelism cuts the columns evenly.
    is_cut = config.megatron.megatron_sequence_parallel
    return Arrangement(
        layout=layout,
        device=world.device,
        length_multiple=world.sizes.tensor if is_cut else 1,
        context_size=world.sizes.context,
        context_index=world.at.context,
        context_group=world.context_group,
    )


def _reference(
    config: RunConfig, architecture: Architecture, world: World, model_path: Path
) -> tuple[Pipeline, str]:
    model = build_model(config, architecture, world)
    load_hf_weights(model, architecture, model_path, world)
    model.requires_grad_(False)
    return _pipeline(model, config, architecture, world), hash_of_weights(model_path)


def _pipeline(model: Any, config: RunConfig, architecture: Architecture, world: World) -> Pipeline:
    rows = config.training.recompute_micro_batch_size
    return Pipeline(model, architecture, world, logit_rows=rows)
