"""A rank that is started before its device is free: it imports, and waits."""

import importlib
from typing import Final

from libra.config.run import RunConfig
from libra.errors import InvariantError
from libra.trainer.link import Link
from libra.wire.rank import RankWarm, Shutdown, TakeDevice

MODULES: Final = {
    "megatron_core": (
        "libra.trainer.megatron_backend",
        "libra.trainer.hybrid_core",
        "libra.trainer.hybrid_member",
    ),
    "fsdp": ("libra.trainer.fsdp.backend",),
}
"""By backend: what assembling a trainer imports, with all that is behind it."""


def until_device(config: RunConfig, link: Link, *, rank: int) -> bool:
    """Import what the trainer needs, say so, and wait. False: it is to leave instead."""
    for name in MODULES[config.training.train_backend]:
        importlib.import_module(name)
    link.send(RankWarm(rank))
    match link.receive():
        case TakeDevice():
            return True
        case Shutdown():
            return False
        case command:
            raise InvariantError(f"a rank without its device was told {command}")
