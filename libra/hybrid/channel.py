"""A socket with a limit on every wait, and memory that two processes share."""

import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

import numpy as np

from libra import clock
from libra.errors import PeerError
from libra.hybrid.checksum import Floats

Beat: TypeAlias = Callable[[], None]
"""Called while waiting, several times a second."""

POLL_S: Final = 0.2
_ITEM_BYTES: Final = 4
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ClosedError(PeerError):
    """The other side closed the connection, between two frames or within one."""


class LateError(PeerError):
    """The other side did not do its part in time."""


def no_beat() -> None:
    pass


class Channel:
    """One connection. Reading is for one thread, writing for one; anyone may close."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(POLL_S)

    def send(self, data: bytes | memoryview, *, deadline: float, beat: Beat = no_beat) -> None:
        """Send all of it. Raises LateError or ClosedError; the channel is of no use then."""
        view = memoryview(data).cast("B")
        while view:
            try:
                view = view[self._socket.send(view) :]
            except TimeoutError:
                beat()
            except OSError as error:
                raise ClosedError(f"the lane broke: {error.strerror}") from error
            if view:
                # Also of one that takes a little, again and again.
                _check(deadline, "reading what we send")

    def send_with(self, data: bytes, descriptors: Sequence[int], *, deadline: float) -> None:
        """Send `data` and open descriptors, on a Unix socket."""
        try:
            sent = socket.send_fds(self._socket, [data], list(descriptors))
        except OSError as error:
            raise ClosedError(f"the lane broke: {error}") from error
        self.send(data[sent:], deadline=deadline)

    def receive_into(
        self, view: memoryview, *, deadline: float | None, beat: Beat = no_beat
    ) -> None:
        """Fill `view`. Raises LateError or ClosedError; without a deadline it waits for ever."""
        while view:
            try:
                num_bytes = self._socket.recv_into(view)
            except TimeoutError:
                beat()
                _check(deadline, "sending")
                continue
            except OSError as error:
                raise ClosedError(f"the lane broke: {error.strerror}") from error
            if not num_bytes:
                raise ClosedError("the other side closed the lane")
            view = view[num_bytes:]
            if view:
                # Also of one that sends a little, again and again.
                _check(deadline, "sending")

    def receive(self, num_bytes: int, *, deadline: float | None, beat: Beat = no_beat) -> bytes:
        buffer = bytearray(num_bytes)
        self.receive_into(memoryview(buffer), deadline=deadline, beat=beat)
        return bytes(buffer)

    def receive_frame(self, num_bytes: int, *, timeout_s: float) -> bytes:
        """Wait for ever for a frame's first byte, and `timeout_s` for the others."""
        first = self.receive(1, deadline=None)
        return first + self.receive(num_bytes - 1, deadline=clock.monotonic() + timeout_s)

    def receive_with(self, num_bytes: int, num_descriptors: int, *, deadline: float) -> bytes:
        """As `receive`, with descriptors; `take_descriptors` has them afterwards."""
        self._descriptors: list[int] = []
        data = b""
        while len(data) < num_bytes:
            try:
                chunk, found, _, _ = socket.recv_fds(
                    self._socket, num_bytes - len(data), num_descriptors
                )
            except TimeoutError:
                _check(deadline, "answering")
                continue
            except OSError as error:
                raise ClosedError(f"the lane broke: {error.strerror}") from error
            self._descriptors += found
            if not chunk:
                raise ClosedError("the other side closed the lane")
            data += chunk
        return data

    def take_descriptors(self) -> list[int]:
        """What came with the last `receive_with`; the caller closes them."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        """End the connection, also for threads that wait in it."""
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _check(deadline: float | None, what: str) -> None:
    if deadline is not None and clock.monotonic() >= deadline:
        raise LateError(f"the other side takes too long in {what}")


class SharedValues:
    """float32[count] in memory without a name: it is gone with the last process that has it."""

    def __init__(self, descriptor: int, count: int) -> None:
        """Take over `descriptor`. Raises PeerError when it is not memory of that very size."""
        self.descriptor = descriptor
        num_bytes = count * _ITEM_BYTES
        try:
            has_seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not has_seals or os.fstat(descriptor).st_size != num_bytes:
                raise PeerError(f"shared memory that is not sealed at {num_bytes} bytes")
            self._map = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            raise PeerError(f"shared memory: {error.strerror}") from error
        self.values: Floats = np.frombuffer(self._map, np.float32)

    @classmethod
    def create(cls, count: int) -> "SharedValues":
        """Make memory that neither side can shrink: to touch what was cut off would kill us."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create("libra-lane", flags)
        os.ftruncate(descriptor, count * _ITEM_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        made = cls(descriptor, count)
        # As `room.touched` says; the other process then maps pages that are there.
        made.values.fill(0.0)
        return made

    def close_descriptor(self) -> None:
        """The memory stays as long as it is mapped."""
        os.close(self.descriptor)


def bytes_of(values: Floats) -> memoryview:
    return values.data.cast("B")
