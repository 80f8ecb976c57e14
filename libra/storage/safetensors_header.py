"""The header of a safetensors file, checked against the file's size.

The format: 8 bytes little-endian header length, a JSON object, then the tensors without gaps.
"""

import math
from pathlib import Path

import msgspec

from libra.errors import DataError

LENGTH_BYTES = 8
MIN_HEADER_BYTES = len("{}")
MAX_HEADER_BYTES = 100 * 2**20
BYTES_OF_DTYPE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


class TensorSpan(msgspec.Struct, frozen=True):
    """One tensor of a file. `start` and `end` are byte offsets from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _HeaderEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> tuple[TensorSpan, ...]:
    """Tensors in the order of their bytes. Raises DataError on anything but a whole file."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not MIN_HEADER_BYTES <= length <= min(MAX_HEADER_BYTES, num_bytes - LENGTH_BYTES):
                raise DataError(f"{path}: not a whole safetensors file (header length {length})")
            header = file.read(length)
    except OSError as exc:
        raise DataError(f"{path}: cannot be read: {exc.strerror}") from exc
    spans = _spans(path, header, LENGTH_BYTES + length)
    if (spans[-1].end if spans else LENGTH_BYTES + length) != num_bytes:
        raise DataError(f"{path}: the header describes another length than {num_bytes} bytes")
    return spans


def _spans(path: Path, header: bytes, data_start: int) -> tuple[TensorSpan, ...]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(value, type=_HeaderEntry)
            for name, value in raw.items()
            if name != "__metadata__"
        }
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise DataError(f"{path}: the safetensors header is broken: {exc}") from exc
    spans: list[TensorSpan] = []
    expected_start = data_start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = (data_start + offset for offset in entry.data_offsets)
        _check_extent(path, name, entry)
        if start != expected_start:
            raise DataError(f"{path}: {name} does not follow the tensor before it")
        spans.append(TensorSpan(name, entry.dtype, entry.shape, start, end))
        expected_start = end
    return tuple(spans)


def _check_extent(path: Path, name: str, entry: _HeaderEntry) -> None:
    if entry.dtype not in BYTES_OF_DTYPE:
        raise DataError(f"{path}: {name} has the unknown dtype {entry.dtype}")
    begin, end = entry.data_offsets
    if end - begin != math.prod(entry.shape) * BYTES_OF_DTYPE[entry.dtype]:
        raise DataError(f"{path}: {name} has {end - begin} bytes, not what its shape says")
