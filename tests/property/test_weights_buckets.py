"""Which tensor lies where in which bucket, whatever the sizes."""

from hypothesis import given
from hypothesis import strategies as st

from libra.weights.buckets import ALIGNMENT_BYTES, plan_buckets

SIZES = st.lists(st.integers(0, 300), max_size=20)


@given(sizes=SIZES, bucket_bytes=st.integers(16, 400))
def test_every_tensor_lies_once_aligned_and_apart_in_buckets_of_bounded_size(sizes, bucket_bytes):
    plan = plan_buckets(sizes, bucket_bytes=bucket_bytes)
    assert sum(len(bucket.offsets) for bucket in plan) == len(sizes)
    rest = iter(sizes)
    for bucket in plan:
        assert bucket.num_bytes % ALIGNMENT_BYTES == 0
        assert bucket.num_bytes <= bucket_bytes or len(bucket.offsets) == 1
        end = 0
        for offset in bucket.offsets:
            assert offset >= end
            assert offset % ALIGNMENT_BYTES == 0
            end = offset + next(rest)
        assert end <= bucket.num_bytes


@given(sizes=SIZES, bucket_bytes=st.integers(16, 400))
def test_a_bucket_is_closed_only_when_the_next_tensor_would_not_fit(sizes, bucket_bytes):
    plan = plan_buckets(sizes, bucket_bytes=bucket_bytes)
    firsts = []
    seen = 0
    for bucket in plan:
        firsts.append(seen)
        seen += len(bucket.offsets)
    for bucket, first in zip(plan[:-1], firsts[1:], strict=True):
        padded = -(-sizes[first] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        assert bucket.num_bytes + padded > bucket_bytes
