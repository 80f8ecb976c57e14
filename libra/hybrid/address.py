"""Where a head listens, and what a member says about itself when it comes in."""

import socket
from typing import Annotated

import msgspec

from libra import clock
from libra.errors import PeerError
from libra.hybrid.channel import Channel
from libra.ids import ReplicaId
from libra.wire.hybrid import LaneAddress


class LaneHello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text of a HELLO frame."""

    replica_id: Annotated[ReplicaId, msgspec.Meta(max_length=64)]
    lane: int
    """The member's rank within its replica."""

    layout_hash: Annotated[str, msgspec.Meta(max_length=64)]
    """Of the parameters' names and shapes on this lane."""

    step: int
    """The next step that its weights are ready for."""

    digest: Annotated[int, msgspec.Meta(ge=0)]
    """Of these weights."""

    num_streams: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Connections that make the lane."""

    stream: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Which of them this is."""


def connected(address: LaneAddress, *, deadline: float) -> tuple[Channel, bool]:
    """Connect; also whether memory can be shared. Raises PeerError when nobody listens."""
    timeout_s = max(0.01, deadline - clock.monotonic())
    try:
        connection = _dialled(address, timeout_s)
    except OSError as error:
        raise PeerError(f"no lane at {address}: {error}") from error
    return Channel(connection), bool(address.unix)


def _dialled(address: LaneAddress, timeout_s: float) -> socket.socket:
    if not address.unix:
        return socket.create_connection((address.host, address.port), timeout=timeout_s)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect("\0" + address.unix)
    except OSError:
        connection.close()
        raise
    return connection
