"""The head's side of one member: a thread that reads and one that sends.

Neither ever makes the rank's main thread wait: that one looks at what came, and gives up on its own
clock. A guest that breaks a rule is marked with a fault and its connection is closed.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec
import numpy as np

from libra import clock
from libra.errors import PeerError
from libra.hybrid.address import LaneHello
from libra.hybrid.channel import Channel, SharedValues, bytes_of
from libra.hybrid.checksum import Floats, blocks, checksum, copied_checksum, measured
from libra.hybrid.fault import Ballot, Fault, fence_fault, value_fault
from libra.hybrid.header import (
    HEADER_BYTES,
    MAX_TEXT_BYTES,
    Fence,
    FrameDtype,
    FrameKind,
    Header,
    Limits,
    decode_header,
    encode_header,
)
from libra.hybrid.terms import Kept, LaneTerms, Position

_SAY_GOODBYE_S: Final = 0.2


class Arrived(msgspec.Struct, frozen=True):
    header: Header
    ballot: Ballot


class Guest:
    """`changed` guards all state here, and is told of every change."""

    def __init__(
        self,
        channel: Channel,
        hello: LaneHello,
        terms: LaneTerms,
        changed: threading.Condition,
        kept: deque[Kept],
        *,
        shared: tuple[SharedValues, SharedValues] | None,
    ) -> None:
        """`shared` is memory for what comes and what goes, on one node."""
        self.hello = hello
        self.fault = Fault.NONE
        self.reason = ""
        self.digest = hello.digest
        """Of the weights that it says it has."""

        self.applied: Position | None = None
        """What it stepped with last; None: its weights are those that it came with."""

        self.next_to_send = Position(hello.step)
        self.values: Floats = np.empty(terms.count, np.float32)
        """Of the contribution that arrived, until `consume`."""

        self._arrived: Arrived | None = None
        self._channel = channel
        self._terms = terms
        self._changed = changed
        self._kept = kept
        self._incoming = shared[0].values if shared else None
        self._outgoing = shared[1].values if shared else None
        self._writing = threading.Lock()
        self._is_read = True
        """Whether the member has stepped with all that was sent."""

    @property
    def is_open(self) -> bool:
        return self.fault is Fault.NONE

    def start(self) -> None:
        for work, name in ((self._read, "lane-read"), (self._send, "lane-send")):
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True).start()

    def ballot(self, wanted: Fence, digest: int) -> Ballot | None:
        """Judge the contribution for `wanted`; None while it has not come. With `changed` held.

        `digest` is that of the core's weights now.
        """
        if self.fault is not Fault.NONE:
            return Ballot(self.fault)
        if self._arrived is None:
            return None
        if (fault := fence_fault(self._arrived.header.fence, wanted)) is not Fault.NONE:
            return Ballot(fault)
        if self.digest != digest:
            return Ballot(Fault.DIGEST)
        return self._arrived.ballot

    @property
    def numbers(self) -> tuple[float, ...]:
        """Of the contribution that arrived. With `changed` held."""
        return () if self._arrived is None else self._arrived.header.numbers

    def release(self) -> None:
        """What arrived is taken: its values may be overwritten. With `changed` held."""
        self._arrived = None
        self._changed.notify_all()

    def close(self, fault: Fault, reason: str) -> None:
        """With `changed` held. Later reasons change nothing."""
        if self.fault is not Fault.NONE:
            return
        self.fault, self.reason = fault, reason
        self._changed.notify_all()
        threading.Thread(target=self._leave, args=(reason,), daemon=True).start()

    def _leave(self, reason: str) -> None:
        text = reason.encode()[:MAX_TEXT_BYTES]
        goodbye = encode_header(self._header(FrameKind.REFUSED, length=len(text))) + text
        # Without it when a frame is on its way that is not read: the end of the connection says it.
        if self._writing.acquire(timeout=_SAY_GOODBYE_S):
            with suppress(PeerError):
                self._channel.send(goodbye, deadline=clock.monotonic() + _SAY_GOODBYE_S)
            self._writing.release()
        self._channel.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except PeerError as error:
            with self._changed:
                self.close(Fault.GONE, str(error))

    def _read(self) -> None:
        limits = Limits(
            run_hash=self._terms.run_hash,
            count=self._terms.count,
            kinds=frozenset({FrameKind.GRADIENT, FrameKind.APPLIED}),
            is_shared=self._incoming is not None,
        )
        timeout_s = self._terms.frame_timeout_s
        while True:
            data = self._channel.receive_frame(HEADER_BYTES, timeout_s=timeout_s)
            header = decode_header(data, limits)
            if header.kind is FrameKind.APPLIED:
                self._on_applied(header)
            else:
                self._on_gradient(header)

    def _on_applied(self, header: Header) -> None:
        with self._changed:
            self.applied = Position(header.fence.step, header.fence.mini_batch)
            self.digest, self._is_read = header.checksum, True
            self._changed.notify_all()

    def _on_gradient(self, header: Header) -> None:
        with self._changed:
            # The one before is still being added: the member waits, and its socket with it.
            self._changed.wait_for(lambda: self._arrived is None or not self.is_open)
        if not self.is_open:
            return
        found = measured(self.values, arrive=self._arrival())
        fault = value_fault(
            is_sum_right=found.checksum == header.checksum,
            square_sum=found.square_sum,
            numbers=header.numbers,
        )
        with self._changed:
            self._arrived = Arrived(header, Ballot(fault, found.square_sum))
            self._changed.notify_all()

    def _arrival(self) -> Callable[[Floats], None]:
        """What fills the next block of a gradient that comes in."""
        if self._incoming is not None:
            # Copied: what the member does to its memory later must not matter.
            source = blocks(self._incoming)
            return lambda block: np.copyto(block, next(source))
        deadline = clock.monotonic() + self._terms.frame_timeout_s
        return lambda block: self._channel.receive_into(bytes_of(block), deadline=deadline)

    def _send(self) -> None:
        while (entry := self._next_entry()) is not None:
            try:
                self._send_entry(entry)
            finally:
                with self._changed:
                    entry.num_users -= 1
                    self._changed.notify_all()

    def _next_entry(self) -> Kept | None:
        with self._changed:
            self._changed.wait_for(lambda: not self.is_open or self._due() is not None)
            if not self.is_open or (entry := self._due()) is None:
                return None
            entry.num_users += 1
            self._is_read = False
            return entry

    def _due(self) -> Kept | None:
        """The first entry that the guest has not had, once it is done with the one before."""
        if not self._is_read:
            return None
        return next((entry for entry in self._kept if entry.at >= self.next_to_send), None)

    def _send_entry(self, entry: Kept) -> None:
        if self._outgoing is None:
            found, length = checksum(entry.values), entry.values.nbytes
        else:
            found, length = copied_checksum(entry.values, self._outgoing), 0
        header = msgspec.structs.replace(
            self._header(FrameKind.REDUCED, length=length),
            fence=entry.fence,
            dtype=FrameDtype.FLOAT32,
            count=self._terms.count,
            checksum=found,
            numbers=entry.numbers,
        )
        with self._changed:
            self.next_to_send = Position(entry.at.step, entry.at.mini_batch + 1)
        deadline = clock.monotonic() + self._terms.frame_timeout_s
        with self._writing:
            self._channel.send(encode_header(header), deadline=deadline)
            if length:
                self._channel.send(bytes_of(entry.values), deadline=deadline)

    def _header(self, kind: FrameKind, *, length: int) -> Header:
        return Header(kind=kind, run_hash=self._terms.run_hash, length=length)
