"""Tensors in buckets of bytes, and the sum that proves that they came through."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

from libra.weights.buckets import Bucket, plan_buckets
from libra.wire.instance import TransferTensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
WORDS_AT_ONCE = 1 << 22
"""Of the checksum, which needs twice their 8 bytes beside the bucket."""

_ODD = 0x5851F42D4C957F2D

if sys.byteorder != "little":
    raise ImportError("weight transfer is written for little-endian machines")


def buckets_of(tensors: Sequence[TransferTensor], *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Plan the buckets of `tensors`, the same at every member."""
    sizes = [prod(tensor.shape) * DTYPES[tensor.dtype].itemsize for tensor in tensors]
    return plan_buckets(sizes, bucket_bytes=bucket_bytes)


def packed(
    bucket: Bucket, tensors: Iterable[tuple[str, torch.Tensor]], *, device: torch.device
) -> torch.Tensor:
    """Copy the bucket's tensors into uint8[num_bytes] on `device`; takes one for each offset."""
    buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=device)
    for offset, (_, tensor) in zip(bucket.offsets, tensors, strict=True):
        num_bytes = tensor.numel() * tensor.element_size()
        buffer[offset : offset + num_bytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return buffer


def unpacked(
    bucket: Bucket, tensors: Sequence[TransferTensor], buffer: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor, sharing the memory of uint8[num_bytes]."""
    for offset, tensor in zip(bucket.offsets, tensors, strict=True):
        dtype = DTYPES[tensor.dtype]
        num_bytes = prod(tensor.shape) * dtype.itemsize
        yield tensor.name, buffer[offset : offset + num_bytes].view(dtype).reshape(tensor.shape)


class Checksum:
    """A sum over buckets in 64-bit integers, the same on every device.

    Each word is multiplied by an odd number of its own, so that one wrong word always shows; words
    that changed places show but for a chance of 2^-63 or so.
    """

    def __init__(self, device: torch.device) -> None:
        self._factors = torch.arange(0, dtype=torch.int64, device=device)
        self._total = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, buffer: torch.Tensor) -> None:
        """Take in uint8[n], n a multiple of 8."""
        for words in torch.split(buffer.view(torch.int64), WORDS_AT_ONCE):
            if len(self._factors) < len(words):
                count = torch.arange(len(words), dtype=torch.int64, device=words.device)
                self._factors = (2 * count + 1) * _ODD
            self._total = self._total * _ODD + (words * self._factors[: len(words)]).sum()

    @property
    def value(self) -> torch.Tensor:
        """int64[1]."""
        return self._total.reshape(1)


def checksum_text(value: torch.Tensor) -> str:
    """16 hexadecimal digits of int64[1]."""
    return format(int(value.item()) & (2**64 - 1), "016x")
