import os
from pathlib import Path

import pytest

from libra.errors import SiteError
from libra.storage.atomic import (
    atomic_write,
    discard_directory,
    growing_directory,
    partial_sibling,
    publish_directory,
    sweep_unfinished,
    write_record,
)


def test_a_write_replaces_the_whole_file_with_the_mode_asked_for(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("a much longer old content")
    atomic_write(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        atomic_write(path, "text")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_record_that_a_full_disk_refuses_is_the_machines_fault_and_the_old_one_stays(tmp_path):
    path = tmp_path / "plan.json"
    write_record(path, b"old")
    partial_sibling(path).symlink_to("/dev/full")
    with pytest.raises(SiteError, match=rf"cannot write {path}: No space left on device"):
        write_record(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_directory_appears_with_all_its_files(tmp_path):
    with growing_directory(tmp_path / "v1") as partial:
        (partial / "a").write_text("1")
        (partial / "sub").mkdir()
        (partial / "sub" / "b").write_text("2")
        assert not (tmp_path / "v1").exists()
    assert (tmp_path / "v1" / "sub" / "b").read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["v1"]


@pytest.mark.parametrize("is_durable", [True, False])
def test_a_directory_is_forced_to_the_disk_where_it_is_to_outlast_a_power_cut(
    tmp_path, monkeypatch, is_durable
):
    forced = []

    def noted(descriptor):
        forced.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", noted)
    with growing_directory(tmp_path / "v1", is_durable=is_durable) as partial:
        (partial / "a").write_text("1")
    assert forced == ([partial / "a", partial, tmp_path] if is_durable else [])


def write_half_and_fail(final):
    with growing_directory(final) as partial:
        (partial / "a").write_text("1")
        raise OSError(28, "No space left on device")


@pytest.mark.case("T-B50")
def test_a_writer_that_fails_half_way_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="No space"):
        write_half_and_fail(tmp_path / "v1")
    assert list(tmp_path.iterdir()) == []


def test_what_an_interrupted_writer_left_is_replaced(tmp_path):
    leftover = partial_sibling(tmp_path / "v1")
    leftover.mkdir()
    (leftover / "old").write_text("")
    with growing_directory(tmp_path / "v1") as partial:
        (partial / "new").write_text("")
    assert [p.name for p in (tmp_path / "v1").iterdir()] == ["new"]


def test_a_published_directory_is_never_replaced(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / ".v1.partial").mkdir()
    with pytest.raises(FileExistsError, match="v1 exists already"):
        publish_directory(tmp_path / ".v1.partial", tmp_path / "v1")
    with (
        pytest.raises(FileExistsError, match="v1 exists already"),
        growing_directory(tmp_path / "v1"),
    ):
        pass


def test_discarding_takes_the_name_away_before_the_content(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "a").write_text("")
    (tmp_path / ".v1.discarded").mkdir()
    discard_directory(tmp_path / "v1")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_deleted_has_lost_its_name_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "a").write_text("")
    monkeypatch.setattr(os, "unlink", refuse)
    left = discard_directory(tmp_path / "v1")
    assert left == tmp_path / ".v1.discarded"
    assert list(tmp_path.iterdir()) == [left]
    (tmp_path / ".c.partial").write_text("")
    assert sweep_unfinished(tmp_path) == [tmp_path / ".c.partial", left]
    assert left.exists()


def refuse(*_, **__):
    raise PermissionError(1, "it is held")


def test_the_sweep_removes_only_unfinished_things(tmp_path):
    for name in (".a.partial", ".b.discarded", ".keep", "c.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / ".d.partial").write_text("")
    assert [p.name for p in sweep_unfinished(tmp_path)] == [
        ".a.partial",
        ".b.discarded",
        ".d.partial",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".keep", "c.partial"]
