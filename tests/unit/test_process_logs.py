import errno
import os
import socket
import threading
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from libra.ids import ChildId
from libra_supervisor.process.log_file import INDEX_SUFFIX, RECORD, LogFile
from libra_supervisor.process.log_messages import AskTail, Attach, SinkFailed, SinkRecovered
from libra_supervisor.process.log_reader import (
    LogQuery,
    children_logged,
    follow_lines,
    read_lines,
)
from libra_supervisor.process.log_relay import Relay
from libra_supervisor.process.log_sink import (
    MAX_PENDING_BYTES,
    READ_BYTES,
    Buffers,
    Chunk,
    LogSink,
    LogWriter,
)
from libra_supervisor.process.streams import Stream

CHILD = ChildId("vllm-0")


def write(directory, entries, *, child="vllm-0", max_bytes=1 << 20, num_kept=3):
    file = LogFile(str(directory / f"{child}.log"), max_bytes=max_bytes, num_kept=num_kept)
    for at_ns, stream, chunk in entries:
        assert file.write(stream, chunk, wall_ns=at_ns) == len(chunk)
    file.close()


def shown(directory, **query):
    return [
        (line.at_ns, line.child_id, line.stream.name, line.text)
        for line in read_lines(LogQuery(directory=directory, **query))
    ]


def test_lines_of_two_streams_are_put_together_again(tmp_path):
    write(
        tmp_path,
        [
            (1, Stream.OUT, b"half a "),
            (2, Stream.ERR, b"Trace"),
            (3, Stream.OUT, b"line\n"),
            (4, Stream.ERR, b"back\nlast"),
        ],
    )
    assert (tmp_path / "vllm-0.log").read_bytes() == b"half a Traceline\nback\nlast"
    assert shown(tmp_path) == [
        (3, "vllm-0", "OUT", "half a line"),
        (4, "vllm-0", "ERR", "Traceback"),
        (4, "vllm-0", "ERR", "last"),
    ]


def test_lines_of_several_children_come_in_order_of_time(tmp_path):
    write(tmp_path, [(1, Stream.OUT, b"a\n"), (5, Stream.OUT, b"b\n")], child="vllm-0")
    write(tmp_path, [(3, Stream.ERR, b"c\n")], child="trainer")
    write(tmp_path, [(2, Stream.OUT, b"noise\n")], child="log-relay")
    assert children_logged(tmp_path) == ("trainer", "vllm-0")
    assert [text for *_, text in shown(tmp_path)] == ["a", "c", "b"]
    assert [text for *_, text in shown(tmp_path, since_ns=3)] == ["c", "b"]
    assert [text for *_, text in shown(tmp_path, streams=(Stream.ERR,))] == ["c"]
    assert [text for *_, text in shown(tmp_path, child_ids=(CHILD,))] == ["a", "b"]


def test_ranks_are_read_from_the_prefix_of_their_lines(tmp_path):
    text = b"[rank 1] loss 0.5\n[default0]: hello\nplain\n"
    write(tmp_path, [(1, Stream.OUT, text)], child="trainer")
    lines = list(read_lines(LogQuery(directory=tmp_path)))
    assert [line.rank for line in lines] == [1, 0, None]
    assert [text for *_, text in shown(tmp_path, rank=1)] == ["[rank 1] loss 0.5"]


def test_rotated_files_are_read_oldest_first_and_lines_span_the_cut(tmp_path):
    entries = [(k, Stream.OUT, f"{k:03d}-".encode() + b"x" * 60) for k in range(20)]
    write(tmp_path, [*entries, (99, Stream.OUT, b"\n")], max_bytes=200, num_kept=9)
    assert len(list(tmp_path.glob("vllm-0.log.?"))) >= 5
    ((at_ns, _, _, text),) = shown(tmp_path)
    assert at_ns == 99
    assert text == "".join(f"{k:03d}-" + "x" * 60 for k in range(20))


@pytest.mark.parametrize("torn", [0, 5, RECORD.size + 3])
def test_a_torn_or_missing_index_loses_tags_but_no_bytes(tmp_path, torn):
    write(tmp_path, [(1, Stream.ERR, b"one\n"), (2, Stream.ERR, b"two\n")])
    index = tmp_path / f"vllm-0.log{INDEX_SUFFIX}"
    index.write_bytes(index.read_bytes()[:torn])
    assert [text for *_, text in shown(tmp_path)] == ["one", "two"]
    write(tmp_path, [(3, Stream.ERR, b"three\n")])
    assert shown(tmp_path)[-1] == (3, "vllm-0", "ERR", "three")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_following_sees_new_lines_rotations_and_new_children(tmp_path, anyio_backend):
    write(tmp_path, [(1, Stream.OUT, b"old\n")])
    seen = []

    async def follow():
        async for line in follow_lines(LogQuery(directory=tmp_path)):
            seen.append(line.text)  # noqa: PERF401 - looked at meanwhile

    async def wait_for(*texts):
        with anyio.fail_after(5):
            while seen[-len(texts) :] != list(texts):  # noqa: ASYNC110
                await anyio.sleep(0.05)  # noqa: TID251 - real files

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        await anyio.sleep(0.1)  # noqa: TID251
        write(tmp_path, [(2, Stream.OUT, b"new\n")])
        await wait_for("new")
        write(tmp_path, [(3, Stream.OUT, b"before\n"), (4, Stream.OUT, b"x" * 90 + b"\n")])
        await wait_for("before", "x" * 90)
        write(tmp_path, [(5, Stream.OUT, b"after\n")], max_bytes=100)
        await wait_for("after")
        write(tmp_path, [(6, Stream.OUT, b"hello\n")], child="vllm-1")
        await wait_for("hello")
        tasks.cancel_scope.cancel()
    assert "old" not in seen


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_children_that_come_are_followed_when_they_are_of_the_kind(tmp_path, anyio_backend):
    query = LogQuery(directory=tmp_path, is_of_kind=lambda child: child.startswith("trainer"))
    write(tmp_path, [(1, Stream.OUT, b"first\n")], child="trainer")
    async with aclosing(follow_lines(query, with_past=True)) as lines:
        with anyio.fail_after(5):
            assert (await anext(lines)).text == "first"
            write(tmp_path, [(2, Stream.OUT, b"of an engine\n")], child="a-vllm")
            write(tmp_path, [(3, Stream.OUT, b"second\n")], child="trainer-1")
            assert (await anext(lines)).text == "second"


@pytest.mark.anyio
@pytest.mark.parametrize("rotates", [False, True])
async def test_following_goes_on_where_the_past_ended(tmp_path, anyio_backend, rotates):
    """What is written while the past is shown is not lost, and a line of both is one line."""
    write(tmp_path, [(1, Stream.OUT, b"old\n"), (2, Stream.OUT, b"first half, ")])
    seen = []
    async with aclosing(follow_lines(LogQuery(directory=tmp_path), with_past=True)) as lines:
        with anyio.fail_after(5):
            seen.append((await anext(lines)).text)
            more = [(3, Stream.OUT, b"second half\n"), (4, Stream.OUT, b"new\n")]
            write(tmp_path, more, max_bytes=1 if rotates else 1 << 20, num_kept=9)
            seen += [(await anext(lines)).text for _ in range(2)]
    assert seen == ["old", "first half, second half", "new"]


def test_a_log_whose_current_file_is_missing_shows_the_rotated_ones(tmp_path):
    write(tmp_path, [(1, Stream.OUT, b"a\n"), (2, Stream.OUT, b"b\n")], max_bytes=1)
    (tmp_path / "vllm-0.log").unlink()
    assert [text for *_, text in shown(tmp_path, child_ids=(CHILD,))] == ["a"]


def test_no_more_buffers_are_kept_than_a_flood_of_one_child_needs():
    buffers = Buffers()
    taken = [buffers.take() for _ in range(40)]
    for buffer in taken:
        buffers.give_back(Chunk(buffer, READ_BYTES))
    known = {id(buffer) for buffer in taken}
    assert sum(id(buffers.take()) in known for _ in range(40)) == 8


def test_the_ranks_of_a_log_are_told_apart_and_their_lines_kept_whole(tmp_path):
    file = LogFile(str(tmp_path / "trainer.log"), max_bytes=1 << 20, num_kept=3)
    cuts = [(None, b"a"), (0, b"zero "), (1, b"[rank 9] one\n"), (0, b"goes on\n"), (None, b"ll\n")]
    for at_ns, (rank, chunk) in enumerate(cuts):
        file.write(Stream.OUT, chunk, wall_ns=at_ns, rank=rank)
    file.close()
    lines = list(read_lines(LogQuery(directory=tmp_path)))
    assert [(line.rank, line.text) for line in lines] == [
        (1, "[rank 9] one"),
        (0, "zero goes on"),
        (None, "all"),
    ]
    only = list(read_lines(LogQuery(directory=tmp_path, rank=0)))
    assert [line.text for line in only] == ["zero goes on"]


def test_last_lines_say_whose_they_are():
    sink = LogSink(CHILD, BrokenFile(), lambda _report: None)
    for rank, chunk in [(None, b"a\n"), (0, b"zero "), (1, b"[rank 1] one\n"), (0, b"goes on\n")]:
        sink.remember(Stream.ERR, chunk, rank)
    sink.remember(Stream.ERR, b"no end", 1)
    lines = [b"a", b"[rank 1] one", b"[rank 0] zero goes on", b"[rank 1] no end"]
    assert sink.last_lines(9) == lines


@pytest.mark.case("R-B58")
def test_last_words_are_read_though_the_disk_is_behind(tmp_path):
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        relay = Relay(listener)
        relay._attach(Attach(CHILD, str(tmp_path / "vllm-0.log"), 1 << 20, 3), out_read, err_read)
        relay._sink_of[CHILD].add_pending(MAX_PENDING_BYTES)
        os.write(out_write, b"flood\n")
        os.write(err_write, b"traceback\n")
        assert relay._tail(AskTail(1, CHILD, 10)) == ("flood", "traceback")
        os.write(err_write, b"more\n")
        assert relay._tail(AskTail(2, CHILD, 10)) == ("flood", "traceback", "more")
    for fd in (out_write, err_write, out_read, err_read):
        os.close(fd)


@pytest.mark.case("R-B58")
def test_last_words_are_read_to_the_end_when_the_disk_has_caught_up(tmp_path):
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        relay = Relay(listener)
        relay._attach(Attach(CHILD, str(tmp_path / "vllm-0.log"), 1 << 20, 3), out_read, err_read)
        sink = relay._sink_of[CHILD]
        sink.add_pending(MAX_PENDING_BYTES)
        os.write(out_write, b"flood\n")
        relay._read(relay._sources[out_read])
        assert relay._sources[out_read].is_paused
        sink.add_pending(-MAX_PENDING_BYTES)
        for fd in (out_write, err_write):
            os.close(fd)
        assert relay._tail(AskTail(1, CHILD, 10)) == ("flood",)
        assert not relay._sources


class BrokenFile:
    """A disk that refuses while `error` is set, and keeps what it takes."""

    def __init__(self):
        self.error, self.written, self.room = None, b"", None

    def write(self, stream, chunk, *, wall_ns, rank=None):
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        taken = chunk if self.room is None else chunk[: self.room]
        self.written += taken
        return len(taken)

    def reopen(self):
        pass


@pytest.mark.case("R-B58")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EBADF])
def test_a_refusing_disk_is_reported_once_counted_and_said_in_the_file(error, monkeypatch):
    file, reports = BrokenFile(), []
    sink = LogSink(CHILD, file, reports.append)
    file.error = error
    for _ in range(100):
        sink.write(Stream.OUT, b"0123456789", 0)
    assert reports == [SinkFailed(CHILD, os.strerror(error), 10)]
    file.error = None
    sink._retry_at = 0.0
    sink.write(Stream.OUT, b"back\n", 0)
    assert reports[1:] == [SinkRecovered(CHILD, 1000)]
    assert file.written.startswith(b"\n[libra: 1000 bytes of output dropped: ")
    assert file.written.endswith(b"]\nback\n")
    assert sink.last_lines(1) == []


def test_a_disk_that_fills_up_inside_a_chunk_counts_the_rest():
    file, reports = BrokenFile(), []
    sink = LogSink(CHILD, file, reports.append)
    file.room = 4
    sink.write(Stream.OUT, b"0123456789", 0)
    assert reports == [SinkFailed(CHILD, "the disk is full", 6)]


class HangingFile(BrokenFile):
    def __init__(self):
        super().__init__()
        self.goes_on = threading.Event()

    def write(self, stream, chunk, *, wall_ns, rank=None):
        self.goes_on.wait(10)
        return super().write(stream, chunk, wall_ns=wall_ns)


def test_a_hanging_disk_is_noticed_after_a_second_and_a_pausing_reader_is_woken_after_it():
    file, woken = HangingFile(), threading.Event()
    sink = LogSink(CHILD, file, lambda report: None)
    writer = LogWriter(woken.set, Buffers())
    writer.start()
    writer.put(sink, Stream.OUT, Chunk(bytearray(MAX_PENDING_BYTES), MAX_PENDING_BYTES))
    assert sink.is_full
    assert not writer.is_stuck
    sink.is_awaited = True
    threading.Event().wait(1.1)
    assert writer.is_stuck
    file.goes_on.set()
    assert woken.wait(5)
    assert not sink.is_full
    writer.finish(timeout_s=5)
    assert not writer.is_stuck


def test_a_flood_on_stdout_leaves_the_last_words_on_stderr_in_sight():
    sink = LogSink(CHILD, BrokenFile(), lambda report: None)
    sink.remember(Stream.ERR, b"Traceback\nValueError: torn\n")
    for k in range(10_000):
        sink.remember(Stream.OUT, b"progress %d\n" % k)
    lines = sink.last_lines(6)
    assert lines[-2:] == [b"Traceback", b"ValueError: torn"]
    assert lines[:4] == [b"progress %d" % k for k in range(9996, 10_000)]
    sink.forget()
    assert sink.last_lines(6) == []


def test_few_lines_of_each_stream_are_all_shown():
    sink = LogSink(CHILD, BrokenFile(), lambda report: None)
    sink.remember(Stream.OUT, b"a\nb\n")
    sink.remember(Stream.ERR, b"c\nd\ne\n")
    assert sink.last_lines(50) == [b"a", b"b", b"c", b"d", b"e"]
    assert sink.last_lines(4) == [b"a", b"b", b"d", b"e"]


def test_rotation_that_cannot_rename_raises_and_the_file_stays_usable(tmp_path, monkeypatch):
    file = LogFile(str(tmp_path / "a.log"), max_bytes=10, num_kept=1)
    file.write(Stream.OUT, b"0123456789", wall_ns=0)

    def refuse(self, target):
        raise PermissionError(errno.EPERM, "no")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        with pytest.raises(PermissionError):
            file.write(Stream.OUT, b"more", wall_ns=0)
    file.write(Stream.OUT, b"more", wall_ns=0)
    file.close()
    assert (tmp_path / "a.log").read_bytes() == b"more"
    assert (tmp_path / "a.log.1").read_bytes() == b"0123456789"


def test_a_large_read_travels_in_its_buffer_and_the_buffer_is_used_again():
    buffers = Buffers()
    buffer = buffers.take()
    buffer[:6] = b"abcdef"
    small, large = Chunk(buffer, 3), Chunk(buffer, READ_BYTES)
    buffer[0] = ord("x")
    assert small.data == b"abc"
    assert bytes(large.data[:3]) == b"xbc"
    buffers.give_back(small)
    assert buffers.take() is not buffer
    buffers.give_back(large)
    assert buffers.take() is buffer
