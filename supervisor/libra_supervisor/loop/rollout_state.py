"""What a checkpoint keeps of the rollout side, and its bytes. Pure."""

import msgspec

from libra.rollouts.buffer import BufferState


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of the rollout side."""

    buffer: BufferState
    cursor: bytes


def encoded(state: RolloutState) -> bytes:
    """Encode for a checkpoint; a second for thousands of long trajectories, so not on the loop."""
    return msgspec.msgpack.encode(state)
