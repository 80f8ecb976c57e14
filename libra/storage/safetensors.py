"""The safetensors format: strict headers, and a writer that streams and hashes as it goes.

Layout: 8 bytes little-endian header length, a JSON header, then the tensors' bytes without gaps.
"""

from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

from libra.errors import DataError
from libra.weights.manifest import FileEntry, TensorEntry

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 << 20
ALIGNMENT_BYTES = 8
METADATA_KEY = "__metadata__"
INDEX_NAME = "model.safetensors.index.json"

BITS_OF_DTYPE = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


class TensorSpan(msgspec.Struct, frozen=True):
    """One tensor of a header: where its bytes lie, counted from the end of the header."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * BITS_OF_DTYPE[self.dtype] // 8


class SafetensorsHeader(msgspec.Struct, frozen=True):
    """A checked header; `data_start` is the offset of the first tensor byte in the file."""

    spans: dict[str, TensorSpan]
    data_start: int


def read_header(path: Path) -> SafetensorsHeader:
    """Read the header of `path`, with every span inside the file, in order and without gaps.

    Raises DataError naming the file and what is wrong with it.
    """
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(LENGTH_BYTES)
            header_bytes = int.from_bytes(prefix, "little")
            if header_bytes > min(MAX_HEADER_BYTES, num_bytes - LENGTH_BYTES):
                raise DataError(f"{path}: not a safetensors file, or a truncated one")
            raw = stream.read(header_bytes)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        objects = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        objects.pop(METADATA_KEY, None)
        spans = {
            name: msgspec.json.decode(value, type=TensorSpan) for name, value in objects.items()
        }
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DataError(f"{path}: broken safetensors header: {error}") from error
    _check_spans(path, spans, num_data_bytes=num_bytes - LENGTH_BYTES - header_bytes)
    return SafetensorsHeader(spans, LENGTH_BYTES + header_bytes)


def _check_spans(path: Path, spans: dict[str, TensorSpan], *, num_data_bytes: int) -> None:
    end = 0
    for name, span in sorted(spans.items(), key=lambda item: item[1].data_offsets):
        if span.dtype not in BITS_OF_DTYPE:
            raise DataError(f"{path}: tensor {name} has the unknown dtype {span.dtype}")
        if span.data_offsets != (end, end + span.num_bytes):
            raise DataError(
                f"{path}: tensor {name} lies at {span.data_offsets}, but its {span.num_bytes} "
                f"bytes should start at {end}"
            )
        end += span.num_bytes
    if end != num_data_bytes:
        raise DataError(
            f"{path}: holds {num_data_bytes} bytes of tensors where its header names {end}; "
            "the file is truncated or has something appended"
        )


def model_tensors(directory: Path) -> list[TensorEntry]:
    """Every tensor in the safetensors files of a model directory, ordered by name.

    Raises DataError for a directory without such files, a tensor that is in two files, or an
    index that disagrees with the files.
    """
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise DataError(
            f"{directory}: no *.safetensors file; model_path must name a directory in "
            "Hugging Face format with safetensors weights"
        )
    tensors: dict[str, TensorEntry] = {}
    for path in paths:
        for name, span in read_header(path).spans.items():
            if name in tensors:
                raise DataError(
                    f"{directory}: tensor {name} is in {tensors[name].file} and in {path.name}"
                )
            tensors[name] = TensorEntry(
                name=name, dtype=span.dtype, shape=span.shape, file=path.name
            )
    _check_index(directory, tensors)
    return [tensors[name] for name in sorted(tensors)]


def _check_index(directory: Path, tensors: dict[str, TensorEntry]) -> None:
    path = directory / INDEX_NAME
    if not path.exists():
        return
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: broken index: {error}") from error
    found = {name: tensor.file for name, tensor in tensors.items()}
    if index.weight_map != found:
        wrong = min(set(index.weight_map.items()) ^ set(found.items()))[0]
        raise DataError(
            f"{path}: the index and the files disagree, first at tensor {wrong} "
            f"(index: {index.weight_map.get(wrong)}, files: {found.get(wrong)})"
        )


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def write_index(directory: Path, tensors: Sequence[TensorEntry]) -> None:
    """`model.safetensors.index.json` for a model that is split over several files."""
    total = sum(prod(tensor.shape) * BITS_OF_DTYPE[tensor.dtype] // 8 for tensor in tensors)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {tensor.name: tensor.file for tensor in tensors},
    }
    (directory / INDEX_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(index)))


def write_safetensors(
    path: Path, tensors: Sequence[TensorEntry], contents: Iterable[memoryview]
) -> FileEntry:
    """Write `tensors` in order, taking each one's bytes (little-endian) from `contents`.

    Only one tensor needs to be in memory at a time; the file is hashed while it is written.
    Raises DataError when a tensor's bytes do not fit its dtype and shape.
    """
    header, end = {METADATA_KEY: {"format": "pt"}}, 0
    spans: list[TensorSpan] = []
    for tensor in tensors:
        start, end = end, end + prod(tensor.shape) * BITS_OF_DTYPE[tensor.dtype] // 8
        spans.append(TensorSpan(tensor.dtype, tensor.shape, (start, end)))
    encoded = msgspec.json.encode(
        header | {tensor.name: span for tensor, span in zip(tensors, spans, strict=True)}
    )
    # Padded with spaces so that the first tensor is aligned for readers that map the file.
    encoded += b" " * (-len(encoded) % ALIGNMENT_BYTES)
    digest, written = xxhash.xxh3_128(), 0
    with path.open("wb") as stream:
        for block in (len(encoded).to_bytes(LENGTH_BYTES, "little"), encoded):
            digest.update(block)
            written += stream.write(block)
        for tensor, span, content in zip(tensors, spans, contents, strict=True):
            if content.nbytes != span.num_bytes:
                raise DataError(
                    f"{path}: tensor {tensor.name} came with {content.nbytes} bytes "
                    f"instead of {span.num_bytes}"
                )
            digest.update(content)
            written += stream.write(content)
    return FileEntry(name=path.name, num_bytes=written, xxh3_128=digest.hexdigest())
