"""How tensors are put together into buckets, one broadcast each. Pure.

Sender and receiver compute the same plan from the same list, so no plan travels.
"""

from collections.abc import Iterable, Sequence

import msgspec

ALIGNMENT_BYTES = 16
"""Of every tensor in its bucket, and of the bucket's size: any dtype can be viewed in place."""

BUCKET_BYTES = 1 << 27


class Bucket(msgspec.Struct, frozen=True):
    """Consecutive tensors and where each begins, in bytes."""

    offsets: tuple[int, ...]
    num_bytes: int
    """Padding included."""


def plan_buckets(sizes: Sequence[int], *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Put tensors of `sizes` bytes, in this order, into buckets of at most `bucket_bytes`.

    A tensor that is larger than that has a bucket of its own.
    """
    return tuple(_buckets(sizes, bucket_bytes))


def _buckets(sizes: Iterable[int], bucket_bytes: int) -> Iterable[Bucket]:
    offsets: list[int] = []
    end = 0
    for size in sizes:
        padded = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if offsets and end + padded > bucket_bytes:
            yield Bucket(tuple(offsets), end)
            offsets, end = [], 0
        offsets.append(end)
        end += padded
    if offsets:
        yield Bucket(tuple(offsets), end)
