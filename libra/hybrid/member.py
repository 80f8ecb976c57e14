"""A member's end of one lane. Every call is made from the rank's main thread."""

from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
from msgspec import structs

from libra import clock
from libra.errors import PeerError
from libra.hybrid import proof
from libra.hybrid.address import LaneHello, connected
from libra.hybrid.channel import Beat, Channel, SharedValues, bytes_of, no_beat
from libra.hybrid.checksum import Floats, checksum
from libra.hybrid.header import (
    HEADER_BYTES,
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
from libra.wire.hybrid import LaneAddress

_NUM_SEGMENTS: Final = 2


class Reduced(msgspec.Struct, frozen=True):
    """What the core made of one mini-batch."""

    fence: Fence
    numbers: tuple[float, ...]
    values: Floats
    """Valid until `applied` is called."""


class MemberLane:
    """Gradients out, reduced gradients in, one mini-batch after another."""

    def __init__(
        self,
        address: LaneAddress,
        *,
        key: bytes,
        run_hash: bytes,
        hello: LaneHello,
        count: int,
        timeout_s: float,
    ) -> None:
        """Connect and be let in. `count` values make a gradient on this lane.

        `hello` is what all streams say of the member; a lane on one node has one stream.
        Raises PeerError when nobody listens, the head cannot prove the key, or it refuses us.
        `timeout_s` is given to everything that needs no other work of the head.
        """
        self._run_hash, self._count, self._timeout_s = run_hash, count, timeout_s
        deadline = clock.monotonic() + timeout_s
        num = 1 if address.unix else hello.num_streams
        self._parts = parts_of(count, num)
        self._channels: list[Channel] = []
        try:
            for stream in range(num):
                channel, is_unix = connected(address, deadline=deadline)
                self._channels.append(channel)
                _prove(channel, key, deadline)
                self._say(channel, structs.replace(hello, num_streams=num, stream=stream), deadline)
            self._enter(deadline, is_shared=is_unix)
        except BaseException:
            self.close()
            raise

    def send_gradient(
        self, fence: Fence, numbers: tuple[float, ...], fill: Callable[[Floats], None]
    ) -> None:
        """Send what `fill` writes. The head must have taken the gradient before this one."""
        fill(self._outgoing)
        deadline = clock.monotonic() + self._timeout_s

        def send(stream: int, beat: Beat) -> None:
            values = self._outgoing[self._parts[stream]]
            header = Header(
                kind=FrameKind.GRADIENT,
                run_hash=self._run_hash,
                fence=fence,
                dtype=FrameDtype.FLOAT32,
                count=len(values),
                length=0 if self._is_shared else values.nbytes,
                checksum=checksum(values),
                numbers=numbers,
            )
            channel = self._channels[stream]
            channel.send(encode_header(header), deadline=deadline, beat=beat)
            if header.length:
                channel.send(bytes_of(values), deadline=deadline, beat=beat)

        self._on_all_streams(send, beat=no_beat)

    def receive_reduced(self, *, timeout_s: float, beat: Beat) -> Reduced:
        """The next mini-batch's reduced gradients. Raises PeerError when none come in time."""
        deadline = clock.monotonic() + timeout_s
        headers: dict[int, Header] = {}

        def receive(stream: int, beat: Beat) -> None:
            values = self._incoming[self._parts[stream]]
            header = headers[stream] = self._receive_header(stream, deadline, beat)
            if header.length:
                channel = self._channels[stream]
                channel.receive_into(bytes_of(values), deadline=deadline, beat=beat)
            if checksum(values) != header.checksum:
                raise PeerError("the core's reduced gradients were damaged on their way")

        self._on_all_streams(receive, beat=beat)
        said = {(header.fence, header.numbers) for header in headers.values()}
        if len(said) > 1:
            raise PeerError(f"parts of different reduced gradients came together: {said}")
        return Reduced(headers[0].fence, headers[0].numbers, self._incoming)

    def applied(self, fence: Fence, digest: int) -> None:
        """Say which weights a step with the reduced gradients of `fence` has made."""
        header = Header(
            kind=FrameKind.APPLIED, run_hash=self._run_hash, fence=fence, checksum=digest
        )
        self._channels[0].send(encode_header(header), deadline=clock.monotonic() + self._timeout_s)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def _on_all_streams(self, work: Callable[[int, Beat], None], *, beat: Beat) -> None:
        works = [partial(work, stream) for stream in range(len(self._channels))]
        side_by_side(works, beat=beat, give_up=self.close)

    def _say(self, channel: Channel, hello: LaneHello, deadline: float) -> None:
        text = msgspec.json.encode(hello)
        header = Header(
            kind=FrameKind.HELLO,
            run_hash=self._run_hash,
            count=self._count,
            length=len(text),
            checksum=hello.digest,
        )
        channel.send(encode_header(header) + text, deadline=deadline)

    def _enter(self, deadline: float, *, is_shared: bool) -> None:
        limits = Limits(
            run_hash=self._run_hash,
            count=self._count,
            kinds=frozenset({FrameKind.WELCOME, FrameKind.REFUSED}),
            is_shared=is_shared,
        )
        channel, self._is_shared = self._channels[0], is_shared
        data = channel.receive_with(HEADER_BYTES, _NUM_SEGMENTS, deadline=deadline)
        self._refuse_refusal(decode_header(data, limits), deadline)
        if is_shared:
            out, back = _segments(channel.take_descriptors(), self._count)
        else:
            out, back = touched(self._count), touched(self._count)
        self._outgoing, self._incoming = out, back
        # What is said goes on the first stream, values on all.
        kinds = [frozenset({FrameKind.REDUCED}) for _ in self._parts]
        kinds[0] |= {FrameKind.REFUSED}
        self._limits = [
            structs.replace(limits, kinds=kinds[stream], count=part.stop - part.start)
            for stream, part in enumerate(self._parts)
        ]

    def _receive_header(self, stream: int, deadline: float, beat: Beat) -> Header:
        channel = self._channels[stream]
        data = channel.receive(HEADER_BYTES, deadline=deadline, beat=beat)
        header = decode_header(data, self._limits[stream])
        self._refuse_refusal(header, deadline)
        return header

    def _refuse_refusal(self, header: Header, deadline: float) -> None:
        if header.kind is FrameKind.REFUSED:
            reason = self._channels[0].receive(header.length, deadline=deadline)
            raise PeerError(f"the core lets us go: {reason.decode(errors='replace')}")


def _prove(channel: Channel, key: bytes, deadline: float) -> None:
    head_nonce = channel.receive(proof.NONCE_BYTES, deadline=deadline)
    nonces = {"head_nonce": head_nonce, "member_nonce": proof.new_nonce()}
    shown = proof.proof(key, "member", **nonces)
    channel.send(nonces["member_nonce"] + shown, deadline=deadline)
    answer = channel.receive(proof.PROOF_BYTES, deadline=deadline)
    proof.check_proof(answer, key, "head", **nonces)


def _segments(descriptors: list[int], count: int) -> tuple[Floats, Floats]:
    if len(descriptors) != _NUM_SEGMENTS:
        raise PeerError(f"{len(descriptors)} descriptors came with the welcome, not two")
    shared = [SharedValues(descriptor, count) for descriptor in descriptors]
    for one in shared:
        one.close_descriptor()
    return shared[0].values, shared[1].values
