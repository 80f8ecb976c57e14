import os
from functools import partial

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from libra.errors import DataError
from libra.ids import PolicyVersion, RunId
from libra.storage.content import BLOCK_BYTES, Content, read_content
from libra.storage.digest import file_entry, hash_bytes, hash_file
from libra.storage.manifests import read_manifest, verify_weights, write_manifest
from libra.storage.safetensors import (
    INDEX_NAME,
    model_tensors,
    read_header,
    write_index,
    write_safetensors,
)
from libra.weights.manifest import MANIFEST_NAME, TensorEntry, WeightsManifest
from weight_dirs import publish_weights

VALUES = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.weight": np.array([1.5, -2.0], dtype=np.float16),
    "c.weight": np.zeros((0, 4), dtype=np.float32),
}
DTYPES = {"float32": "F32", "float16": "F16"}


def entries(values, file="model.safetensors"):
    return [
        TensorEntry(name=name, dtype=DTYPES[v.dtype.name], shape=v.shape, file=file)
        for name, v in values.items()
    ]


def write_model(directory, values=VALUES, file="model.safetensors"):
    contents = [
        memoryview(np.ascontiguousarray(v).reshape(-1).view(np.uint8)) for v in values.values()
    ]
    return write_safetensors(directory / file, entries(values, file), contents)


def published(directory, values=VALUES):
    written = write_model(directory, values)
    (directory / "config.json").write_text("{}")
    manifest = WeightsManifest(
        format=1,
        run_id=RunId("r"),
        policy_version=PolicyVersion(3),
        tied_embeddings=False,
        files=(written, file_entry(directory / "config.json")),
        tensors=tuple(model_tensors(directory)),
    )
    write_manifest(directory, manifest)
    return read_manifest(directory)[0]


def test_what_is_written_is_read_by_the_safetensors_library(tmp_path):
    written = write_model(tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == VALUES.keys()
    for name, value in VALUES.items():
        np.testing.assert_array_equal(loaded[name], value)
    assert written == file_entry(tmp_path / "model.safetensors")
    assert model_tensors(tmp_path) == entries(VALUES)


def test_bytes_that_do_not_fit_the_shape_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.weight came with 4 bytes instead of 24"):
        write_safetensors(tmp_path / "x", entries(VALUES)[:1], [memoryview(b"1234")])


def test_a_model_split_over_files_has_an_index_that_agrees(tmp_path):
    halves = {"a.weight": VALUES["a.weight"]}, {"b.weight": VALUES["b.weight"]}
    tensors = []
    for number, half in enumerate(halves):
        write_model(tmp_path, half, f"model-{number}.safetensors")
        tensors += entries(half, f"model-{number}.safetensors")
    write_index(tmp_path, tensors)
    assert model_tensors(tmp_path) == tensors
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(DataError, match=r"disagree, first at tensor b\.weight"):
        model_tensors(tmp_path)


def test_the_same_tensor_in_two_files_is_refused(tmp_path):
    write_model(tmp_path)
    write_model(tmp_path, file="other.safetensors")
    with pytest.raises(DataError, match=r"a\.weight is in model\.safetensors and in other"):
        model_tensors(tmp_path)


def test_a_directory_without_safetensors_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no \*\.safetensors file"):
        model_tensors(tmp_path)


def test_published_weights_verify_and_their_manifest_hash_is_of_its_bytes(tmp_path):
    manifest = published(tmp_path)
    verify_weights(tmp_path, manifest)
    assert read_manifest(tmp_path)[1] == hash_bytes((tmp_path / MANIFEST_NAME).read_bytes())


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


DAMAGES = {
    "missing": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
    "truncated": (lambda d: os.truncate(d / "model.safetensors", 100), "bytes instead of"),
    "flipped": (lambda d: flip_last_byte(d / "model.safetensors"), "hashes to"),
    "config": (lambda d: (d / "config.json").write_text("[]"), "config.json hashes to"),
    "extra": (lambda d: (d / "extra.bin").write_text(""), "extra.bin is there but not"),
    "extra shard": (
        lambda d: write_model(d, {"z": VALUES["a.weight"]}, "z.safetensors"),
        "z.safetensors is there but not",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.case("T-B68")
def test_any_damage_to_published_weights_is_found_and_named(tmp_path, damage):
    manifest = published(tmp_path)
    harm, message = DAMAGES[damage]
    harm(tmp_path)
    with pytest.raises(DataError, match=message):
        verify_weights(tmp_path, manifest)


@pytest.mark.parametrize("change", [{"name": "q"}, {"dtype": "BF16"}, {"shape": (3, 2)}])
@pytest.mark.case("T-B68")
def test_a_tensor_list_that_differs_from_the_files_is_refused(tmp_path, change):
    manifest = published(tmp_path)
    first, *rest = manifest.tensors
    changed = msgspec.structs.replace(
        manifest, tensors=(msgspec.structs.replace(first, **change), *rest)
    )
    with pytest.raises(DataError, match=r"tensor (a\.weight|q)"):
        verify_weights(tmp_path, changed)


@pytest.mark.parametrize("name", ["../model.safetensors", "a/b", "manifest.json"])
def test_a_manifest_cannot_name_a_file_outside_its_directory(tmp_path, name):
    manifest = published(tmp_path)
    bad = msgspec.structs.replace(manifest.files[0], name=name)
    with pytest.raises(DataError, match="lists the file name"):
        verify_weights(tmp_path, msgspec.structs.replace(manifest, files=(bad,)))


def test_a_file_listed_twice_is_refused(tmp_path):
    manifest = published(tmp_path)
    doubled = msgspec.structs.replace(manifest, files=manifest.files + manifest.files[:1])
    with pytest.raises(DataError, match="lists a file twice"):
        verify_weights(tmp_path, doubled)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_value_that_is_not_finite_is_found_by_tensor(tmp_path, bad, dtype):
    value = np.array([1.0, bad, 2.0], dtype=dtype)
    manifest = published(tmp_path, {"ok": VALUES["a.weight"], "bad": value})
    with pytest.raises(DataError, match="NaN or Inf in bad"):
        verify_weights(tmp_path, manifest)


@pytest.mark.parametrize(("bits", "is_bad"), [(0x3F80, False), (0x7F80, True), (0xFFC1, True)])
def test_bfloat16_is_looked_at_bit_by_bit(tmp_path, bits, is_bad):
    tensor = TensorEntry(name="w", dtype="BF16", shape=(2,), file="m.safetensors")
    content = np.array([0x4000, bits], dtype="<u2")
    write_safetensors(tmp_path / "m.safetensors", [tensor], [memoryview(content.view(np.uint8))])
    assert read_content(tmp_path / "m.safetensors").non_finite == (("w",) if is_bad else ())


@pytest.mark.parametrize("at", [0, BLOCK_BYTES // 4 - 1, BLOCK_BYTES // 4, -1])
def test_a_tensor_of_many_blocks_is_read_to_its_last_value(tmp_path, at):
    values = np.linspace(-1, 1, BLOCK_BYTES // 4 + 77, dtype=np.float32)
    largest = np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max], np.float32)
    path = tmp_path / "model.safetensors"
    write_model(tmp_path, {"a": largest, "b": values})
    assert read_content(path) == Content(hash_file(path), ())
    values[at] = np.nan
    write_model(tmp_path, {"a": largest, "b": values})
    assert read_content(path) == Content(hash_file(path), ("b",))


BROKEN_HEADERS = {
    "empty file": b"",
    "short": b"\x05\x00",
    "length beyond the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "not json": (2).to_bytes(8, "little") + b"{]",
    "unknown dtype": None,
}


@pytest.mark.parametrize("content", [c for c in BROKEN_HEADERS.values() if c is not None])
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.safetensors"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ({"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}, "unknown dtype"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "should start at 0"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "its 8 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "holds 4 bytes"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "broken safetensors header"),
    ],
)
def test_a_header_that_does_not_fit_its_bytes_is_refused(tmp_path, span, message):
    header = msgspec.json.encode({"w": span})
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(DataError, match=message):
        read_header(tmp_path / "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "not complete"), (b"{", "broken manifest"), (b"{}", "broken manifest")],
)
def test_weights_without_a_usable_manifest_are_not_complete(tmp_path, content, message):
    if content is not None:
        (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_manifest(tmp_path)


def test_a_manifest_of_another_format_is_refused(tmp_path):
    manifest = published(tmp_path)
    write_manifest(tmp_path, msgspec.structs.replace(manifest, format=2))
    with pytest.raises(DataError, match="format 2"):
        read_manifest(tmp_path)


def test_an_index_that_is_no_index_is_refused(tmp_path):
    write_model(tmp_path)
    (tmp_path / INDEX_NAME).write_text("[]")
    with pytest.raises(DataError, match="broken index"):
        model_tensors(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [MANIFEST_NAME, "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path, name):
    directory, _ = publish_weights(tmp_path, 1)
    manifest, _ = read_manifest(directory)
    if name != MANIFEST_NAME:
        # Nothing is lacking in a pipe of which nothing is wanted.
        files = tuple(msgspec.structs.replace(it, num_bytes=0) for it in manifest.files)
        manifest = msgspec.structs.replace(manifest, files=files)
    (directory / name).unlink()
    os.mkfifo(directory / name)
    check = read_manifest if name == MANIFEST_NAME else partial(verify_weights, manifest=manifest)
    with pytest.raises(DataError, match="is no regular file"):
        check(directory)


def test_a_header_that_is_nested_without_end_is_broken(tmp_path):
    raw = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(DataError, match="broken safetensors header"):
        read_header(path)
