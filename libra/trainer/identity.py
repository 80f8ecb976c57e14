"""Who a rank is: from its environment, its layout and its process. Imports nothing heavy."""

import os
from pathlib import Path
from typing import Final

import msgspec

from libra.ids import RunId
from libra.trainer.layout import Coordinates, ParallelSizes
from libra.wire.rank import Hello

LOOPBACK: Final = "127.0.0.1"


class RankIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this rank is, from its environment and the layout."""

    run_id: RunId
    attempt: int
    sizes: ParallelSizes
    at: Coordinates
    gang: str
    """The child of the supervisor that it belongs to."""

    writer: str = ""
    """Names this attempt among all that the run has ever had."""

    host: str = LOOPBACK
    """Where servers reach rank 0, which sends them weights."""


def hello(identity: RankIdentity, *, world_size: int) -> Hello:
    """The first frame; the process's start time proves later that a pid is still this process."""
    stat = Path("/proc/self/stat").read_text(encoding="ascii")
    # Field 2 is the command in brackets and may hold spaces; field 22 is counted after it.
    start_ticks = int(stat.rpartition(")")[2].split()[19])
    at = identity.at
    return Hello(
        run_id=identity.run_id,
        attempt=identity.attempt,
        rank=at.rank,
        world_size=world_size,
        local_rank=at.local_rank,
        dp_rank=at.data,
        tp_rank=at.tensor,
        pp_rank=at.pipeline,
        cp_rank=at.context,
        ep_rank=at.expert,
        pid=os.getpid(),
        start_ticks=start_ticks,
        gang=identity.gang,
    )
