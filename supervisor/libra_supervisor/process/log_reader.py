"""Reading children's logs back: lines with child, stream, rank and time, filtered, followed.

    for line in read_lines(LogQuery(directory=..., child_ids=("vllm-0",), since_ns=...)):
        print(line.child_id, line.text)

Tags are added here, not when the bytes were written: stream, rank and time of a line come from the
log's index. What ranks say before they have pipes of their own tells its rank by the prefix
`[rank N]` or torchrun's `[defaultN]:`.
"""

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from heapq import merge
from pathlib import Path
from typing import Final

import msgspec

from libra import clock
from libra.ids import ChildId
from libra_supervisor.process.log_file import INDEX_SUFFIX, RECORD, rotated_name
from libra_supervisor.process.log_lines import LineSplitter, shown
from libra_supervisor.process.streams import Stream

_CHUNK_BYTES: Final = 1 << 20
_POLL_S: Final = 0.25
_SUFFIX: Final = ".log"
_RANK: Final = re.compile(r"^\[(?:rank |[a-z]+)(\d+)\]")
_NOT_CHILDREN: Final = frozenset({"log-relay"})


class LogLine(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One line of one child."""

    at_ns: int
    """Wall time at which its last byte was read; 0 when the index does not say."""

    child_id: ChildId
    stream: Stream
    rank: int | None
    text: str


class LogQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which lines are wanted; an empty tuple or None wants all."""

    directory: Path
    """The run's `logs` folder."""

    child_ids: tuple[ChildId, ...] = ()
    is_of_kind: Callable[[ChildId], bool] | None = None
    """Chooses among children where none is named, among those to come as well."""

    streams: tuple[Stream, ...] = ()
    rank: int | None = None
    since_ns: int = 0

    def wants(self, line: LogLine) -> bool:
        return (
            line.at_ns >= self.since_ns
            and (not self.streams or line.stream in self.streams)
            and (self.rank is None or line.rank == self.rank)
        )


def children_logged(directory: Path) -> tuple[ChildId, ...]:
    """Children that have a log, sorted by name."""
    names = (path.name.removesuffix(_SUFFIX) for path in directory.glob(f"*{_SUFFIX}"))
    return tuple(ChildId(name) for name in sorted(names) if name not in _NOT_CHILDREN)


def read_lines(query: LogQuery) -> Iterator[LogLine]:
    """Lines of all wanted children in order of time, rotated files included."""
    for line in _merged(_lines_of(query.directory, child_id) for child_id in _wanted(query)):
        if query.wants(line):
            yield line


async def follow_lines(query: LogQuery, *, with_past: bool = False) -> AsyncIterator[LogLine]:
    """Lines written from now on, until the caller stops; rotations and new children included.

    `with_past` begins with those written before, and misses none that comes meanwhile.
    """
    tails = {child_id: _Tail(query.directory, child_id) for child_id in _wanted(query)}
    if with_past:
        for line in filter(query.wants, _merged(tail.past() for tail in tails.values())):
            yield line
    while True:
        for child_id in _wanted(query):
            if child_id not in tails:
                tails[child_id] = _Tail(query.directory, child_id, from_start=True)
            for line in filter(query.wants, tails[child_id].fresh()):
                yield line
        await clock.sleep(_POLL_S)


class _Chunk(msgspec.Struct, frozen=True):
    offset: int
    length: int
    stream: Stream
    rank: int | None
    at_ns: int


class _Lines:
    """Turns chunks of one child into lines, each stream of each rank for itself."""

    def __init__(self, child_id: ChildId) -> None:
        self._child_id = child_id
        self._splitters: defaultdict[tuple[Stream, int | None], LineSplitter]
        self._splitters = defaultdict(LineSplitter)
        self._last_at_ns = 0

    def feed(self, chunk: _Chunk, data: bytes) -> Iterator[LogLine]:
        self._last_at_ns = chunk.at_ns
        for line in self._splitters[chunk.stream, chunk.rank].feed(data):
            yield self._tagged(chunk.stream, chunk.rank, chunk.at_ns, line)

    def flush(self) -> Iterator[LogLine]:
        for (stream, rank), splitter in self._splitters.items():
            for line in splitter.flush():
                yield self._tagged(stream, rank, self._last_at_ns, line)

    def _tagged(self, stream: Stream, rank: int | None, at_ns: int, line: bytes) -> LogLine:
        text = shown(line)
        if rank is None and (found := _RANK.match(text)) is not None:
            rank = int(found[1])
        return LogLine(at_ns=at_ns, child_id=self._child_id, stream=stream, rank=rank, text=text)


class _Tail:
    """The logs of one child, up to the present end and from there on."""

    def __init__(self, directory: Path, child_id: ChildId, *, from_start: bool = False) -> None:
        self._path = str(directory / f"{child_id}{_SUFFIX}")
        self._lines = _Lines(child_id)
        self._inode, size = _inode_and_size(self._path)
        self._offset = 0 if from_start else size

    def past(self) -> Iterator[LogLine]:
        """Lines up to where `fresh` begins, which completes the last when it has no end yet."""
        for path in reversed(_existing(self._path)):
            is_current = _inode_and_size(path)[0] == self._inode
            for chunk, data in _chunks(path, 0, self._offset if is_current else None):
                yield from self._lines.feed(chunk, data)
            if is_current:
                return  # what a rotation made meanwhile is fresh

    def rest(self) -> Iterator[LogLine]:
        """The last lines, which have no end."""
        return self._lines.flush()

    def fresh(self) -> Iterator[LogLine]:
        inode, size = _inode_and_size(self._path)
        if inode != self._inode:
            # Rotated, maybe more than once: what was written before the current file comes first.
            for path in reversed(self._since_ours()):
                yield from self._read(path)
                self._offset = 0
            self._inode, self._offset = inode, 0
        if size > self._offset:
            yield from self._read(self._path)

    def _since_ours(self) -> list[str]:
        """Rotated files that were not read to their end, the youngest first."""
        found: list[str] = []
        for path in _existing(self._path):
            if path != self._path:
                found.append(path)
                if _inode_and_size(path)[0] == self._inode:
                    return found
        self._offset = 0  # ours is gone, and all that are left are younger
        return found

    def _read(self, path: str) -> Iterator[LogLine]:
        for chunk, data in _chunks(path, self._offset):
            self._offset = chunk.offset + len(data)
            yield from self._lines.feed(chunk, data)


def _wanted(query: LogQuery) -> tuple[ChildId, ...]:
    return query.child_ids or tuple(filter(query.is_of_kind, children_logged(query.directory)))


def _merged(sources: Iterable[Iterator[LogLine]]) -> Iterator[LogLine]:
    return merge(*sources, key=lambda line: line.at_ns)


def _lines_of(directory: Path, child_id: ChildId) -> Iterator[LogLine]:
    tail = _Tail(directory, child_id)
    yield from tail.past()
    yield from tail.rest()


def _existing(path: str) -> list[str]:
    """The current file, if there is one, and the rotated ones, the youngest first."""
    found = [path] if Path(path).exists() else []
    age = 1
    while Path(name := rotated_name(path, age)).exists():
        found.append(name)
        age += 1
    return found


def _chunks(path: str, start: int, end: int | None = None) -> Iterator[tuple[_Chunk, bytes]]:
    """The file's bytes from `start` to `end`, cut as the index says; gaps count as stdout."""
    if not Path(path).exists():
        return
    with Path(path).open("rb") as file:
        stop = _inode_and_size(path)[1] if end is None else end
        for chunk in _filled(_index(path), start, stop):
            for offset in range(chunk.offset, chunk.offset + chunk.length, _CHUNK_BYTES):
                file.seek(offset)
                wanted = min(_CHUNK_BYTES, chunk.offset + chunk.length - offset)
                data = file.read(wanted)
                yield msgspec.structs.replace(chunk, offset=offset, length=len(data)), data


def _index(path: str) -> Iterator[_Chunk]:
    try:
        content = Path(path + INDEX_SUFFIX).read_bytes()
    except FileNotFoundError:
        return
    whole = len(content) - len(content) % RECORD.size
    for offset, length, stream, rank, at_ns in RECORD.iter_unpack(content[:whole]):
        yield _Chunk(offset, length, Stream(stream), rank - 1 if rank else None, at_ns)


def _filled(index: Iterator[_Chunk], start: int, end: int) -> Iterator[_Chunk]:
    """Chunks that cover [start, end) in order, with stand-ins for bytes no record describes."""
    at_ns = 0
    for chunk in index:
        if chunk.offset + chunk.length <= start:
            at_ns = chunk.at_ns
            continue
        if chunk.offset > start:
            yield _Chunk(start, min(chunk.offset, end) - start, Stream.OUT, None, at_ns)
            start = chunk.offset
        at_ns = chunk.at_ns
        stop = min(chunk.offset + chunk.length, end)
        if stop > start:
            yield msgspec.structs.replace(chunk, offset=start, length=stop - start)
            start = stop
    if start < end:
        yield _Chunk(start, end - start, Stream.OUT, None, at_ns)


def _inode_and_size(path: str) -> tuple[int, int]:
    try:
        found = Path(path).stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_size
