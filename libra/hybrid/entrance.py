"""Where members come in: nothing of what they say is read before they have proved the key."""

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

import msgspec

from libra import clock
from libra.errors import PeerError
from libra.hybrid import proof
from libra.hybrid.address import LaneHello
from libra.hybrid.channel import Channel, SharedValues
from libra.hybrid.header import (
    HEADER_BYTES,
    MAX_TEXT_BYTES,
    FrameKind,
    Header,
    Limits,
    decode_header,
    encode_header,
)
from libra.hybrid.streams import MAX_STREAMS, Gathering
from libra.hybrid.terms import LaneTerms
from libra.wire.hybrid import LaneAddress

PROVE_WITHIN_S: Final = 5.0
MAX_STRANGERS: Final = 16
"""Connections at once that have not proved anything yet."""

SURE_S: Final = 1.0
"""What each of them has for its proof, however many come."""

MAX_PROVED: Final = 256
"""Streams at once that have proved the key and are no member's yet."""

_MAX_TAKEN_IN: Final = 16
"""Members at once that memory is found for."""

_UCRED: Final = struct.Struct("3i")

Shared: TypeAlias = tuple[SharedValues, SharedValues]
Channels: TypeAlias = tuple[Channel, ...]
"""Of one member, by stream."""

Admit: TypeAlias = Callable[[Channels, LaneHello, Shared | None, Callable[[], None]], None]
"""Takes a proved member in, calling the last argument to welcome it. Raises PeerError to refuse."""


class Entrance:
    """The listening sockets of one head, with a thread for each and for everyone who comes."""

    def __init__(
        self,
        terms: LaneTerms,
        *,
        key: bytes,
        lane: int,
        layout_hash: str,
        host: str,
        admit: Admit,
    ) -> None:
        self._terms, self._key, self._admit = terms, key, admit
        self._lane, self._layout_hash = lane, layout_hash
        self._gathering = Gathering()
        self._strangers = Strangers()
        self._num_proved = threading.BoundedSemaphore(MAX_PROVED)
        self._num_taken_in = threading.BoundedSemaphore(_MAX_TAKEN_IN)
        name = f"libra-{os.getpid()}-lane-{lane}-{secrets.token_hex(8)}"
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Without a file: nothing to clean up after a rank that was killed.
        unix.bind("\0" + name)
        unix.listen()
        self._listeners = [unix]
        self.unix_address = LaneAddress(unix=name)
        self.tcp_address: LaneAddress | None = None
        if host:
            [(family, _, _, _, where), *_] = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            self._listeners.append(socket.create_server(where[:2], family=family))
            port = self._listeners[-1].getsockname()[1]
            self.tcp_address = LaneAddress(host=host, port=port)
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="lane-entrance", daemon=True
            ).start()

    def close(self) -> None:
        for listener in self._listeners:
            with suppress(OSError):  # it was closed already
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError:
                return  # closed
            channel = Channel(connection)
            self._strangers.take_in(channel)
            threading.Thread(
                target=self._receive, args=(connection, channel), name="lane-proof", daemon=True
            ).start()

    def _receive(self, connection: socket.socket, channel: Channel) -> None:
        try:
            is_unix = connection.family == socket.AF_UNIX
            if is_unix:
                _check_user(connection)
            hello = self._proved(channel)
            self._check_streams(channel, hello, is_unix=is_unix)
        except (PeerError, OSError) as error:
            self._turn_away((channel,), error)
            return
        finally:
            # From here on it waits for its siblings, and bars no stranger.
            self._strangers.let_go(channel)
        if not self._num_proved.acquire(blocking=False):
            self._turn_away((channel,), PeerError("too many members come at once"))
            return
        try:
            self._take_in(channel, hello, is_unix=is_unix)
        finally:
            self._num_proved.release()

    def _take_in(self, channel: Channel, hello: LaneHello, *, is_unix: bool) -> None:
        channels: Channels = (channel,)
        try:
            deadline = clock.monotonic() + PROVE_WITHIN_S
            gathered = self._gathering.gather(channel, hello, deadline=deadline)
            if gathered is None:
                return  # the thread of the last stream takes the member in
            channels = gathered
            with self._num_taken_in:
                shared = self._memory() if is_unix else None
                self._admit(channels, hello, shared, lambda: self._welcome(channels[0], shared))
        except (PeerError, OSError) as error:
            self._turn_away(channels, error)

    def _turn_away(self, channels: Channels, error: Exception) -> None:
        """A stranger; a member, which has been told why; or there is no memory for one."""
        print(f"lane {self._lane}: not let in: {error}", flush=True)  # noqa: T201
        for one in channels:
            one.close()

    def _proved(self, channel: Channel) -> LaneHello:
        """Who it is, once it has proved the key. Raises PeerError."""
        deadline = clock.monotonic() + PROVE_WITHIN_S
        head_nonce = proof.new_nonce()
        channel.send(head_nonce, deadline=deadline)
        answer = channel.receive(proof.ANSWER_BYTES, deadline=deadline)
        member_nonce, shown = answer[: proof.NONCE_BYTES], answer[proof.NONCE_BYTES :]
        nonces = {"head_nonce": head_nonce, "member_nonce": member_nonce}
        proof.check_proof(shown, self._key, "member", **nonces)
        channel.send(proof.proof(self._key, "head", **nonces), deadline=deadline)
        return self._hello(channel, deadline)

    def _hello(self, channel: Channel, deadline: float) -> LaneHello:
        limits = Limits(
            run_hash=self._terms.run_hash,
            count=self._terms.count,
            kinds=frozenset({FrameKind.HELLO}),
            is_shared=False,
        )
        header = decode_header(channel.receive(HEADER_BYTES, deadline=deadline), limits)
        text = channel.receive(header.length, deadline=deadline)
        try:
            hello = msgspec.json.decode(text, type=LaneHello)
        except msgspec.MsgspecError as error:
            raise PeerError(f"a hello that cannot be read: {error}") from error
        wanted = (self._lane, self._layout_hash, self._terms.count)
        if (hello.lane, hello.layout_hash, header.count) != wanted:
            self.refuse(channel, f"lane {self._lane} is for another part of another model")
        return hello

    def _check_streams(self, channel: Channel, hello: LaneHello, *, is_unix: bool) -> None:
        most = 1 if is_unix else min(MAX_STREAMS, self._terms.count)
        if not hello.stream < hello.num_streams <= most:
            self.refuse(
                channel, f"stream {hello.stream} of {hello.num_streams}: at most {most} make a lane"
            )

    def refuse(self, channel: Channel, reason: str) -> None:
        """Tell a member why it is not let in, and raise PeerError."""
        text = reason.encode()[:MAX_TEXT_BYTES]
        header = self._header(FrameKind.REFUSED, length=len(text))
        channel.send(header + text, deadline=clock.monotonic() + PROVE_WITHIN_S)
        raise PeerError(reason)

    def _memory(self) -> Shared:
        count = self._terms.count
        return SharedValues.create(count), SharedValues.create(count)

    def _welcome(self, channel: Channel, shared: Shared | None) -> None:
        deadline = clock.monotonic() + PROVE_WITHIN_S
        header = self._header(FrameKind.WELCOME)
        if shared is None:
            channel.send(header, deadline=deadline)
            return
        channel.send_with(header, [one.descriptor for one in shared], deadline=deadline)
        for one in shared:
            one.close_descriptor()

    def _header(self, kind: FrameKind, *, length: int = 0) -> bytes:
        return encode_header(Header(kind=kind, run_hash=self._terms.run_hash, length=length))


class Strangers:
    """Who has not proved anything yet: when too many come, who has been here longest is cut off."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._came_at: dict[Channel, float] = {}
        """In order."""

    def take_in(self, channel: Channel) -> None:
        """Returns once there is a place: at once, or when somebody has had `SURE_S`."""
        with self._changed:
            while len(self._came_at) >= MAX_STRANGERS:
                oldest = next(iter(self._came_at))
                left_s = self._came_at[oldest] + SURE_S - clock.monotonic()
                if left_s <= 0:
                    del self._came_at[oldest]
                    oldest.close()
                else:
                    self._changed.wait(left_s)
            self._came_at[channel] = clock.monotonic()

    def let_go(self, channel: Channel) -> None:
        with self._changed:
            self._came_at.pop(channel, None)
            self._changed.notify_all()


def _check_user(connection: socket.socket) -> None:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, user, _ = _UCRED.unpack(found)
    if user != os.geteuid():
        raise PeerError(f"a process of user {user}")
