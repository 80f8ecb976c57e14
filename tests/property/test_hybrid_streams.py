"""A lane over several streams: parts come in any order, and nothing but whole gradients count."""

import threading
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import (
    DIGEST,
    HYBRID,
    KEY,
    LONG_S,
    RUN,
    collect,
    fence,
    head,
    hello,
    member,
    publish,
    values,
)
from libra import clock
from libra.errors import PeerError
from libra.hybrid.channel import bytes_of, no_beat
from libra.hybrid.checksum import checksum
from libra.hybrid.fault import Fault
from libra.hybrid.header import FrameDtype, FrameKind, Header, encode_header
from libra.hybrid.member import MemberLane
from libra.hybrid.streams import (
    MAX_STREAMS,
    Gathering,
    num_streams_for,
    parts_of,
    side_by_side,
)
from libra.ids import ReplicaId

COUNT = 1000


@given(count=st.integers(1, 10_000_000), num_streams=st.integers(1, MAX_STREAMS))
def test_the_parts_of_all_streams_are_all_values_once(count, num_streams):
    parts = parts_of(count, num_streams)
    assert parts[0].start == 0
    assert parts[-1].stop == count
    assert all(one.stop == other.start for one, other in pairwise(parts))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(1, count // num_streams)


@pytest.mark.parametrize(
    ("megabytes", "num_streams"), [(0, 1), (16, 1), (33, 2), (64, 4), (3600, 4)]
)
def test_a_stream_more_is_opened_for_every_sixteen_megabytes(megabytes, num_streams):
    assert num_streams_for(megabytes << 18) == num_streams


def joined(one, *, num_streams) -> MemberLane:
    return member(one.tcp_address, count=COUNT, num_streams=num_streams)


@pytest.fixture(scope="module")
def listening():
    with head(host="127.0.0.1", count=COUNT) as one:
        yield one


def frames(gradient, at, num_streams, *, spoiled=()):
    """What goes on each stream, as `MemberLane.send_gradient` sends it."""
    for stream, part in enumerate(parts_of(len(gradient), num_streams)):
        own = gradient[part]
        header = Header(
            kind=FrameKind.GRADIENT,
            run_hash=RUN,
            fence=at,
            dtype=FrameDtype.FLOAT32,
            count=len(own),
            length=own.nbytes,
            checksum=checksum(own) ^ (stream in spoiled),
            numbers=(float(at.step),),
        )
        yield encode_header(header) + bytes(bytes_of(own))


@given(num_streams=st.integers(1, 4), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_whatever_the_order_of_the_pieces_a_gradient_is_whole_or_not_there(
    listening, num_streams, seed
):
    lane, rng = joined(listening, num_streams=num_streams), Random(seed)
    try:
        listening.begin(1, DIGEST, [HYBRID])
        gradient = values(seed, COUNT)
        left = dict(enumerate(frames(gradient, fence(1), num_streams)))
        while left:
            assert collect(listening, fence(1), within_s=0.0).ballot.fault is Fault.LATE
            stream, size = rng.choice(sorted(left)), rng.choice([1, 7, 100, 5000])
            piece, left[stream] = left[stream][:size], left[stream][size:]
            lane._channels[stream].send(piece, deadline=clock.monotonic() + LONG_S)
            if not left[stream]:
                del left[stream]
        found = collect(listening, fence(1))
        assert found.ballot.fault is Fault.NONE
        assert found.ballot.square_sum == pytest.approx(float(gradient @ gradient), rel=1e-4)
        assert found.numbers[0] == 1.0
        assert np.array_equal(found.values, gradient)
        listening.release(HYBRID)
    finally:
        lane.close()
        listening.forget_everything()


@given(num_streams=st.integers(2, 4), data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_stream_that_is_lost_is_the_loss_of_the_member(listening, num_streams, data):
    lane = joined(listening, num_streams=num_streams)
    try:
        listening.begin(1, DIGEST, [HYBRID])
        lost = data.draw(st.integers(0, num_streams - 1))
        before = data.draw(st.booleans())
        pieces = list(frames(values(1, COUNT), fence(1), num_streams))
        for stream, piece in enumerate(pieces):
            if before and stream != lost:
                lane._channels[stream].send(piece, deadline=clock.monotonic() + LONG_S)
        lane._channels[lost].close()
        assert collect(listening, fence(1)).ballot.fault is Fault.GONE
        with pytest.raises(PeerError):
            lane.receive_reduced(timeout_s=LONG_S, beat=no_beat)
    finally:
        lane.close()
        listening.forget_everything()


@given(num_streams=st.integers(2, 4), data=st.data())
@settings(max_examples=20, deadline=None)
def test_one_part_that_is_damaged_or_of_another_step_spoils_the_whole(listening, num_streams, data):
    bad = data.draw(st.integers(0, num_streams - 1))
    how = data.draw(st.sampled_from([Fault.CHECKSUM, Fault.FENCE]))
    lane = joined(listening, num_streams=num_streams)
    try:
        listening.begin(1, DIGEST, [HYBRID])
        good = list(frames(values(1, COUNT), fence(1), num_streams))
        other = list(frames(values(1, COUNT), fence(2), num_streams))
        damaged = list(frames(values(1, COUNT), fence(1), num_streams, spoiled=(bad,)))
        good[bad] = (damaged if how is Fault.CHECKSUM else other)[bad]
        for stream, piece in enumerate(good):
            lane._channels[stream].send(piece, deadline=clock.monotonic() + LONG_S)
        assert collect(listening, fence(1)).ballot.fault is how
    finally:
        lane.close()
        listening.forget_everything()


@pytest.mark.parametrize("num_streams", [1, 2, 4])
def test_gradients_go_and_reduced_ones_come_back_on_all_streams(listening, num_streams):
    lane, digest = joined(listening, num_streams=num_streams), DIGEST
    try:
        for step in (1, 2, 3):
            listening.begin(step, digest, [HYBRID])
            gradient, reduced = values(step, COUNT), values(100 + step, COUNT)
            lane.send_gradient(fence(step), (0.25,), lambda room, g=gradient: np.copyto(room, g))
            found = collect(listening, fence(step))
            assert found.ballot.fault is Fault.NONE
            assert np.array_equal(found.values, gradient)
            listening.release(HYBRID)
            digest = DIGEST + step
            publish(listening, reduced, step, digest=digest)
            back = lane.receive_reduced(timeout_s=LONG_S, beat=no_beat)
            assert (back.fence, back.numbers[0]) == (fence(step), 1.5)
            assert np.array_equal(back.values, reduced)
            lane.applied(fence(step), digest)
    finally:
        lane.close()
        listening.forget_everything()


def test_a_member_hears_why_it_is_let_go_whichever_stream_ends_first(listening):
    lane = joined(listening, num_streams=4)
    listening.begin(1, DIGEST, [HYBRID])
    listening.dismiss(HYBRID, "its norm")
    with pytest.raises(PeerError, match="lets us go: its norm"):
        lane.receive_reduced(timeout_s=LONG_S, beat=no_beat)
    lane.close()


def test_a_lane_is_no_member_before_all_its_streams_have_proved_the_key(listening, monkeypatch):
    monkeypatch.setattr("libra.hybrid.entrance.PROVE_WITHIN_S", 0.3)
    streams = []
    real = MemberLane._say

    def half_said(self, channel, says, deadline):
        streams.append(says.stream)
        if says.stream < 1:
            real(self, channel, says, deadline)

    monkeypatch.setattr(MemberLane, "_say", half_said)
    with pytest.raises(PeerError):
        joined(listening, num_streams=2)
    assert streams == [0, 1]
    listening.begin(1, DIGEST, [HYBRID])
    assert collect(listening, fence(1), within_s=0.0).ballot.fault is Fault.GONE
    listening.forget_everything()


@pytest.mark.parametrize(("num_members", "num_streams"), [(5, 4), (9, 4), (8, 8)])
def test_members_that_come_together_do_not_keep_each_other_out(num_members, num_streams):
    names = [ReplicaId(f"hybrid-{k}") for k in range(num_members)]
    together = threading.Barrier(num_members)
    let_in = []

    class Crowded(MemberLane):
        def _say(self, channel, says, deadline):
            if says.stream == 0:
                together.wait()
            super()._say(channel, says, deadline)

    def come(address, name):
        says = hello(replica_id=name, num_streams=num_streams)
        lane = Crowded(address, key=KEY, run_hash=RUN, hello=says, count=COUNT, timeout_s=LONG_S)
        let_in.append(name)
        lane.close()

    with head(host="127.0.0.1", count=COUNT) as one:
        one.begin(1, DIGEST, names)
        threads = [threading.Thread(target=come, args=(one.tcp_address, name)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(let_in) == names


def test_no_more_streams_wait_for_their_siblings_than_there_are_places_for(monkeypatch):
    monkeypatch.setattr("libra.hybrid.entrance.PROVE_WITHIN_S", 0.5)
    monkeypatch.setattr("libra.hybrid.entrance.MAX_PROVED", 2)
    with (
        head(host="127.0.0.1", count=COUNT) as one,
        pytest.raises(PeerError, match="closed the lane"),
    ):
        member(one.tcp_address, count=COUNT, num_streams=4)


@pytest.mark.parametrize(("num_streams", "stream"), [(9, 0), (2, 2), (1, 1)])
def test_more_streams_than_there_may_be_are_refused(listening, monkeypatch, num_streams, stream):
    real = MemberLane._say

    def says_too_much(self, channel, says, deadline):
        changed = hello(num_streams=num_streams, stream=stream)
        real(self, channel, changed, deadline)

    monkeypatch.setattr(MemberLane, "_say", says_too_much)
    with pytest.raises(PeerError, match="at most 8 make a lane"):
        joined(listening, num_streams=1)


def said(stream, *, step=1):
    return hello(step=step, num_streams=2, stream=stream)


class Gatherer:
    """Brings streams to a Gathering, each in a thread, as an entrance does."""

    def __init__(self):
        self._gathering = Gathering()
        self.found = {}

    def bring(self, name, says, *, within_s=LONG_S):
        thread = threading.Thread(target=self._gather, args=(name, says, within_s))
        thread.start()
        return thread

    def until_there(self, num_sets):
        while len(self._gathering._there) < num_sets:
            threading.Event().wait(0.01)

    def _gather(self, name, says, within_s):
        try:
            found = self._gathering.gather(name, says, deadline=clock.monotonic() + within_s)
        except PeerError as error:
            found = str(error)
        self.found[name] = found


def test_streams_come_together_only_with_what_says_the_same_of_the_member():
    one = Gatherer()
    waits = one.bring("a0", said(0))
    one.until_there(1)
    other = one.bring("b1", said(1, step=2), within_s=0.3)
    one.until_there(2)
    other.join()
    assert one.found == {"b1": f"1 of 2 streams of {HYBRID} came"}
    one.bring("a1", said(1)).join()
    waits.join()
    assert (one.found["a0"], one.found["a1"]) == (None, ("a0", "a1"))


def test_a_stream_that_comes_twice_is_refused_and_the_first_goes_on():
    one = Gatherer()
    waits = one.bring("first", said(0))
    one.until_there(1)
    one.bring("again", said(0)).join()
    assert one.found == {"again": f"stream 0 of {HYBRID} came twice"}
    one.bring("last", said(1)).join()
    waits.join()
    assert one.found["last"] == ("first", "last")


def test_the_first_failure_ends_all_works_and_is_what_is_raised():
    ended, gate = [], threading.Event()

    def waits(beat):
        while not gate.is_set():
            gate.wait(0.05)
            beat()
        ended.append("waits")

    def fails(_beat):
        raise PeerError("broken")

    with pytest.raises(PeerError, match="broken"):
        side_by_side([waits, fails, waits], beat=no_beat, give_up=gate.set)
    # The third was ended by giving up, and waited for; the first one heard of the failure.
    assert ended == ["waits"]
