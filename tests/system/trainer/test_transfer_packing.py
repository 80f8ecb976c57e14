"""Tensors through buckets: they come out as they went in, and the checksum knows when not."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.transfer.packing import DTYPES, Checksum, buckets_of, packed, unpacked
from libra.wire.instance import TransferTensor

pytestmark = pytest.mark.system

TENSOR = st.tuples(
    st.sampled_from(["F32", "BF16", "F16"]), st.lists(st.integers(0, 7), max_size=3).map(tuple)
)


@given(described=st.lists(TENSOR, max_size=12), bucket_bytes=st.integers(16, 700))
def test_tensors_come_out_of_their_buckets_bit_by_bit(described, bucket_bytes):
    listed = [TransferTensor(f"t{k}", *it) for k, it in enumerate(described)]
    generator = torch.Generator().manual_seed(len(listed))
    sent = [
        torch.randint(0, 256, (prod(t.shape) * DTYPES[t.dtype].itemsize,), generator=generator)
        .to(torch.uint8)
        .view(DTYPES[t.dtype])
        .reshape(t.shape)
        for t in listed
    ]
    named = iter([(t.name, tensor) for t, tensor in zip(listed, sent, strict=True)])
    rest, came = list(listed), {}
    there, back = Checksum(torch.device("cpu")), Checksum(torch.device("cpu"))
    for bucket in buckets_of(listed, bucket_bytes=bucket_bytes):
        count = len(bucket.offsets)
        of_bucket = [next(named) for _ in range(count)]
        buffer = packed(bucket, of_bucket, device=torch.device("cpu"))
        there.add(buffer)
        copy = buffer.clone()
        back.add(copy)
        came |= dict(unpacked(bucket, rest[:count], copy))
        rest = rest[count:]
    assert list(came) == [t.name for t in listed]
    for tensor, found in zip(sent, came.values(), strict=True):
        assert tensor.shape == found.shape
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), found.reshape(-1).view(torch.uint8)
        )
    assert there.value == back.value


def checksum(words: torch.Tensor) -> int:
    summed = Checksum(torch.device("cpu"))
    for bucket in words.split(7):
        summed.add(bucket.view(torch.uint8))
    return int(summed.value)


@given(num_words=st.integers(1, 40), data=st.data())
def test_one_wrong_word_always_changes_the_checksum(num_words, data):
    values = st.integers(-(2**63), 2**63 - 1)
    words = torch.tensor(data.draw(st.lists(values, min_size=num_words, max_size=num_words)))
    k = data.draw(st.integers(0, num_words - 1))
    other = data.draw(values)
    changed = words.clone()
    changed[k] = other
    assert (checksum(changed) == checksum(words)) == (other == int(words[k]))


def test_words_that_changed_places_change_the_checksum():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**62), 2**62, (21,), generator=generator)
    right = checksum(words)
    for i in range(21):
        for k in range(i):
            changed = words.clone()
            changed[i], changed[k] = words[k], words[i]
            assert checksum(changed) != right
