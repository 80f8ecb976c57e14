"""Puts one rank's trainer together: a backend, and the learner that drives it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, assert_never

from libra.config.run import RunConfig
from libra.trainer.backend import TrainBackend
from libra.trainer.batch import Layout
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
