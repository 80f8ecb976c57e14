"""What a reader on another host makes of a shared disk that shows things late, old or not at all.

A disk is a list of sights: what one look after the other finds. Whatever the order, only the
announced version is taken, and it is taken once it is whole.
"""

import errno
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libra import clock
from libra.errors import DataError
from libra.storage import arrival, manifests
from libra.storage.arrival import VISIBLE_WITHIN_S, check_written, until_visible
from libra.storage.checkpoints import read_checkpoint_manifest
from libra.storage.manifests import NotVisibleYetError, verify_announced
from libra.storage.receipt import SETTLE_S, stamps_of
from libra.weights.manifest import MANIFEST_NAME
from weight_dirs import publish_weights, tiny_tensors

SIGHTS = [
    "nothing",
    "no manifest",
    "no weights",
    "end of the weights lacks",
    "the version of an earlier attempt",
    "the manifest of an earlier attempt",
    "stale directory",
    "stale manifest",
    "stale weights",
]
WEIGHTS = "model.safetensors"


class SharedDisk:
    """`directory` as a host sees it; every look takes the next sight, and the last is the truth."""

    def __init__(self, root, sights):
        self.sights = list(sights)
        self.num_looks = 0
        self.older, _ = publish_weights(root / "older", 7, tensors=tiny_tensors(1))
        self.newer, self.announced = publish_weights(root / "newer", 7, tensors=tiny_tensors(2))
        self.directory = root / "seen" / "v000007"
        self.directory.parent.mkdir()

    def look(self):
        self.num_looks += 1
        sight = self.sights.pop(0) if self.sights else "truth"
        shutil.rmtree(self.directory, ignore_errors=True)
        if sight != "nothing":
            self.show(sight)
        with stale_handles(sight.removeprefix("stale ") if "stale" in sight else ""):
            return verify_announced(self.directory, self.announced)

    def show(self, sight):
        is_old = sight == "the version of an earlier attempt"
        # As on a disk: with its times, so that a receipt may be given.
        shutil.copytree(self.older if is_old else self.newer, self.directory)
        weights, manifest = self.directory / WEIGHTS, self.directory / MANIFEST_NAME
        match sight:
            case "no manifest":
                manifest.unlink()
            case "no weights":
                weights.unlink()
            case "end of the weights lacks":
                weights.write_bytes(weights.read_bytes()[:-1])
            case "the manifest of an earlier attempt":
                manifest.write_bytes((self.older / MANIFEST_NAME).read_bytes())


@contextmanager
def stale_handles(what):
    """What NFS says of a file that another one has taken the place of."""
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    read_bytes, iterdir, read_content = Path.read_bytes, Path.iterdir, manifests.read_content

    def read(path):
        if what == "manifest" and path.name == MANIFEST_NAME:
            raise stale
        return read_bytes(path)

    def listed(path):
        if what == "directory":
            raise stale
        return iterdir(path)

    def content(path):
        if what == "weights":
            raise stale
        return read_content(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", read)
        patch.setattr(Path, "iterdir", listed)
        patch.setattr(manifests, "read_content", content)
        yield


@contextmanager
def shared_disk(sights):
    """A second passes from look to look, and files are never too new for a receipt."""
    now = iter(range(1_000))
    wall_ns = clock.wall_ns
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrival, "LOOK_AGAIN_S", 0.0)
        patch.setattr(clock, "monotonic", lambda: next(now))
        patch.setattr(clock, "wall_ns", lambda: wall_ns() + int(2e9 * SETTLE_S))
        yield SharedDisk(Path(root), sights)


@pytest.mark.case("R-B79")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sights=st.lists(st.sampled_from(SIGHTS), max_size=8))
def test_the_announced_version_is_taken_once_it_is_whole_and_never_another(sights):
    with shared_disk(sights) as disk:
        receipt = until_visible(disk.look)
        assert disk.num_looks == len(sights) + 1
        assert receipt is not None
        assert receipt.files == stamps_of(disk.directory, (WEIGHTS,))
        seen, newer = disk.directory / WEIGHTS, disk.newer / WEIGHTS
        assert seen.read_bytes() == newer.read_bytes()


@pytest.mark.case("R-B79")
@pytest.mark.parametrize("sight", SIGHTS)
def test_what_stays_out_of_sight_is_waited_for_within_a_bound_that_the_error_names(sight):
    with shared_disk([sight] * 500) as disk:
        with pytest.raises(NotVisibleYetError, match="still so after 30 s"):
            until_visible(disk.look)
        assert disk.num_looks == VISIBLE_WITHIN_S


def test_what_is_wrong_in_another_way_than_by_lacking_is_wrong_at_once():
    with shared_disk([]) as disk:
        weights = disk.newer / WEIGHTS
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DataError, match="hashes to"):
            until_visible(disk.look)
        assert disk.num_looks == 1


def test_files_of_other_hosts_are_there_when_they_are_as_long_as_was_written(tmp_path):
    directory = tmp_path / "step"
    for bytes_of in ({}, {"a": 2}):
        with pytest.raises(NotVisibleYetError, match="No such file"):
            check_written(directory, bytes_of)
        directory.mkdir(exist_ok=True)
    check_written(directory, {})
    (directory / "a").write_bytes(b"1")
    with pytest.raises(NotVisibleYetError, match="a has 1 bytes instead of 2"):
        check_written(directory, {"a": 2})
    (directory / "a").write_bytes(b"12")
    check_written(directory, {"a": 2})
    (directory / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        check_written(directory / "file", {"b": 0})


def test_a_checkpoint_that_is_not_there_may_still_come(tmp_path):
    with pytest.raises(NotVisibleYetError):
        read_checkpoint_manifest(tmp_path / "step_000001")
