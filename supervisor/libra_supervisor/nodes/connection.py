"""What a link needs of the network: whole binary messages, in order, until the end."""

from typing import Protocol

import msgspec

from libra.errors import PeerError
from libra.wire.node import Envelope, HelloReply


class Connection(Protocol):
    """One connection. A message may be lost at its end, never in the middle."""

    async def send(self, message: bytes) -> None:
        """Raises PeerError when the other side is gone."""

    async def receive(self) -> bytes | None:
        """The next message; None at the end. Raises PeerError for what is no binary message."""


async def received_envelope(connection: Connection) -> Envelope | None:
    """The next message of an open session; None at the connection's end. Raises PeerError."""
    message = await connection.receive()
    if message is None:
        return None
    try:
        return msgspec.msgpack.decode(message, type=Envelope)
    except msgspec.MsgspecError as error:
        raise PeerError(f"the other node sent something that is no message: {error}") from error


async def received_reply(connection: Connection) -> HelloReply:
    """The answer to a Hello. Raises PeerError when there is none."""
    message = await connection.receive()
    if message is None:
        raise PeerError("the leader closed the connection before it answered")
    try:
        return msgspec.msgpack.decode(message, type=HelloReply)
    except msgspec.MsgspecError as error:
        raise PeerError(f"whoever answers there is no leader: {error}") from error
