"""Finding NaN and Inf in safetensors files, block by block, without torch."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from libra.storage.safetensors import read_header

BLOCK_BYTES = 16 << 20
BF16_EXPONENT = 0x7F80
_NUMPY_OF_DTYPE: dict[str, str] = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2"}
"""The dtypes that are checked; bfloat16 by its bits, since numpy has no such type."""


def find_non_finite(path: Path) -> list[str]:
    """Names of the tensors of `path` that hold a NaN or an infinity, in the file's order.

    Raises DataError when the header is broken. Integer and 8-bit tensors are not looked at.
    """
    header = read_header(path)
    found: list[str] = []
    with path.open("rb") as stream:
        for name, span in sorted(header.spans.items(), key=lambda item: item[1].data_offsets):
            if span.dtype not in _NUMPY_OF_DTYPE:
                continue
            stream.seek(header.data_start + span.data_offsets[0])
            remaining = span.num_bytes
            while remaining:
                block = stream.read(min(BLOCK_BYTES, remaining))
                remaining -= len(block)
                if _has_non_finite(np.frombuffer(block, _NUMPY_OF_DTYPE[span.dtype]), span.dtype):
                    found.append(name)
                    break
    return found


def _has_non_finite(values: NDArray[np.generic], dtype: str) -> bool:
    if dtype == "BF16":
        bits = values.astype(np.uint16)
        return bool(((bits & BF16_EXPONENT) == BF16_EXPONENT).any())
    return not bool(np.isfinite(values).all())
