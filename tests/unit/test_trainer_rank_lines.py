import io
import sys

from hypothesis import given
from hypothesis import strategies as st

from libra.trainer.rank_lines import MOST_HELD_CHARACTERS, RankLines, mark_output
from libra_supervisor.process.log_lines import LineSplitter


class Writes(io.StringIO):
    """Remembers what came in one write."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


def test_a_line_made_of_pieces_goes_out_whole_with_its_prefix():
    out = Writes()
    lines = RankLines(out, 3)
    print("loss", 0.5, file=lines)
    print("a", "b", sep="\n", file=lines)
    assert out.pieces == ["[rank 3] loss 0.5\n", "[rank 3] a\n", "[rank 3] b\n"]


def test_a_flush_shows_an_open_line_and_what_follows_belongs_to_it():
    out = Writes()
    lines = RankLines(out, 0)
    print("loading ...", end="", flush=True, file=lines)
    assert out.getvalue() == "[rank 0] loading ..."
    print(" done", file=lines)
    assert out.getvalue() == "[rank 0] loading ... done\n"


def test_a_progress_bar_keeps_its_prefix_when_it_is_folded():
    out = Writes()
    lines = RankLines(out, 1)
    for percent in (10, 55, 100):
        print(f"\r{percent} %", end="", flush=True, file=lines)
    print(file=lines)
    assert LineSplitter().feed(out.getvalue().encode()) == [b"[rank 1] 100 %"]


def test_a_line_without_end_is_not_held_for_ever():
    out = Writes()
    lines = RankLines(out, 1)
    lines.write("x" * (MOST_HELD_CHARACTERS + 1))
    assert out.getvalue() == "[rank 1] " + "x" * (MOST_HELD_CHARACTERS + 1)


@given(st.lists(st.text(st.sampled_from("ab\n"), max_size=8)))
def test_without_the_prefix_the_text_is_as_it_was(pieces):
    out = Writes()
    lines = RankLines(out, 7)
    for piece in pieces:
        assert lines.write(piece) == len(piece)
    lines.flush()
    printed = out.getvalue()
    assert printed.replace("[rank 7] ", "") == "".join(pieces)
    assert all(not line or line.startswith("[rank 7] ") for line in printed.split("\n"))


def test_both_streams_of_the_process_are_marked(monkeypatch):
    out, err = Writes(), Writes()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    mark_output(2)
    sys.stdout.write("one\n")
    sys.stderr.write("two\n")
    assert (out.getvalue(), err.getvalue()) == ("[rank 2] one\n", "[rank 2] two\n")
