"""A member's end of one lane. Every call is made from the rank's main thread."""

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from libra import clock
from libra.errors import PeerError
from libra.hybrid import proof
from libra.hybrid.address import LaneHello, connected
from libra.hybrid.channel import Beat, SharedValues, bytes_of
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

        Raises PeerError when nobody listens, the head cannot prove the key, or it refuses us.
        `timeout_s` is given to everything that needs no other work of the head.
        """
        self._run_hash, self._count, self._timeout_s = run_hash, count, timeout_s
        deadline = clock.monotonic() + timeout_s
        self._channel, is_unix = connected(address, deadline=deadline)
        try:
            self._prove(key, deadline)
            self._enter(hello, deadline, is_shared=is_unix)
        except BaseException:
            self._channel.close()
            raise

    def send_gradient(
        self, fence: Fence, numbers: tuple[float, ...], fill: Callable[[Floats], None]
    ) -> None:
        """Send what `fill` writes. The head must have taken the gradient before this one."""
        fill(self._outgoing)
        header = Header(
            kind=FrameKind.GRADIENT,
            run_hash=self._run_hash,
            fence=fence,
            dtype=FrameDtype.FLOAT32,
            count=self._count,
            length=0 if self._limits.is_shared else self._outgoing.nbytes,
            checksum=checksum(self._outgoing),
            numbers=numbers,
        )
        deadline = clock.monotonic() + self._timeout_s
        self._channel.send(encode_header(header), deadline=deadline)
        if header.length:
            self._channel.send(bytes_of(self._outgoing), deadline=deadline)

    def receive_reduced(self, *, timeout_s: float, beat: Beat) -> Reduced:
        """The next mini-batch's reduced gradients. Raises PeerError when none come in time."""
        deadline = clock.monotonic() + timeout_s
        header = self._receive_header(deadline, beat)
        if header.length:
            self._channel.receive_into(bytes_of(self._incoming), deadline=deadline, beat=beat)
        if checksum(self._incoming) != header.checksum:
            raise PeerError("the core's reduced gradients were damaged on their way")
        return Reduced(header.fence, header.numbers, self._incoming)

    def applied(self, fence: Fence, digest: int) -> None:
        """Say which weights a step with the reduced gradients of `fence` has made."""
        header = Header(
            kind=FrameKind.APPLIED, run_hash=self._run_hash, fence=fence, checksum=digest
        )
        self._channel.send(encode_header(header), deadline=clock.monotonic() + self._timeout_s)

    def close(self) -> None:
        self._channel.close()

    def _prove(self, key: bytes, deadline: float) -> None:
        head_nonce = self._channel.receive(proof.NONCE_BYTES, deadline=deadline)
        nonces = {"head_nonce": head_nonce, "member_nonce": proof.new_nonce()}
        shown = proof.proof(key, "member", **nonces)
        self._channel.send(nonces["member_nonce"] + shown, deadline=deadline)
        answer = self._channel.receive(proof.PROOF_BYTES, deadline=deadline)
        proof.check_proof(answer, key, "head", **nonces)

    def _enter(self, hello: LaneHello, deadline: float, *, is_shared: bool) -> None:
        text = msgspec.json.encode(hello)
        header = Header(
            kind=FrameKind.HELLO,
            run_hash=self._run_hash,
            count=self._count,
            length=len(text),
            checksum=hello.digest,
        )
        self._channel.send(encode_header(header) + text, deadline=deadline)
        self._limits = Limits(
            run_hash=self._run_hash,
            count=self._count,
            kinds=frozenset({FrameKind.WELCOME, FrameKind.REFUSED}),
            is_shared=is_shared,
        )
        data = self._channel.receive_with(HEADER_BYTES, _NUM_SEGMENTS, deadline=deadline)
        self._refuse_refusal(decode_header(data, self._limits), deadline)
        if is_shared:
            out, back = _segments(self._channel.take_descriptors(), self._count)
        else:
            out, back = np.empty(self._count, np.float32), np.empty(self._count, np.float32)
        self._outgoing, self._incoming = out, back
        kinds = frozenset({FrameKind.REDUCED, FrameKind.REFUSED})
        self._limits = msgspec.structs.replace(self._limits, kinds=kinds)

    def _receive_header(self, deadline: float, beat: Beat) -> Header:
        data = self._channel.receive(HEADER_BYTES, deadline=deadline, beat=beat)
        header = decode_header(data, self._limits)
        self._refuse_refusal(header, deadline)
        return header

    def _refuse_refusal(self, header: Header, deadline: float) -> None:
        if header.kind is FrameKind.REFUSED:
            reason = self._channel.receive(header.length, deadline=deadline)
            raise PeerError(f"the core lets us go: {reason.decode(errors='replace')}")


def _segments(descriptors: list[int], count: int) -> tuple[Floats, Floats]:
    if len(descriptors) != _NUM_SEGMENTS:
        raise PeerError(f"{len(descriptors)} descriptors came with the welcome, not two")
    shared = [SharedValues(descriptor, count) for descriptor in descriptors]
    for one in shared:
        one.close_descriptor()
    return shared[0].values, shared[1].values
