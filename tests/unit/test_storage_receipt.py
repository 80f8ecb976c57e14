import os
import time

import msgspec
import pytest

from libra.errors import DataError
from libra.storage import manifests, receipt
from libra.storage.manifests import names_in, read_manifest, verify_weights
from libra.storage.receipt import SETTLE_S, holds
from weight_dirs import publish_weights


@pytest.fixture(autouse=True)
def a_second_later(monkeypatch):
    """Files were written a second before they are checked."""
    monkeypatch.setattr(receipt.clock, "wall_ns", lambda: time.time_ns() + 10**9)


@pytest.fixture
def version(tmp_path):
    """(directory, names of its files, receipt of its check)."""
    directory, _ = publish_weights(tmp_path, 1)
    manifest, _ = read_manifest(directory)
    return directory, names_in(manifest), verify_weights(directory, manifest)


def rewrite(path):
    """The same bytes again: only reading them all would tell."""
    path.write_bytes(path.read_bytes())


def replace(path):
    partial = path.with_suffix(".new")
    partial.write_bytes(path.read_bytes())
    partial.replace(path)


def flip_and_hide(path):
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_receipt_holds_while_nothing_happens_to_the_files(version):
    directory, names, paid = version
    assert holds(paid, directory, names)
    assert msgspec.json.decode(msgspec.json.encode(paid), type=type(paid)) == paid


@pytest.mark.case("T-B68")
@pytest.mark.parametrize("harm", [rewrite, replace, flip_and_hide, os.remove])
def test_a_receipt_is_void_once_a_file_was_touched_in_any_way(version, harm):
    directory, names, paid = version
    harm(directory / "model.safetensors")
    assert not holds(paid, directory, names)


def test_a_receipt_is_for_one_directory_one_list_of_files_and_one_host(version, tmp_path):
    directory, names, paid = version
    other, _ = publish_weights(tmp_path / "other", 1)
    assert not holds(paid, other, names)
    assert not holds(paid, directory, (*names, "manifest.json"))
    assert not holds(msgspec.structs.replace(paid, kernel="another boot"), directory, names)


def test_files_changed_while_they_are_read_are_not_weights(tmp_path, monkeypatch):
    directory, _ = publish_weights(tmp_path, 1)
    manifest, _ = read_manifest(directory)
    read = manifests.read_content

    def read_and_disturb(path):
        content = read(path)
        rewrite(path)
        return content

    monkeypatch.setattr(manifests, "read_content", read_and_disturb)
    with pytest.raises(DataError, match="was changed while it was checked"):
        verify_weights(directory, manifest)


@pytest.mark.parametrize("age_s", [-60.0, 0.0, SETTLE_S / 2])
def test_no_receipt_is_given_for_files_whose_next_change_might_not_show(
    tmp_path, monkeypatch, age_s
):
    directory, _ = publish_weights(tmp_path, 1)
    manifest, _ = read_manifest(directory)
    newest_ns = max(path.stat().st_ctime_ns for path in directory.glob("*.safetensors"))
    monkeypatch.setattr(receipt.clock, "wall_ns", lambda: newest_ns + int(age_s * 1e9))
    assert verify_weights(directory, manifest) is None
