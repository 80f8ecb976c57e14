"""What the parts of a head have in common: positions, terms, and what is kept."""

import msgspec

from libra.hybrid.checksum import Floats
from libra.hybrid.header import Fence


class Position(msgspec.Struct, frozen=True, order=True):
    """A mini-batch of the run."""

    step: int
    mini_batch: int = 0


class Kept(msgspec.Struct, eq=False):
    """Reduced gradients of one mini-batch, for guests that have not stepped with them yet."""

    fence: Fence
    numbers: tuple[float, ...]
    values: Floats
    num_users: int = 0
    """Senders that are reading the values."""

    @property
    def at(self) -> Position:
        return Position(self.fence.step, self.fence.mini_batch)


class LaneTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What every guest of one head has in common."""

    run_hash: bytes
    count: int
    frame_timeout_s: float
    """For what a member has begun to send, and for a frame on its way to one."""
