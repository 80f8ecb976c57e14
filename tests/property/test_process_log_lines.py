from hypothesis import given, settings
from hypothesis import strategies as st

from libra_supervisor.process.log_lines import MAX_LINE_BYTES, LineSplitter, shown

texts = st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"")))


def fed(stream, cuts):
    splitter, lines, at = LineSplitter(), [], 0
    for cut in [*cuts, len(stream)]:
        lines += splitter.feed(stream[at : at + cut])
        at = min(len(stream), at + cut)
    lines += splitter.feed(stream[at:])
    return lines + splitter.flush()


@given(lines=texts, cuts=st.lists(st.integers(0, 50)))
def test_lines_are_the_same_however_the_stream_is_cut(lines, cuts):
    stream = b"".join(line + b"\n" for line in lines)
    assert fed(stream, cuts) == lines


@given(parts=st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"")), min_size=1))
def test_of_a_progress_bar_the_last_part_that_shows_is_kept(parts):
    line = b"\r".join(parts)
    expected = line.rstrip(b"\r").split(b"\r")[-1]
    assert fed(line + b"\n", [3, 1, 4]) == [expected]


@given(extra=st.integers(1, 200_000), cut=st.integers(1, 100_000))
def test_a_long_line_is_cut_at_the_cap_with_a_mark_and_the_next_one_is_whole(extra, cut):
    stream = b"x" * (MAX_LINE_BYTES + extra) + b"\nnext\n"
    long, after = fed(stream, [cut])
    assert long == b"x" * MAX_LINE_BYTES + b" [libra: line cut at 64 KiB]"
    assert after == b"next"


@settings(deadline=None)
@given(cut=st.integers(1, 100_000))
def test_hours_of_a_progress_bar_take_no_more_than_the_cap(cut):
    splitter = LineSplitter()
    for _ in range(20):
        splitter.feed((b"\r%4d it/s" * (1 + cut // 11))[:cut])
        assert len(splitter._partial) <= MAX_LINE_BYTES


@given(line=st.binary())
def test_any_bytes_can_be_shown(line):
    assert shown(line).encode("utf-8").decode("utf-8") == shown(line)
