"""The codec of lane frames: what it writes it reads, and nothing else."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import PeerError
from libra.hybrid.checksum import blocks, checksum, copied_checksum, measured
from libra.hybrid.fault import Ballot, Fault, value_fault, verdicts, votes
from libra.hybrid.header import (
    HEADER_BYTES,
    MAX_TEXT_BYTES,
    NUM_NUMBERS,
    Fence,
    FrameDtype,
    FrameKind,
    Header,
    Limits,
    decode_header,
    encode_header,
    run_hash,
)
from libra.ids import RunId

RUN = run_hash(RunId("a run"))
COUNT = 1000
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
fences = st.builds(Fence, step=u32, mini_batch=u32, epoch=u32, version=u32)
numbers = st.lists(st.floats(allow_nan=False), min_size=NUM_NUMBERS, max_size=NUM_NUMBERS).map(
    tuple
)
VALUES = (FrameKind.GRADIENT, FrameKind.REDUCED)


def limits(*, is_shared=False, kinds=tuple(FrameKind)):
    return Limits(run_hash=RUN, count=COUNT, kinds=frozenset(kinds), is_shared=is_shared)


def header_of(kind, **changes):
    is_values = kind in VALUES
    given = {
        "kind": kind,
        "run_hash": RUN,
        "dtype": FrameDtype.FLOAT32 if is_values else FrameDtype.NONE,
        "count": COUNT,
        "length": 4 * COUNT if is_values else 0,
    }
    return Header(**given | changes)


@given(st.sampled_from(FrameKind), fences, u64, numbers)
def test_what_is_written_is_read(kind, fence, total, given_numbers):
    header = header_of(kind, fence=fence, checksum=total, numbers=given_numbers)
    data = encode_header(header)
    assert len(data) == HEADER_BYTES
    assert decode_header(data, limits()) == header


@given(
    st.sampled_from(FrameKind),
    fences,
    st.integers(0, HEADER_BYTES - 1),
    st.integers(1, 255),
)
def test_no_byte_can_change_unnoticed(kind, fence, where, flip):
    data = bytearray(encode_header(header_of(kind, fence=fence)))
    data[where] ^= flip
    with pytest.raises(PeerError):
        decode_header(data, limits())


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_refused_and_nothing_else_happens(data):
    with pytest.raises(PeerError):
        decode_header(data, limits())


@given(st.sampled_from(VALUES), u64, st.booleans())
def test_values_follow_in_exactly_the_length_of_the_model(kind, length, is_shared):
    header = header_of(kind, length=length)
    if length == (0 if is_shared else 4 * COUNT):
        decode_header(encode_header(header), limits(is_shared=is_shared))
        return
    with pytest.raises(PeerError, match="bytes follow"):
        decode_header(encode_header(header), limits(is_shared=is_shared))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"count": COUNT + 1}, "values on a lane"),
        ({"dtype": FrameDtype.NONE}, "dtype"),
        ({"run_hash": run_hash(RunId("another run"))}, "another run"),
    ],
)
def test_a_gradient_of_something_else_is_refused(changes, says):
    data = encode_header(header_of(FrameKind.GRADIENT, **changes))
    with pytest.raises(PeerError, match=says):
        decode_header(data, limits())


@pytest.mark.parametrize("kind", FrameKind)
def test_each_side_takes_only_its_own_kinds(kind):
    with pytest.raises(PeerError, match="not what this side takes"):
        decode_header(
            encode_header(header_of(kind)), limits(kinds=[it for it in FrameKind if it != kind])
        )


@pytest.mark.parametrize("kind", [FrameKind.HELLO, FrameKind.REFUSED])
def test_texts_are_short(kind):
    fits = encode_header(header_of(kind, length=MAX_TEXT_BYTES))
    assert decode_header(fits, limits()).length == MAX_TEXT_BYTES
    with pytest.raises(PeerError, match="bytes of text"):
        decode_header(encode_header(header_of(kind, length=MAX_TEXT_BYTES + 1)), limits())


@pytest.mark.parametrize("kind", [FrameKind.WELCOME, FrameKind.APPLIED])
def test_what_brings_nothing_brings_nothing(kind):
    with pytest.raises(PeerError, match="brings nothing"):
        decode_header(encode_header(header_of(kind, length=1)), limits())


@pytest.mark.parametrize(
    "changes", [{"count": -1}, {"checksum": 2**64}, {"run_hash": b""}, {"numbers": (0.0,) * 7}]
)
def test_what_does_not_fit_is_not_written(changes):
    with pytest.raises(ValueError, match="header"):
        encode_header(header_of(FrameKind.GRADIENT, **changes))


sizes = st.sampled_from([0, 1, 7, 1023, 1024, 65_535, 65_536, 65_537, 140_000])


@given(sizes, st.integers(0, 2**32 - 1))
def test_one_pass_takes_in_sums_and_squares(size, seed):
    given_values = np.random.default_rng(seed).standard_normal(size, dtype=np.float32)
    source, came = blocks(given_values), np.full_like(given_values, 9.0)
    found = measured(came, arrive=lambda block: np.copyto(block, next(source)))
    assert np.array_equal(came, given_values)
    copy = np.full_like(given_values, 9.0)
    assert copied_checksum(given_values, copy) == found.checksum == checksum(given_values)
    assert np.array_equal(copy, given_values)
    assert found.square_sum == pytest.approx(float(np.sum(given_values.astype(np.float64) ** 2)))


@given(st.integers(1, 140_000), st.data())
def test_a_changed_or_moved_value_shows_in_the_checksum(size, data):
    given_values = np.random.default_rng(size).standard_normal(size, dtype=np.float32)
    index = st.integers(0, size - 1)
    first, second = data.draw(index), data.draw(index)
    changed, moved = given_values.copy(), given_values.copy()
    changed[first] = -changed[first]
    moved[[first, second]] = moved[[second, first]]
    assert checksum(changed) != checksum(given_values)
    assert (checksum(moved) == checksum(given_values)) == np.array_equal(moved, given_values)


@given(st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 99_999))
def test_one_value_that_is_not_finite_shows_in_the_square_sum(bad, where):
    given_values = np.full(100_000, 3e38, np.float32)
    assert math.isfinite(measured(given_values, arrive=stays).square_sum)
    given_values[where] = bad
    found = measured(given_values, arrive=stays)
    fault = value_fault(is_sum_right=True, square_sum=found.square_sum, numbers=(1.0,))
    assert fault is Fault.NOT_FINITE


@pytest.mark.parametrize("bad", [1.7e308, -1.7e308, 1e31, math.inf, math.nan])
def test_a_loss_that_would_be_infinite_with_another_like_it_does_not_count(bad):
    assert value_fault(is_sum_right=True, square_sum=1.0, numbers=(2.5, bad)) is Fault.NOT_FINITE
    most = value_fault(is_sum_right=True, square_sum=1.0, numbers=(2.5, -1e30))
    assert most is Fault.NONE


def stays(block):
    """It is there already."""


ballots = st.builds(Ballot, st.sampled_from(Fault), st.floats(0, 1e60))


@given(st.lists(st.lists(ballots, min_size=3, max_size=3), min_size=1, max_size=4), st.data())
def test_a_member_counts_only_if_no_lane_says_otherwise(lanes, data):
    """`lanes`: three members' ballots on each lane."""
    own = data.draw(st.floats(1e-3, 1e3))
    every = [votes(lane, own_square_sum=own) for lane in lanes]
    totals = [sum(column) for column in zip(*every, strict=True)]
    found = verdicts(totals, reference_square_sum=totals[-1], norm_limit=10.0)
    assert len(found) == 3
    for member, verdict in enumerate(found):
        faults = [lane[member].fault for lane in lanes if lane[member].fault is not Fault.NONE]
        if faults:
            assert verdict is min(faults)
        else:
            norm = math.fsum(lane[member].square_sum for lane in lanes)
            is_far = norm > 100.0 * own * len(lanes) * (1 + 1e-9)
            assert (verdict is Fault.NORM) == is_far or norm == pytest.approx(
                100.0 * own * len(lanes)
            )


@pytest.mark.parametrize(("norm", "verdict"), [(9.9, Fault.NONE), (10.1, Fault.NORM)])
def test_the_limit_is_one_of_norms_and_not_of_their_squares(norm, verdict):
    totals = votes([Ballot(Fault.NONE, (2.0 * norm) ** 2)], own_square_sum=4.0)
    assert verdicts(totals, reference_square_sum=4.0, norm_limit=10.0) == (verdict,)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_core_whose_own_gradients_are_broken_is_no_measure_for_a_member(broken):
    totals = votes([Ballot(Fault.NONE, 4.0)], own_square_sum=broken)
    found = verdicts(totals, reference_square_sum=totals[-1], norm_limit=10.0)
    assert found == (Fault.NONE,)


def test_ranks_without_a_lane_change_no_verdict():
    head = votes([Ballot(Fault.NONE, 4.0), Ballot(Fault.LATE)], own_square_sum=1.0)
    other = votes([Ballot(Fault.NONE), Ballot(Fault.NONE)], own_square_sum=1.0)
    totals = [a + b for a, b in zip(head, other, strict=True)]
    assert verdicts(totals, reference_square_sum=2.0, norm_limit=2.0) == (Fault.NONE, Fault.LATE)


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_has_words(fault):
    assert fault.words
