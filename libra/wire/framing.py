"""Length-prefixed frames: 4 bytes big-endian length, then that many bytes. Sans I/O."""

from libra.errors import PeerError

HEADER_BYTES = 4
MAX_FRAME_BYTES = 1 << 30
"""A frame above this is taken for garbage: the longest real one is a training batch."""


def encode_frame(payload: bytes) -> bytes:
    """One frame holding `payload`. Raises PeerError when it is longer than MAX_FRAME_BYTES."""
    if len(payload) > MAX_FRAME_BYTES:
        raise PeerError(f"a frame of {len(payload)} bytes exceeds {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameDecoder:
    """Turns arbitrary chunks of a byte stream into whole frames."""

    def __init__(self, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_frame_bytes = max_frame_bytes

    @property
    def is_empty(self) -> bool:
        """True between frames; an end of stream is clean only then."""
        return not self._buffer

    def feed(self, chunk: bytes) -> list[bytes]:
        """Frames completed by `chunk`, in order. Raises PeerError on an impossible length."""
        self._buffer += chunk
        frames: list[bytes] = []
        start = 0
        while (end := self._end_of_frame(start)) is not None:
            frames.append(bytes(self._buffer[start + HEADER_BYTES : end]))
            start = end
        if start:
            del self._buffer[:start]
        return frames

    def _end_of_frame(self, start: int) -> int | None:
        body = start + HEADER_BYTES
        if len(self._buffer) < body:
            return None
        length = int.from_bytes(self._buffer[start:body], "big")
        if length > self._max_frame_bytes:
            raise PeerError(f"a peer announced a frame of {length} bytes")
        end = body + length
        return end if len(self._buffer) >= end else None
