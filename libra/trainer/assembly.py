"""Puts one rank's trainer together: a backend, and the learner that drives it."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, assert_never

from libra.config.run import RunConfig
from libra.errors import ConfigError
from libra.trainer.backend import TrainBackend
from libra.trainer.batch import Layout
from libra.trainer.step import Learner
from libra.trainer.world import World

if TYPE_CHECKING:
    from libra.trainer.hybrid_backend import HybridBackend


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
    is_replica: bool = False,
) -> Trainer:
    """Build the trainer of this rank with the weights of `model_path`.

    `beat(step, phase)` is called at every micro-batch and change of phase. `layout` overrides the
    backend's choice. `is_replica`: its steps will be those of a core. Raises ConfigError or
    DataError, on every rank alike, for what cannot be run.
    """
    # Imported here: neither backend needs the other's packages.
    match config.training.train_backend:
        case "megatron_core":
            from libra.trainer.megatron_backend import MegatronBackend  # noqa: PLC0415

            megatron = MegatronBackend(config, world, beat=partial(beat, 0), layout=layout)
            learner = _megatron_learner(config, world, megatron, beat, is_replica=is_replica)
            return Trainer(config=config, world=world, backend=megatron, learner=learner)
        case "fsdp":
            from libra.trainer.fsdp.backend import FsdpBackend  # noqa: PLC0415

            if is_replica:
                raise ConfigError("hybrid replicas need train_backend megatron_core")
            fsdp = FsdpBackend(config, world, beat=partial(beat, 0))
            learner = Learner(config, world, fsdp, beat)
            return Trainer(config=config, world=world, backend=fsdp, learner=learner)
        case _:
            assert_never(config.training.train_backend)


def _megatron_learner(
    config: RunConfig,
    world: World,
    backend: "HybridBackend",
    beat: Callable[[int, str], None],
    *,
    is_replica: bool,
) -> Learner:
    from libra.trainer.hybrid_core import CoreExchange  # noqa: PLC0415
    from libra.trainer.hybrid_member import MemberLearner  # noqa: PLC0415

    if is_replica:
        return MemberLearner(config, world, backend, beat)
    learner = Learner(config, world, backend, beat)
    waiting = partial(learner.beat, "wait for hybrids")
    learner.exchange = CoreExchange(config, world, backend, waiting)
    return learner
