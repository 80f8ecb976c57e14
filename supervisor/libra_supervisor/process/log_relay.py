"""The log relay, a program of its own: drains every child's stdout and stderr into log files.

    python -m libra_supervisor.process.log_relay LISTENING_FD

It is a process beside the supervisor so that logs outlive it: the relay holds the read ends of
the pipes, the supervisor holds duplicates, and either can die and be replaced without a child
meeting a closed pipe (docs/decisions/0010-log-relay.md). It ends when every pipe has ended and no
supervisor is connected.
"""

import os
import select
import signal
import socket
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from libra.errors import PeerError
from libra.wire.framing import FrameDecoder, encode_frame
from libra_supervisor.process.log_file import LogFile
from libra_supervisor.process.log_lines import shown
from libra_supervisor.process.log_messages import (
    AskHeld,
    AskTail,
    Attach,
    Held,
    RelayCommand,
    RelayReport,
    Tail,
)
from libra_supervisor.process.log_sink import Buffers, Chunk, LogSink, LogWriter
from libra_supervisor.process.peer import peer_uid
from libra_supervisor.process.streams import Stream

if TYPE_CHECKING:
    from libra.ids import ChildId

_MAX_MESSAGE_BYTES: Final = 1 << 20
_MAX_FDS: Final = 253
_BACKLOG: Final = 64
_PAUSED_POLL_S: Final = 0.1
_FINISH_S: Final = 5.0


class Source(msgspec.Struct):
    """The read end of one stream of one child."""

    fd: int
    stream: Stream
    sink: LogSink
    rank: int | None
    is_paused: bool = False


class Link:
    """One supervisor's connection; sending never blocks the relay."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.decoder = FrameDecoder(max_frame_bytes=_MAX_MESSAGE_BYTES)
        self.fds: deque[int] = deque()

    def send(self, report: RelayReport, fds: tuple[int, ...] = ()) -> bool:
        """Return False when the supervisor does not read or is gone; close the link then."""
        data = encode_frame(msgspec.msgpack.encode(report))
        try:
            if fds:
                sent = socket.send_fds(self.connection, [data], fds)
                data = data[sent:]
            self.connection.sendall(data)
        except OSError:
            return False
        return True

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.connection.close()


class Relay:
    """All sources, sinks and links, driven by one epoll loop."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._poller = select.epoll()
        self._sources: dict[int, Source] = {}
        self._links: dict[int, Link] = {}
        self._sink_of: dict[ChildId, LogSink] = {}
        self._attach_of: dict[ChildId, Attach] = {}
        self._reports: deque[RelayReport] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._buffers = Buffers()
        self._buffer = self._buffers.take()
        self._writer = LogWriter(self._wake, self._buffers)
        self._was_linked = False

    def run(self) -> None:
        self._writer.start()
        for fd in (self._listener.fileno(), self._wake_read):
            self._poller.register(fd, select.EPOLLIN)
        while not self._is_done():
            for fd, _ in self._poller.poll(self._timeout_s()):
                self._serve(fd)
            self._resume_paused()
            self._send_reports()
        self._writer.finish(timeout_s=_FINISH_S)

    def _is_done(self) -> bool:
        return self._was_linked and not self._links and not self._sources

    def _timeout_s(self) -> float | None:
        return _PAUSED_POLL_S if any(s.is_paused for s in self._sources.values()) else None

    def _serve(self, fd: int) -> None:
        if (source := self._sources.get(fd)) is not None:
            self._read(source)
        elif (link := self._links.get(fd)) is not None:
            self._receive(link)
        elif fd == self._wake_read:
            os.read(fd, 4096)
        elif fd == self._listener.fileno():
            self._accept()

    # Pipes

    def _read(self, source: Source, *, even_if_full: bool = False) -> bool:
        """Take one chunk; False when there is none now."""
        if source.sink.is_full and not self._writer.is_stuck and not even_if_full:
            self._pause(source)
            return False
        try:
            num_bytes = os.readv(source.fd, [self._buffer])
        except BlockingIOError:
            return False
        except OSError:
            num_bytes = 0
        if num_bytes == 0:
            self._end(source)
            return False
        self._take(source, Chunk(self._buffer, num_bytes), even_if_full=even_if_full)
        return True

    def _take(self, source: Source, chunk: Chunk, *, even_if_full: bool) -> None:
        source.sink.remember(source.stream, chunk.data, source.rank)
        if source.sink.is_full and not even_if_full:
            source.sink.drop(len(chunk), "the disk does not take writes")
            return
        self._writer.put(source.sink, source.stream, chunk, source.rank)
        if chunk.is_borrowed:
            self._buffer = self._buffers.take()

    def _pause(self, source: Source) -> None:
        if not source.is_paused:
            source.is_paused = source.sink.is_awaited = True
            self._poller.unregister(source.fd)

    def _resume_paused(self) -> None:
        for source in self._sources.values():
            if source.is_paused and (not source.sink.is_full or self._writer.is_stuck):
                source.is_paused = False
                self._poller.register(source.fd, select.EPOLLIN)

    def _end(self, source: Source) -> None:
        del self._sources[source.fd]
        if not source.is_paused:
            self._poller.unregister(source.fd)
        os.close(source.fd)

    # Supervisors

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if peer_uid(connection) != os.geteuid():
            connection.close()
            return
        # A supervisor that does not read for so long is hung; the pipes matter more.
        connection.settimeout(1.0)
        self._links[connection.fileno()] = Link(connection)
        self._poller.register(connection.fileno(), select.EPOLLIN)
        self._was_linked = True

    def _receive(self, link: Link) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(link.connection, 65536, _MAX_FDS)
            link.fds.extend(fds)
            frames = link.decoder.feed(data)
            if not data:
                self._drop(link)
            for frame in frames:
                self._obey(link, msgspec.msgpack.decode(frame, type=RelayCommand))
        except (OSError, PeerError, msgspec.MsgspecError, IndexError):
            self._drop(link)

    def _drop(self, link: Link) -> None:
        fd = link.connection.fileno()
        if self._links.pop(fd, None) is not None:
            self._poller.unregister(fd)
            link.close()

    def _obey(self, link: Link, command: RelayCommand) -> None:
        match command:
            case Attach():
                self._attach(command, link.fds.popleft(), link.fds.popleft())
            case AskTail():
                self._answer(link, Tail(command.request, self._tail(command)))
            case AskHeld():
                self._hand_over(link, command.request)

    def _attach(self, attach: Attach, out_fd: int, err_fd: int) -> None:
        sink = self._sink_for(msgspec.structs.replace(attach, rank=None))
        if attach.rank is None:
            sink.forget()
        for fd, stream in ((out_fd, Stream.OUT), (err_fd, Stream.ERR)):
            os.set_blocking(fd, False)
            self._sources[fd] = Source(fd, stream, sink, attach.rank)
            self._poller.register(fd, select.EPOLLIN)

    def _sink_for(self, attach: Attach) -> LogSink:
        """The child's sink; a new one when the file is to be kept in another way."""
        sink = self._sink_of.get(attach.child_id)
        if sink is None or self._attach_of[attach.child_id] != attach:
            if sink is not None:
                sink.close()
            file = LogFile(attach.log_path, max_bytes=attach.max_bytes, num_kept=attach.num_kept)
            sink = LogSink(attach.child_id, file, self._post)
        self._sink_of[attach.child_id], self._attach_of[attach.child_id] = sink, attach
        return sink

    def _tail(self, ask: AskTail) -> tuple[str, ...]:
        sink = self._sink_of.get(ask.child_id)
        if sink is None:
            return ()
        # A dead child's last words may still be in its pipes: those of ranks came before what
        # torchrun says of their end.
        sources = [source for source in self._sources.values() if source.sink is sink]
        for source in sorted(sources, key=lambda source: source.rank is None):
            while source.fd in self._sources and self._read(source):
                pass
            if source.is_paused and source.fd in self._sources:
                # The disk is behind. A flood on stdout must not keep back a traceback on stderr;
                # one read takes a whole pipe.
                self._read(source, even_if_full=True)
        return tuple(shown(line) for line in sink.last_lines(ask.num_lines))

    def _hand_over(self, link: Link, request: int) -> None:
        attaches: list[Attach] = []
        fds: list[int] = []
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for child_id, sink in self._sink_of.items():
            # Ranks are not taken over, and what they still say is drained to its end.
            sources = (s for s in self._sources.values() if s.sink is sink and s.rank is None)
            fd_of = {source.stream: source.fd for source in sources}
            if fd_of and len(fds) + 2 <= _MAX_FDS:
                attaches.append(self._attach_of[child_id])
                fds += [fd_of.get(Stream.OUT, null), fd_of.get(Stream.ERR, null)]
        self._answer(link, Held(request, tuple(attaches)), tuple(fds))
        os.close(null)

    def _answer(self, link: Link, report: RelayReport, fds: tuple[int, ...] = ()) -> None:
        if not link.send(report, fds):
            self._drop(link)

    # From the writer's thread

    def _post(self, report: RelayReport) -> None:
        self._reports.append(report)
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            return  # a full pipe wakes as well

    def _send_reports(self) -> None:
        while self._reports:
            report = self._reports.popleft()
            for link in list(self._links.values()):
                self._answer(link, report)


def main() -> int:
    # The relay ends by the end of its inputs; a stop signal sent to a whole session or job step
    # must not cut the logs of children that are still stopping.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    # Whoever listened last is whom the kernel names to those that connect.
    listener.listen(_BACKLOG)
    path = Path(sys.argv[2])
    ours = _inode_of(path)
    Relay(listener).run()
    # Unless a later relay has bound the name anew.
    if ours is not None and _inode_of(path) == ours:
        path.unlink(missing_ok=True)
    return 0


def _inode_of(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
