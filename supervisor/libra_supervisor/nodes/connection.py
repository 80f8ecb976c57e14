"""What a link needs of the network: whole binary messages, in order, until the end."""

from typing import Protocol

from libra.errors import PeerError
from libra.wire.decoding import decoded
from libra.wire.node import MAX_HELLO_BYTES, Envelope, Hello, HelloReply


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
        return decoded(message, Envelope)
    except PeerError as error:
        raise PeerError(f"the other node sent something that is no message: {error}") from error


async def received_hello(connection: Connection) -> Hello:
    """The first message of a connection. Raises PeerError when there is none."""
    message = await connection.receive()
    if message is None:
        raise PeerError("it was closed before its Hello")
    if len(message) > MAX_HELLO_BYTES:
        raise PeerError(f"its first message of {len(message)} bytes is too long for a Hello")
    try:
        return decoded(message, Hello)
    except PeerError as error:
        raise PeerError(f"its first message is no Hello: {error}") from error


async def received_reply(connection: Connection) -> HelloReply:
    """The answer to a Hello. Raises PeerError when there is none."""
    message = await connection.receive()
    if message is None:
        raise PeerError("the leader closed the connection before it answered")
    try:
        reply: HelloReply = decoded(message, HelloReply)
    except PeerError as error:
        raise PeerError(f"whoever answers there is no leader: {error}") from error
    return reply
