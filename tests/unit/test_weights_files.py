import json

import numpy as np
import pytest

from libra.errors import DataError
from libra.storage.safetensors_header import read_header
from libra.storage.weights_files import (
    INDEX_NAME,
    publish,
    read_manifest,
    read_tensors,
    verify_weights,
    write_manifest,
)
from libra.weights.manifest import MANIFEST_NAME
from weight_dirs import publish_weights, tiny_tensors


def verify(directory, **how):
    verify_weights(directory, read_manifest(directory)[0], **how)


def test_what_was_written_reads_back_and_verifies(tmp_path):
    directory, manifest_hash = publish_weights(tmp_path, 3)
    manifest, read_hash = read_manifest(directory)
    assert read_hash == manifest_hash
    assert manifest.policy_version == 3
    assert {t.name: t.shape for t in manifest.tensors}["lm_head.weight"] == (16, 4)
    assert [f.name for f in manifest.files] == ["model.safetensors"]
    verify_weights(directory, manifest)
    assert {t.name for t in read_tensors(directory)} == {t.name for t in manifest.tensors}


def test_two_versions_of_equal_weights_have_different_manifest_hashes(tmp_path):
    tensors = tiny_tensors(0)
    assert (
        publish_weights(tmp_path, 1, tensors=tensors)[1]
        != publish_weights(tmp_path, 2, tensors=tensors)[1]
    )


@pytest.mark.case("R-B79")
def test_a_directory_without_its_manifest_is_not_a_version(tmp_path):
    directory, _ = publish_weights(tmp_path, 1)
    (directory / MANIFEST_NAME).unlink()
    with pytest.raises(DataError, match="not a complete version"):
        read_manifest(directory)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xff", b'{"format": 1}'])
def test_a_torn_manifest_is_refused(tmp_path, content):
    directory, _ = publish_weights(tmp_path, 1)
    (directory / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(DataError, match="not a manifest"):
        read_manifest(directory)


def test_a_manifest_of_another_format_is_refused(tmp_path):
    directory, _ = publish_weights(tmp_path, 1)
    path = directory / MANIFEST_NAME
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(DataError, match="format 2"):
        read_manifest(directory)


def truncate(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip_one_bit(directory):
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def empty(directory):
    (directory / "model.safetensors").write_bytes(b"")


def remove(directory):
    (directory / "model.safetensors").unlink()


def add_a_shard(directory):
    (directory / "stray.safetensors").write_bytes((directory / "model.safetensors").read_bytes())


def add_an_index(directory):
    (directory / INDEX_NAME).write_text('{"weight_map": {}}')


def replace_by_a_link(directory):
    (directory / "model.safetensors").rename(directory.parent / "elsewhere.safetensors")
    (directory / "model.safetensors").symlink_to(directory.parent / "elsewhere.safetensors")


@pytest.mark.case("T-B68")
@pytest.mark.case("R-B80")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "bytes instead of"),
        (flip_one_bit, "other content"),
        (empty, "bytes instead of"),
        (remove, "missing"),
        (add_a_shard, "stray.safetensors is not in the manifest"),
        (add_an_index, "is not in the manifest"),
        (replace_by_a_link, "not a plain file"),
    ],
)
def test_a_damaged_directory_is_refused_with_the_file_named(tmp_path, damage, message):
    directory, _ = publish_weights(tmp_path, 1)
    damage(directory)
    with pytest.raises(DataError, match=message):
        verify(directory)


def test_a_file_name_that_leaves_the_directory_is_refused(tmp_path):
    directory, _ = publish_weights(tmp_path, 1)
    path = directory / MANIFEST_NAME
    path.write_text(path.read_text().replace('"model.safetensors"', '"../v1/model.safetensors"'))
    with pytest.raises(DataError, match="not a plain file name"):
        verify(directory)


def edited_manifest(directory, edit):
    path = directory / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    edit(manifest["tensors"])
    path.write_text(json.dumps(manifest))


@pytest.mark.case("T-B68")
@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors.pop(),
        lambda tensors: tensors[0].update(shape=[4, 16]),
        lambda tensors: tensors[0].update(dtype="BF16"),
        lambda tensors: tensors[0].update(name="model.other"),
        lambda tensors: tensors.append(tensors[0] | {"name": "model.more"}),
    ],
)
def test_tensors_other_than_the_manifests_are_refused(tmp_path, edit):
    directory, _ = publish_weights(tmp_path, 1)
    edited_manifest(directory, edit)
    with pytest.raises(DataError, match="not those of the manifest"):
        verify(directory)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_value_that_is_not_finite_is_found(tmp_path, value, dtype):
    tensors = {"a": np.zeros(1000, dtype), "b": np.ones(3, dtype)}
    tensors["a"][-1] = value
    directory, _ = publish_weights(tmp_path, 1, tensors=tensors)
    with pytest.raises(DataError, match="a holds NaN or infinity"):
        verify(directory)
    verify(directory, check_values=False)


def test_the_largest_finite_values_pass(tmp_path):
    tensors = {d: np.full(4, np.finfo(d).max, d) for d in ("float16", "float32", "float64")}
    verify(publish_weights(tmp_path, 1, tensors=tensors)[0])


def bfloat16_file(path, words):
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [len(words)], "data_offsets": [0, 2 * len(words)]}}
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + np.array(words, "<u2").tobytes())


@pytest.mark.parametrize(("word", "is_finite"), [(0x7F7F, True), (0x7F80, False), (0xFFC0, False)])
def test_bfloat16_is_read_by_its_exponent(tmp_path, word, is_finite):
    directory = tmp_path / "v1"
    directory.mkdir()
    bfloat16_file(directory / "model.safetensors", [0, word, 0x3F80])
    write_manifest(directory, run_id="r", policy_version=1, tied_embeddings=True)
    if is_finite:
        verify(directory)
    else:
        with pytest.raises(DataError, match="NaN or infinity"):
            verify(directory)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "its shape"),
        ({"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, "unknown dtype"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "does not follow"),
        ({"w": {"dtype": "F32", "shape": [1]}}, "header is broken"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, message):
    content = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
    with pytest.raises(DataError, match=message):
        read_header(path)


def test_a_published_version_is_never_overwritten(tmp_path):
    directory, _ = publish_weights(tmp_path, 1)
    publish(directory, tmp_path / "final")
    other, _ = publish_weights(tmp_path, 1)
    with pytest.raises(DataError, match="never overwritten"):
        publish(other, tmp_path / "final")
    verify(tmp_path / "final")


def test_an_index_that_agrees_with_the_manifest_passes_and_another_does_not(tmp_path):
    directory, _ = publish_weights(tmp_path, 1)
    weight_map = {t.name: t.file for t in read_manifest(directory)[0].tensors}
    for names, is_right in ((weight_map, True), ({"lm_head.weight": "model.safetensors"}, False)):
        (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": names}))
        write_manifest(directory, run_id="r", policy_version=1, tied_embeddings=False)
        if is_right:
            verify(directory)
        else:
            with pytest.raises(DataError, match="maps tensors otherwise"):
                verify(directory)
