"""Where drained bytes go: a bounded queue per child, one thread that writes.

The reader never waits for the disk. A sink whose disk refuses (ENOSPC, EIO) drops at once; one
whose disk is slow makes its reader pause while writes still complete, and drops when one write
has not come back for STUCK_AFTER_S. What is dropped is counted, reported, and said in the file.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from libra import clock
from libra.ids import ChildId
from libra_supervisor.process.log_file import LogFile
from libra_supervisor.process.log_lines import LineSplitter
from libra_supervisor.process.log_messages import RelayReport, SinkFailed, SinkRecovered
from libra_supervisor.process.streams import Stream

MAX_PENDING_BYTES: Final = 4 * 2**20
STUCK_AFTER_S: Final = 1.0
TAIL_BYTES: Final = 96 * 1024
"""More than the longest shown line, so that one that is cut is seen to be."""

READ_BYTES: Final = 1 << 20
"""A whole pipe: on a busy machine every hand-over between the threads waits for a core."""

COPIED_BYTES: Final = 256 * 1024
"""A read up to this size is copied out of its buffer; a larger one travels inside it."""

_MAX_FREE_BUFFERS: Final = 8

_RETRY_AFTER_S: Final = 0.2
_REPORT_EVERY_S: Final = 10.0


class Chunk:
    """What one read took: bytes of its own, or a part of a buffer that goes back after use."""

    def __init__(self, buffer: bytearray, num_bytes: int) -> None:
        self.is_borrowed = num_bytes > COPIED_BYTES
        view = memoryview(buffer)[:num_bytes]
        self.data = view if self.is_borrowed else bytes(view)
        self.buffer = buffer

    def __len__(self) -> int:
        return len(self.data)


class Buffers:
    """Read buffers that are used again: fresh memory for every read costs half as much CPU more."""

    def __init__(self) -> None:
        self._free: deque[bytearray] = deque()

    def take(self) -> bytearray:
        try:
            return self._free.pop()
        except IndexError:
            return bytearray(READ_BYTES)

    def give_back(self, chunk: Chunk) -> None:
        """For the writer's thread: its last use of the chunk is over."""
        if chunk.is_borrowed and len(self._free) < _MAX_FREE_BUFFERS:
            self._free.append(chunk.buffer)


class Tail:
    """The last bytes of one stream, whichever rank they are of."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[int | None, bytes]] = deque()
        self._num_bytes = 0

    def add(self, chunk: bytes | memoryview, rank: int | None) -> None:
        kept = bytes(chunk[-TAIL_BYTES:])
        self._chunks.append((rank, kept))
        self._num_bytes += len(kept)
        while self._num_bytes - len(self._chunks[0][1]) >= TAIL_BYTES:
            self._num_bytes -= len(self._chunks.popleft()[1])

    def lines(self) -> list[bytes]:
        """Each rank's lines are its own; they begin with `[rank N] ` if they did not already."""
        splitter_of: defaultdict[int | None, LineSplitter] = defaultdict(LineSplitter)
        lines = [
            _marked(line, rank)
            for rank, chunk in self._chunks
            for line in splitter_of[rank].feed(chunk)
        ]
        ends = ((rank, splitter.flush()) for rank, splitter in splitter_of.items())
        return lines + [_marked(line, rank) for rank, rest in ends for line in rest]


def _marked(line: bytes, rank: int | None) -> bytes:
    mark = b"" if rank is None else b"[rank %d] " % rank
    return line if line.startswith(mark) else mark + line


class LogSink:
    """One child's log file and the last bytes it printed.

    `write` and what it calls belong to the writer's thread, the rest to the reader's.
    """

    def __init__(
        self, child_id: ChildId, file: LogFile, report: Callable[[RelayReport], None]
    ) -> None:
        self.child_id = child_id
        self.pending_bytes = 0
        self.is_awaited = False
        """A reader paused until there is room again."""

        self._file = file
        self._report = report
        self._lock = threading.Lock()
        self._tails = {stream: Tail() for stream in Stream}
        self._dropped_bytes = 0
        self._unsaid_bytes = 0
        self._failing: str | None = None
        self._retry_at = 0.0
        self._report_at = 0.0

    def remember(self, stream: Stream, chunk: bytes | memoryview, rank: int | None = None) -> None:
        """Keep the chunk for error reports, whatever becomes of the file."""
        self._tails[stream].add(chunk, rank)

    def forget(self) -> None:
        """Begin anew with a new process: the old one's last words are not its own."""
        self._tails = {stream: Tail() for stream in Stream}

    def last_lines(self, num_lines: int) -> list[bytes]:
        """The last lines of both streams; each keeps half of the room at least.

        A flood on stdout must not push the traceback on stderr out of sight.
        """
        lines_of = {stream: self._tails[stream].lines() for stream in (Stream.OUT, Stream.ERR)}
        half = num_lines // 2
        num_err = min(len(lines_of[Stream.ERR]), max(half, num_lines - len(lines_of[Stream.OUT])))
        out = lines_of[Stream.OUT][-(num_lines - num_err) :] if num_err < num_lines else []
        return out + lines_of[Stream.ERR][len(lines_of[Stream.ERR]) - num_err :]

    @property
    def is_full(self) -> bool:
        return self.pending_bytes >= MAX_PENDING_BYTES

    def add_pending(self, num_bytes: int) -> None:
        with self._lock:
            self.pending_bytes += num_bytes

    def drop(self, num_bytes: int, reason: str) -> None:
        """Count bytes that will not be in the file; report now and then."""
        with self._lock:
            self._dropped_bytes += num_bytes
            self._unsaid_bytes += num_bytes
            is_new = self._failing is None
            self._failing = reason
            dropped_bytes = self._dropped_bytes
        now = clock.monotonic()
        if is_new or now >= self._report_at:
            self._report_at = now + _REPORT_EVERY_S
            self._report(SinkFailed(self.child_id, reason, dropped_bytes))

    def write(
        self, stream: Stream, chunk: bytes | memoryview, wall_ns: int, rank: int | None = None
    ) -> None:
        try:
            self._write(stream, chunk, wall_ns, rank)
        finally:
            self.add_pending(-len(chunk))

    def close(self) -> None:
        self._file.reopen()

    def _write(
        self, stream: Stream, chunk: bytes | memoryview, wall_ns: int, rank: int | None
    ) -> None:
        if self._failing is not None and not self._recover(wall_ns):
            self.drop(len(chunk), self._failing or "the log cannot be written")
            return
        try:
            written = self._file.write(stream, chunk, wall_ns=wall_ns, rank=rank)
        except OSError as error:
            self._fail(len(chunk), error.strerror or str(error))
            return
        if written < len(chunk):
            self._fail(len(chunk) - written, "the disk is full")

    def _fail(self, num_bytes: int, reason: str) -> None:
        self._retry_at = clock.monotonic() + _RETRY_AFTER_S
        self._file.reopen()
        self.drop(num_bytes, reason)

    def _recover(self, wall_ns: int) -> bool:
        """Try to say in the file what was lost; True when the file takes writes again."""
        if clock.monotonic() < self._retry_at:
            return False
        remark = f"\n[libra: {self._unsaid_bytes} bytes of output dropped: {self._failing}]\n"
        try:
            written = self._file.write(Stream.LIBRA, remark.encode(), wall_ns=wall_ns)
        except OSError:
            written = 0
        if written < len(remark.encode()):
            self._retry_at = clock.monotonic() + _RETRY_AFTER_S
            self._file.reopen()
            return False
        with self._lock:
            self._failing = None
            self._unsaid_bytes = 0
            dropped_bytes = self._dropped_bytes
        self._report(SinkRecovered(self.child_id, dropped_bytes))
        return True


class LogWriter:
    """The thread that writes for every sink. `wake` is called when a full sink has room again."""

    def __init__(self, wake: Callable[[], None], buffers: Buffers) -> None:
        self._wake = wake
        self._buffers = buffers
        self._queue: SimpleQueue[tuple[LogSink, Stream, Chunk, int, int | None] | None]
        self._queue = SimpleQueue()
        self._writing_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        """True when one write has been under way for so long that waiting would block children."""
        since = self._writing_since
        return since is not None and clock.monotonic() - since > STUCK_AFTER_S

    def put(self, sink: LogSink, stream: Stream, chunk: Chunk, rank: int | None = None) -> None:
        sink.add_pending(len(chunk))
        self._queue.put((sink, stream, chunk, clock.wall_ns(), rank))

    def finish(self, *, timeout_s: float) -> None:
        """Write what is queued and stop; gives up after `timeout_s` when the disk hangs."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            sink, stream, chunk, wall_ns, rank = item
            self._writing_since = clock.monotonic()
            sink.write(stream, chunk.data, wall_ns, rank)
            self._writing_since = None
            self._buffers.give_back(chunk)
            # A reader that pauses just now is missed here; it looks again by itself.
            if sink.is_awaited and not sink.is_full:
                sink.is_awaited = False
                self._wake()
