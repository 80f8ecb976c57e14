"""The head's side of one member: a thread that reads and one that sends.

Neither ever makes the rank's main thread wait: that one looks at what came, and gives up on its own
clock. A guest that breaks a rule is marked with a fault and its connection is closed.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Final

import msgspec
import numpy as np

from libra import clock
from libra.errors import PeerError
from libra.hybrid.address import LaneHello
from libra.hybrid.channel import Beat, Channel, SharedValues, bytes_of, no_beat
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
from libra.hybrid.room import touched
from libra.hybrid.streams import parts_of, side_by_side
from libra.hybrid.terms import Kept, LaneTerms, Position

_SAY_GOODBYE_S: Final = 0.2


class Arrived(msgspec.Struct, frozen=True):
    """What came on one stream of a contribution."""

    header: Header
    ballot: Ballot


class Guest:
    """`changed` guards all state here, and is told of every change."""

    def __init__(
        self,
        channels: tuple[Channel, ...],
        hello: LaneHello,
        terms: LaneTerms,
        changed: threading.Condition,
        kept: deque[Kept],
        *,
        shared: tuple[SharedValues, SharedValues] | None,
    ) -> None:
        """`channels` are its streams; `shared` is memory for both directions, on one node."""
        self.hello = hello
        self.fault = Fault.NONE
        self.reason = ""
        self.digest = hello.digest
        """Of the weights that it says it has."""

        self.applied: Position | None = None
        """What it stepped with last; None: its weights are those that it came with."""

        self.next_to_send = Position(hello.step)
        self.values: Floats = touched(terms.count)
        """Of the contribution that arrived, until `consume`."""

        self._parts = parts_of(terms.count, len(channels))
        self._arrived: dict[int, Arrived] = {}
        """By stream."""

        self._channels = channels
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
        reads = [(partial(self._read, stream), "lane-read") for stream in range(len(self._parts))]
        for work, name in (*reads, (self._send, "lane-send")):
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True).start()

    def ballot(self, wanted: Fence, digest: int) -> Ballot | None:
        """Judge the contribution for `wanted`; None while it has not come. With `changed` held.

        `digest` is that of the core's weights now.
        """
        if self.fault is not Fault.NONE:
            return Ballot(self.fault)
        if len(self._arrived) < len(self._parts):
            return None
        arrived = list(self._arrived.values())
        fences = [fence_fault(it.header.fence, wanted) for it in arrived]
        if any(fault is not Fault.NONE for fault in fences):
            return Ballot(Fault.FENCE)
        if self.digest != digest:
            return Ballot(Fault.DIGEST)
        # Of several faults the smallest is told; what is none counts as the largest.
        fault = min((it.ballot.fault for it in arrived), key=lambda it: it or inf)
        return Ballot(fault, sum(it.ballot.square_sum for it in arrived))

    @property
    def numbers(self) -> tuple[float, ...]:
        """Of the contribution that arrived. With `changed` held."""
        return self._arrived[0].header.numbers if 0 in self._arrived else ()

    def release(self) -> None:
        """What arrived is taken: its values may be overwritten. With `changed` held."""
        self._arrived.clear()
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
                self._channels[0].send(goodbye, deadline=clock.monotonic() + _SAY_GOODBYE_S)
            self._writing.release()
        self._hang_up()

    def _hang_up(self) -> None:
        for channel in self._channels:
            channel.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except PeerError as error:
            with self._changed:
                self.close(Fault.GONE, str(error))

    def _read(self, stream: int) -> None:
        channel, part = self._channels[stream], self._parts[stream]
        # What is said comes on the first stream, values on all.
        said = {FrameKind.APPLIED} if not stream else set[FrameKind]()
        limits = Limits(
            run_hash=self._terms.run_hash,
            count=part.stop - part.start,
            kinds=frozenset({FrameKind.GRADIENT, *said}),
            is_shared=self._incoming is not None,
        )
        timeout_s = self._terms.frame_timeout_s
        while True:
            data = channel.receive_frame(HEADER_BYTES, timeout_s=timeout_s)
            header = decode_header(data, limits)
            if header.kind is FrameKind.APPLIED:
                self._on_applied(header)
            else:
                self._on_gradient(stream, header)

    def _on_applied(self, header: Header) -> None:
        with self._changed:
            self.applied = Position(header.fence.step, header.fence.mini_batch)
            self.digest, self._is_read = header.checksum, True
            self._changed.notify_all()

    def _on_gradient(self, stream: int, header: Header) -> None:
        with self._changed:
            # The one before is still being added: the member waits, and its socket with it.
            self._changed.wait_for(lambda: stream not in self._arrived or not self.is_open)
        if not self.is_open:
            return
        values = self.values[self._parts[stream]]
        found = measured(values, arrive=self._arrival(self._channels[stream]))
        fault = value_fault(
            is_sum_right=found.checksum == header.checksum,
            square_sum=found.square_sum,
            numbers=header.numbers,
        )
        with self._changed:
            self._arrived[stream] = Arrived(header, Ballot(fault, found.square_sum))
            self._changed.notify_all()

    def _arrival(self, channel: Channel) -> Callable[[Floats], None]:
        """What fills the next block of a gradient that comes in."""
        if self._incoming is not None:
            # Copied: what the member does to its memory later must not matter.
            source = blocks(self._incoming)
            return lambda block: np.copyto(block, next(source))
        deadline = clock.monotonic() + self._terms.frame_timeout_s
        return lambda block: channel.receive_into(bytes_of(block), deadline=deadline)

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
        with self._changed:
            self.next_to_send = Position(entry.at.step, entry.at.mini_batch + 1)
        with self._writing:
            deadline = clock.monotonic() + self._terms.frame_timeout_s
            works = [
                partial(self._send_part, entry, stream, deadline)
                for stream in range(len(self._parts))
            ]
            side_by_side(works, beat=no_beat, give_up=self._hang_up)

    def _send_part(self, entry: Kept, stream: int, deadline: float, beat: Beat) -> None:
        values, channel = entry.values[self._parts[stream]], self._channels[stream]
        if self._outgoing is None:
            found, length = checksum(values), values.nbytes
        else:
            found, length = copied_checksum(values, self._outgoing), 0
        header = msgspec.structs.replace(
            self._header(FrameKind.REDUCED, length=length),
            fence=entry.fence,
            dtype=FrameDtype.FLOAT32,
            count=len(values),
            checksum=found,
            numbers=entry.numbers,
        )
        channel.send(encode_header(header), deadline=deadline, beat=beat)
        if length:
            channel.send(bytes_of(values), deadline=deadline, beat=beat)

    def _header(self, kind: FrameKind, *, length: int) -> Header:
        return Header(kind=kind, run_hash=self._terms.run_hash, length=length)
