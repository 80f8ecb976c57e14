import msgspec
import pytest

from libra.errors import DataError
from libra.storage.checkpoints import (
    CHECKPOINT_MANIFEST_NAME,
    ROLLOUT_STATE_NAME,
    CheckpointManifest,
    TrainerLayout,
    checkpoint_name,
    list_complete_checkpoints,
    newest_checkpoint,
    read_checkpoint_manifest,
    read_rollout_state,
    verify_checkpoint,
    write_checkpoint_manifest,
)
from libra.storage.digest import file_entry
from libra.storage.manifests import NotVisibleYetError

LAYOUT = TrainerLayout(
    world_size=2, tensor=1, pipeline=1, context=1, expert=1, has_distributed_optimizer=False
)


def save(parent, step, *, named=None, file_format=1):
    directory = parent / checkpoint_name(named or step)
    directory.mkdir(parents=True)
    (directory / "shard").write_bytes(b"weights of %d" % step)
    (directory / ROLLOUT_STATE_NAME).write_bytes(b"state of %d" % step)
    manifest = CheckpointManifest(
        format=file_format,
        step=step,
        num_optimizer_steps=step,
        num_skipped_in_a_row=0,
        architecture_hash="a",
        reference_hash=None,
        layout=LAYOUT,
        files=tuple(file_entry(directory / name) for name in ("shard", ROLLOUT_STATE_NAME)),
    )
    write_checkpoint_manifest(directory, manifest)
    return directory


def steps(parent, **options):
    return [info.step for info in list_complete_checkpoints(parent, **options)]


def test_checkpoints_are_listed_newest_first(tmp_path):
    for step in (2, 10, 1234567, 4):
        save(tmp_path, step)
    assert steps(tmp_path) == [1234567, 10, 4, 2]
    assert all(info.newer_skipped == () for info in list_complete_checkpoints(tmp_path))


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert list_complete_checkpoints(tmp_path / "absent") == []


@pytest.mark.parametrize("lost", ["shard", ROLLOUT_STATE_NAME, CHECKPOINT_MANIFEST_NAME])
@pytest.mark.case("T-B50")
@pytest.mark.case("R-B80")
def test_a_checkpoint_with_a_file_lost_is_passed_over_and_the_reason_is_told(tmp_path, lost):
    save(tmp_path, 1)
    (save(tmp_path, 2) / lost).unlink()
    (newest,) = list_complete_checkpoints(tmp_path)
    assert newest.step == 1
    (reason,) = newest.newer_skipped
    assert "step_000002" in reason
    assert lost in reason or "not complete" in reason


@pytest.mark.case("T-B50")
def test_a_torn_file_is_found_by_its_size_and_a_changed_one_by_its_hash(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "shard").write_bytes(b"torn")
    changed = save(tmp_path, 3) / "shard"
    changed.write_bytes(bytes(reversed(changed.read_bytes())))
    assert steps(tmp_path) == [3, 1]
    assert steps(tmp_path, with_hashes=True) == [1]


@pytest.mark.case("T-B50")
def test_a_run_whose_every_checkpoint_is_damaged_is_not_begun_anew_over_them(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step_000002" / "shard").write_bytes(b"WEIGHTS of 2")
    assert newest_checkpoint(tmp_path).step == 1
    (tmp_path / "step_000001" / CHECKPOINT_MANIFEST_NAME).unlink()
    with pytest.raises(DataError, match="can be used; restore one, or move them away") as raised:
        newest_checkpoint(tmp_path)
    assert "step_000002: shard hashes to" in str(raised.value)
    assert "step_000001/checkpoint.json: No such file" in str(raised.value)


def test_directories_of_other_things_and_of_unfinished_saves_are_not_looked_at(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / ".step_000002.partial")
    (tmp_path / "step_000003").write_text("a file")
    (tmp_path / "notes").mkdir()
    (found,) = list_complete_checkpoints(tmp_path)
    assert (found.step, found.newer_skipped) == (1, ())


def test_a_checkpoint_under_another_step_s_name_is_passed_over(tmp_path):
    save(tmp_path, 5, named=6)
    assert steps(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]"])
def test_a_broken_checkpoint_manifest_is_named(tmp_path, content):
    (save(tmp_path, 1) / CHECKPOINT_MANIFEST_NAME).write_bytes(content)
    with pytest.raises(DataError, match="broken checkpoint manifest"):
        read_checkpoint_manifest(tmp_path / "step_000001")


def test_a_checkpoint_of_a_newer_format_is_passed_over(tmp_path):
    save(tmp_path, 1, file_format=2)
    with pytest.raises(DataError, match="format 2"):
        read_checkpoint_manifest(tmp_path / "step_000001")
    assert steps(tmp_path) == []


def test_the_rollout_state_comes_back_byte_for_byte(tmp_path):
    assert read_rollout_state(save(tmp_path, 7)) == b"state of 7"
    with pytest.raises(DataError, match="rollout_state"):
        read_rollout_state(tmp_path)


def test_a_manifest_survives_being_written_and_read(tmp_path):
    directory = save(tmp_path, 3)
    manifest = read_checkpoint_manifest(directory)
    changed = msgspec.structs.replace(manifest, reference_hash="abc", num_skipped_in_a_row=2)
    write_checkpoint_manifest(directory, changed)
    assert read_checkpoint_manifest(directory) == changed


def test_a_manifest_that_was_edited_is_not_believed(tmp_path):
    save(tmp_path, 80)
    path = save(tmp_path, 81) / CHECKPOINT_MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'steps": 81', b'steps": 82'))
    with pytest.raises(DataError, match=r"checkpoint\.json: was changed: it hashes to"):
        read_checkpoint_manifest(path.parent)
    (found,) = list_complete_checkpoints(tmp_path)
    assert found.step == 80
    assert "was changed" in found.newer_skipped[0]


def test_a_manifest_of_before_it_had_a_hash_is_read(tmp_path):
    directory = save(tmp_path, 1)
    manifest = read_checkpoint_manifest(directory)
    (directory / CHECKPOINT_MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    assert read_checkpoint_manifest(directory) == manifest
    assert steps(tmp_path) == [1]


def test_a_directory_in_place_of_a_file_is_called_no_regular_file(tmp_path):
    shard = save(tmp_path, 1) / "shard"
    shard.write_bytes(bytes(1 << 16))
    manifest = read_checkpoint_manifest(shard.parent)
    files = (file_entry(shard), *manifest.files[1:])
    write_checkpoint_manifest(shard.parent, msgspec.structs.replace(manifest, files=files))
    shard.unlink()
    shard.mkdir()
    with pytest.raises(DataError, match="step_000001: shard is no regular file") as raised:
        verify_checkpoint(shard.parent, read_checkpoint_manifest(shard.parent))
    assert not isinstance(raised.value, NotVisibleYetError)
