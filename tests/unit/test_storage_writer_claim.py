"""Which attempt may write into a directory."""

import pytest

from libra.storage.atomic import partial_sibling, publish_directory, sweep_unfinished
from libra.storage.writer_claim import check_claim, claim


def grown(final, writer):
    partial = partial_sibling(final, writer)
    partial.mkdir()
    (partial / "data").write_text(writer)
    return partial


def test_of_two_attempts_the_later_one_writes_and_the_other_can_publish_nothing(tmp_path):
    folder = tmp_path / "checkpoints"
    final = folder / "step_000002"
    claim(folder, "trainer-1")
    check_claim(folder, "trainer-1")
    old = grown(final, "trainer-1")
    claim(folder, "trainer-2")
    new = grown(final, "trainer-2")
    assert old != new
    with pytest.raises(OSError, match=r"a later attempt \(trainer-2\) .* not this one \(tr"):
        check_claim(folder, "trainer-1")
    # It may have looked a moment before.
    with pytest.raises(FileNotFoundError):
        publish_directory(old, final)
    check_claim(folder, "trainer-2")
    publish_directory(new, final)
    assert (final / "data").read_text() == "trainer-2"
    assert sorted(it.name for it in folder.iterdir()) == [".writer", "step_000002"]


def test_where_nobody_has_claimed_anything_everybody_may_write(tmp_path):
    check_claim(tmp_path, "trainer-1")


def test_what_an_attempt_left_is_swept_with_the_other_leftovers(tmp_path):
    left = grown(tmp_path / "step_000002", "trainer-1")
    claim_file = tmp_path / ".writer"
    claim_file.write_text("trainer-1")
    assert sweep_unfinished(tmp_path) == [left]
    assert list(tmp_path.iterdir()) == [claim_file]
