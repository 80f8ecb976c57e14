"""One side of a session: numbers, acknowledgements, and what has to be sent once more. Pure.

A session outlives its connections. Each side numbers its messages from 1 and keeps them until the
other has acknowledged them; after a reconnect both say what they have received, and the rest is
sent again. So nothing is lost and nothing done twice while the session lives. What is kept is
bounded: a side that is not acknowledged for too long ends the session instead of its memory.
"""

from collections import deque
from typing import Final

import msgspec

from libra.errors import OverloadedError, PeerError
from libra.wire.node import MAX_ENVELOPE_BYTES, Envelope

_OVERHEAD_BYTES: Final = 64
"""Of an envelope around its body; keeps empty bodies from being free."""


class KeepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one side keeps until it is acknowledged."""

    num_messages: int = 65_536
    num_bytes: int = 256 << 20


class Session:
    """The numbers of one side."""

    def __init__(self, limits: KeepLimits) -> None:
        self._limits = limits
        self._kept: deque[Envelope] = deque()
        self._num_bytes = 0
        self._sent = 0
        self._received = 0

    @property
    def received(self) -> int:
        """The newest message that has come in; every one before it has too."""
        return self._received

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def kept_bytes(self) -> int:
        """Sent and not acknowledged."""
        return self._num_bytes

    def put(self, body: bytes, *, beat: int) -> Envelope:
        """Number one message. Raises OverloadedError when no more can be kept."""
        if len(body) + _OVERHEAD_BYTES > MAX_ENVELOPE_BYTES:
            raise OverloadedError(f"a message of {len(body)} bytes is longer than the link takes")
        size = len(body) + _OVERHEAD_BYTES
        is_full = len(self._kept) >= self._limits.num_messages
        if is_full or self._num_bytes + size > self._limits.num_bytes:
            raise OverloadedError(
                f"{len(self._kept)} messages ({self._num_bytes} bytes) wait for the other node"
            )
        self._sent += 1
        envelope = Envelope(self._received, beat, self._sent, body)
        self._kept.append(envelope)
        self._num_bytes += size
        return envelope

    def bare(self, *, beat: int) -> Envelope:
        """A sign of life that carries an acknowledgement."""
        return Envelope(self._received, beat)

    def on_ack(self, number: int) -> None:
        """Forget what the other side has. Raises PeerError for a number that was never sent."""
        if number > self._sent:
            raise PeerError(f"message {number} is acknowledged, {self._sent} were sent")
        while self._kept and self._kept[0].number <= number:
            self._num_bytes -= len(self._kept.popleft().body) + _OVERHEAD_BYTES

    def on_number(self, number: int) -> bool:
        """Whether a message is new; one that was sent again is not. Raises PeerError for a gap."""
        if number <= self._received:
            return False
        if number != self._received + 1:
            raise PeerError(f"message {number} came after {self._received}")
        self._received = number
        return True

    def resume(self, received: int, *, beat: int) -> tuple[Envelope, ...]:
        """What the other side, which has `received`, has to be sent again.

        Raises PeerError when it claims what was never sent, or misses what was acknowledged.
        """
        oldest = self._kept[0].number if self._kept else self._sent + 1
        if received < oldest - 1:
            raise PeerError(f"messages {received + 1} to {oldest - 1} are not kept any more")
        self.on_ack(received)
        return self.unacknowledged(beat=beat)

    def unacknowledged(self, *, beat: int) -> tuple[Envelope, ...]:
        """What a connection that begins at this moment has to carry first."""
        return tuple(
            Envelope(self._received, beat, envelope.number, envelope.body)
            for envelope in self._kept
        )
