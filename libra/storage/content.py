"""One pass over a file: its hash and, of a safetensors file, the tensors that hold NaN or Inf."""

from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from libra.errors import DataError
from libra.storage.digest import hash_file
from libra.storage.safetensors import read_header

BLOCK_BYTES: Final = 1 << 20
"""Stays in the cache between hashing and looking; a multiple of every dtype's size."""

# A float is NaN or infinite when all bits of its exponent are set: without its sign it is then no
# less than the bits of infinity. Unsigned comparison is several times faster than decoding BF16.
_UNSIGNED: Final[dict[str, tuple[str, int, int]]] = {
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
}
"""By dtype: the integers to read it as, the mask without the sign, infinity. Others are not looked
at: integers have no NaN, and 8-bit floats are not trained in."""


class Content(msgspec.Struct, frozen=True):
    xxh3_128: str
    """Lower-case hex of the whole file."""

    non_finite: tuple[str, ...]
    """Names of tensors, in the file's order; empty for a file that is no safetensors file."""


def read_content(path: Path) -> Content:
    """Read all of `path` once.

    Raises DataError when it ends too early or, for `*.safetensors`, its header is broken.
    """
    if path.suffix != ".safetensors":
        return Content(hash_file(path), ())
    header = read_header(path)
    digest = xxhash.xxh3_128()
    non_finite: list[str] = []
    with path.open("rb") as stream:
        for block in _blocks(stream, header.data_start, path):
            digest.update(block)
        spans = sorted(header.spans.items(), key=lambda item: item[1].data_offsets)
        for name, span in spans:
            is_finite = True
            for block in _blocks(stream, span.num_bytes, path):
                digest.update(block)
                is_finite = is_finite and not _has_non_finite(block, span.dtype)
            if not is_finite:
                non_finite.append(name)
    return Content(digest.hexdigest(), tuple(non_finite))


def _blocks(stream: BufferedReader, num_bytes: int, path: Path) -> Iterator[memoryview]:
    """The next `num_bytes`, in a buffer that the next block overwrites."""
    buffer = memoryview(bytearray(min(num_bytes, BLOCK_BYTES)))
    while num_bytes:
        block = buffer[: min(num_bytes, BLOCK_BYTES)]
        if stream.readinto(block) != len(block):
            raise DataError(f"{path}: became shorter while it was read")
        num_bytes -= len(block)
        yield block


def _has_non_finite(block: memoryview, dtype: str) -> bool:
    if dtype not in _UNSIGNED:
        return False
    unsigned, mask, infinity = _UNSIGNED[dtype]
    values: Any = np.frombuffer(block, unsigned)
    return bool((values & mask).max() >= infinity)
