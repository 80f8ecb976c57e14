"""Sum, norm and copy of a gradient in one pass over it, a cache-sized block at a time."""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]

BLOCK_VALUES: Final = 1 << 16
_ROWS: Final = 64
_COLUMNS: Final = 512
_ROW_VALUES: Final = 1024
_WORD_BYTES: Final = 8
_ODD: Final = 0x5851F42D4C957F2D
_GOLDEN: Final = 0x9E3779B97F4A7C15
_WORDS: Final = 2**64
_PLACES: Final = np.arange(1, _ROWS + _COLUMNS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
"""Added before mixing, so that equal sums in two places are not the same."""


class Measured(NamedTuple):
    """What one pass over some values finds."""

    checksum: int
    square_sum: float
    """Sum of squares in double precision; not finite exactly when one of the values is not."""


def blocks(values: Floats) -> Iterator[Floats]:
    """The parts of float32[n] that are looked at one after another."""
    for start in range(0, len(values), BLOCK_VALUES):
        yield values[start : start + BLOCK_VALUES]


def checksum(values: Floats) -> int:
    """64 bits over the bytes of float32[n]; another order of the values gives another sum."""
    total = 0
    for block in blocks(values):
        total = _next(total, block)
    return total


def measured(values: Floats, *, arrive: Callable[[Floats], None]) -> Measured:
    """Checksum and square sum of float32[n], block by block, each after `arrive` has filled it."""
    total, squares = 0, 0.0
    for block in blocks(values):
        arrive(block)
        total = _next(total, block)
        squares += _square_sum(block)
    return Measured(total, squares)


def copied_checksum(values: Floats, into: Floats) -> int:
    """Copy float32[n]; returns the checksum of the copy."""
    total = 0
    for block, target in zip(blocks(values), blocks(into), strict=True):
        np.copyto(target, block)
        total = _next(total, target)
    return total


def _square_sum(block: Floats) -> float:
    # In short rows, so that the sums are exact enough, and not by BLAS, which would start threads
    # that compete with the trainer's.
    whole = block[: len(block) // _ROW_VALUES * _ROW_VALUES].reshape(-1, _ROW_VALUES)
    rest = block[whole.size :]
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.einsum("ij,ij->i", whole, whole).sum(dtype=np.float64)
        found += np.einsum("i,i->", rest, rest)
    if np.isfinite(found):
        return float(found)
    # Squares of large values do not fit into float32, which does not make them infinite.
    wide = block.astype(np.float64)
    return float(np.einsum("i,i->", wide, wide))


def _next(total: int, block: Floats) -> int:
    words = _words(block)
    # Rows and columns apart: a word that changes shows in both, two that change places in one.
    sums = np.concatenate([words.sum(axis=0, dtype=np.uint64), words.sum(axis=1, dtype=np.uint64)])
    return (total * _ODD + _mixed(sums + _PLACES[: len(sums)])) % _WORDS


def _mixed(sums: NDArray[np.uint64]) -> int:
    """One number of many. Not linear, or the highest bits of two sums would cancel out."""
    sums ^= sums >> np.uint64(32)
    sums *= np.uint64(_ODD)
    sums ^= sums >> np.uint64(29)
    sums *= np.uint64(_GOLDEN)
    sums ^= sums >> np.uint64(32)
    return int(sums.sum(dtype=np.uint64))


def _words(block: Floats) -> NDArray[np.uint64]:
    """The block's bytes as uint64[rows, columns], filled with zeros to whole rows."""
    row_bytes = _COLUMNS * _WORD_BYTES
    if block.nbytes % row_bytes:
        padded: NDArray[Any] = np.zeros(-(-block.nbytes // row_bytes) * row_bytes, np.uint8)
        padded[: block.nbytes] = block.view(np.uint8)
        return padded.view(np.uint64).reshape(-1, _COLUMNS)
    return block.view(np.uint64).reshape(-1, _COLUMNS)
