"""A frame's header: fixed bytes, each field checked before anything is done with it. Sans I/O.

What follows a header is `length` raw bytes: on the socket, or nothing when the values lie in the
memory that both sides share. Every length is known beforehand from the model, so a header can make
nobody wait for, or make room for, more than that.
"""

import struct
import zlib
from enum import IntEnum
from hashlib import blake2b
from typing import Final

import msgspec

from libra.errors import PeerError
from libra.ids import RunId

_MAGIC: Final = b"LBH1"
_FIELDS: Final = struct.Struct("<4sBBHIIIIQQQ16s6d")
_SUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _SUM.size
RUN_HASH_BYTES: Final = 16
NUM_NUMBERS: Final = 6
MAX_TEXT_BYTES: Final = 512
_LARGEST_U32: Final = 2**32 - 1


class FrameKind(IntEnum):
    HELLO = 1
    """Member: who it is, on which lane, and the hash of its layout; text follows."""

    WELCOME = 2
    """Head: come in. The descriptors of shared memory come with it where there is any."""

    REFUSED = 3
    """Head: go away; the reason follows as text."""

    GRADIENT = 4
    """Member: its gradient sums of one mini-batch; the numbers are its loss sums."""

    REDUCED = 5
    """Head: the reduced gradients of one mini-batch; the numbers are those of the step."""

    APPLIED = 6
    """Member: it stepped with the reduced gradients; the checksum is that of its weights."""


class FrameDtype(IntEnum):
    NONE = 0
    FLOAT32 = 1

    @property
    def item_bytes(self) -> int:
        return 4 if self is FrameDtype.FLOAT32 else 0


class Fence(msgspec.Struct, frozen=True, order=True):
    """Which mini-batch of which step a frame belongs to, under which membership and weights."""

    step: int
    mini_batch: int
    epoch: int
    version: int
    """Optimizer steps that the weights have behind them."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    kind: FrameKind
    run_hash: bytes
    fence: Fence = Fence(0, 0, 0, 0)
    dtype: FrameDtype = FrameDtype.NONE
    count: int = 0
    """Values that the frame brings, wherever they lie."""

    length: int = 0
    """Bytes that follow on the socket."""

    checksum: int = 0
    numbers: tuple[float, ...] = ()
    """At most NUM_NUMBERS; a frame read back has zeros in the places left out."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one side of a lane takes from the other."""

    run_hash: bytes
    count: int
    """Values of a gradient on this lane, neither more nor less."""

    kinds: frozenset[FrameKind]
    is_shared: bool
    """Values lie in shared memory and never follow on the socket."""


def run_hash(run_id: RunId) -> bytes:
    """Sixteen bytes that stand for a run in every header."""
    return blake2b(run_id.encode(), digest_size=RUN_HASH_BYTES).digest()


def encode_header(header: Header) -> bytes:
    """The header's HEADER_BYTES bytes. Raises ValueError for what does not fit into a field."""
    fence, numbers = header.fence, header.numbers
    if len(header.run_hash) != RUN_HASH_BYTES or len(numbers) > NUM_NUMBERS:
        raise ValueError("a header has a run hash of 16 bytes and at most 6 numbers")
    try:
        fields = _FIELDS.pack(
            _MAGIC,
            header.kind,
            header.dtype,
            0,
            fence.epoch,
            fence.step,
            fence.mini_batch,
            fence.version,
            header.count,
            header.length,
            header.checksum,
            header.run_hash,
            *numbers,
            *(0.0,) * (NUM_NUMBERS - len(numbers)),
        )
    except struct.error as error:
        raise ValueError(f"a header's field does not hold this: {error}") from error
    return fields + _SUM.pack(zlib.crc32(fields))


def decode_header(data: bytes | bytearray | memoryview, limits: Limits) -> Header:
    """Read HEADER_BYTES bytes. Raises PeerError naming the first field that is not as it must be.

    Fences are not judged here: an old one is well-formed.
    """
    if len(data) != HEADER_BYTES:
        raise PeerError(f"a header has {HEADER_BYTES} bytes, here are {len(data)}")
    fields = bytes(data[: _FIELDS.size])
    if fields[: len(_MAGIC)] != _MAGIC:
        raise PeerError("this is no lane frame")
    (found_sum,) = _SUM.unpack(data[_FIELDS.size :])
    if zlib.crc32(fields) != found_sum:
        raise PeerError("a header was damaged on its way")
    _, kind, dtype, zero, *numbers = _FIELDS.unpack(fields)
    epoch, step, mini_batch, version, count, length, checksum, its_run, *values = numbers
    if kind not in set(FrameKind) or dtype not in set(FrameDtype) or zero:
        raise PeerError(f"a header has kind {kind}, dtype {dtype} and flags {zero}")
    header = Header(
        kind=FrameKind(kind),
        run_hash=its_run,
        fence=Fence(step=step, mini_batch=mini_batch, epoch=epoch, version=version),
        dtype=FrameDtype(dtype),
        count=count,
        length=length,
        checksum=checksum,
        numbers=tuple(values),
    )
    _check(header, limits)
    return header


def _check(header: Header, limits: Limits) -> None:
    kind = header.kind
    if kind not in limits.kinds:
        raise PeerError(f"a {kind.name} frame is not what this side takes")
    if header.run_hash != limits.run_hash:
        raise PeerError("a frame of another run")
    if kind in (FrameKind.GRADIENT, FrameKind.REDUCED):
        _check_values(header, limits)
    elif kind in (FrameKind.HELLO, FrameKind.REFUSED):
        if header.dtype is not FrameDtype.NONE or header.length > MAX_TEXT_BYTES:
            raise PeerError(f"a {kind.name} frame announces {header.length} bytes of text")
    elif header.dtype is not FrameDtype.NONE or header.length:
        raise PeerError(f"a {kind.name} frame brings nothing with it")


def _check_values(header: Header, limits: Limits) -> None:
    if header.dtype is not FrameDtype.FLOAT32:
        raise PeerError(f"values of dtype {header.dtype.name} on a lane of FLOAT32")
    if header.count != limits.count:
        raise PeerError(f"{header.count} values on a lane of {limits.count}")
    wanted = 0 if limits.is_shared else header.count * header.dtype.item_bytes
    if header.length != wanted:
        raise PeerError(f"{header.length} bytes follow, {wanted} would be right")
