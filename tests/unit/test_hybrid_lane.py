"""Lanes over real sockets: honest members, and everyone else."""

import os
import socket

import numpy as np
import pytest

from lanes import (
    COUNT,
    DIGEST,
    HYBRID,
    KEY,
    LONG_S,
    RUN,
    collect,
    fence,
    head,
    member,
    publish,
    raw_connection,
    read_all,
    sends,
    values,
)
from libra import clock
from libra.errors import PeerError
from libra.hybrid import entrance, proof
from libra.hybrid.channel import Channel, LateError, SharedValues
from libra.hybrid.fault import Fault
from libra.hybrid.header import HEADER_BYTES, FrameDtype, FrameKind, Header, encode_header
from libra.hybrid.terms import Position
from libra.ids import ReplicaId

OTHER_KEY = bytes(32)
BOTH = pytest.mark.parametrize("kind", ["unix", "tcp"])


def address_of(one, kind):
    return one.unix_address if kind == "unix" else one.tcp_address


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_a_head_listens_under_a_name_and_on_either_kind_of_address(host):
    with head(host=host) as one:
        lane = member(one.tcp_address)
        one.begin(1, DIGEST, [HYBRID])
        lane.send_gradient(fence(1), (0.0, 1.0), sends(values(1)))
        assert np.array_equal(collect(one, fence(1)).values, values(1))
        lane.close()


@BOTH
def test_gradients_go_and_reduced_ones_come_back_to_the_last_bit(kind):
    with head(host="127.0.0.1") as one:
        lane = member(address_of(one, kind))
        digest = DIGEST
        for step in (1, 2, 3):
            one.begin(step, digest, [HYBRID])
            gradient, reduced = values(step), values(100 + step)
            lane.send_gradient(fence(step), (0.25, 3.0), sends(gradient))
            found = collect(one, fence(step))
            assert found.ballot.fault is Fault.NONE
            assert found.ballot.square_sum == pytest.approx(float(gradient @ gradient), rel=1e-4)
            assert found.numbers[:2] == (0.25, 3.0)
            assert np.array_equal(found.values, gradient)
            one.release(HYBRID)
            digest = DIGEST + step
            publish(one, reduced, step, digest=digest)
            back = lane.receive_reduced(timeout_s=LONG_S, beat=lambda: None)
            assert back.fence == fence(step)
            assert back.numbers[0] == 1.5
            assert np.array_equal(back.values, reduced)
            lane.applied(fence(step), digest)


@BOTH
@pytest.mark.parametrize("who", ["member", "head"])
def test_a_side_without_the_key_is_turned_away_by_the_other(kind, who):
    with head(host="127.0.0.1", key=KEY if who == "member" else OTHER_KEY) as one:
        says = "closed the lane" if who == "member" else "head that does not hold|closed the lane"
        with pytest.raises(PeerError, match=says):
            member(address_of(one, kind), key=OTHER_KEY if who == "member" else KEY)
        one.begin(1, DIGEST, [HYBRID])
        assert collect(one).ballot.fault is Fault.GONE


def test_a_head_without_the_key_learns_nothing_and_is_left():
    nonces = {"head_nonce": proof.new_nonce(), "member_nonce": proof.new_nonce()}
    shown = proof.proof(KEY, "member", **nonces)
    # Sent back as it came, the member's own proof is that of the wrong side.
    with pytest.raises(PeerError, match="a head that does not hold"):
        proof.check_proof(shown, KEY, "head", **nonces)
    proof.check_proof(proof.proof(KEY, "head", **nonces), KEY, "head", **nonces)


def test_what_was_heard_on_one_connection_is_worth_nothing_on_another():
    with head() as one:
        honest = raw_connection(one.unix_address)
        head_nonce = honest.recv(proof.NONCE_BYTES, 0x100)
        member_nonce = proof.new_nonce()
        recorded = member_nonce + proof.proof(
            KEY, "member", head_nonce=head_nonce, member_nonce=member_nonce
        )
        honest.sendall(recorded)
        assert len(honest.recv(proof.PROOF_BYTES, 0x100)) == proof.PROOF_BYTES
        replayed = raw_connection(one.unix_address)
        replayed.sendall(recorded)
        assert len(read_all(replayed)) == proof.NONCE_BYTES
        honest.close()
        replayed.close()


@BOTH
def test_a_stranger_who_says_nothing_is_cut_off_and_bars_nobody(monkeypatch, kind):
    monkeypatch.setattr(entrance, "PROVE_WITHIN_S", 0.5)
    with head(host="127.0.0.1") as one:
        silent = [raw_connection(address_of(one, kind)) for _ in range(entrance.MAX_STRANGERS + 3)]
        # It waits for its turn.
        member(address_of(one, kind))
        for connection in silent:
            # A nonce, then the end: nothing of them is read, none is kept.
            assert len(read_all(connection)) == proof.NONCE_BYTES
            connection.close()


@BOTH
def test_more_silent_strangers_than_there_are_places_keep_nobody_out(monkeypatch, kind):
    monkeypatch.setattr(entrance, "PROVE_WITHIN_S", LONG_S)
    monkeypatch.setattr(entrance, "SURE_S", 0.05)
    with head(host="127.0.0.1") as one:
        # All of them would have a minute for their proof.
        silent = [raw_connection(address_of(one, kind)) for _ in range(2 * entrance.MAX_STRANGERS)]
        member(address_of(one, kind))
        for connection in silent:
            connection.close()


def test_a_process_of_another_user_is_told_nothing(monkeypatch):
    with head() as one:
        user = entrance.os.geteuid()
        monkeypatch.setattr(entrance.os, "geteuid", lambda: user + 1)
        stranger = raw_connection(one.unix_address)
        assert read_all(stranger) == b""
        stranger.close()


def test_a_frame_before_the_proof_is_never_read():
    with head() as one:
        connection = raw_connection(one.unix_address)
        frame = encode_header(Header(kind=FrameKind.HELLO, run_hash=RUN, count=COUNT))
        connection.sendall(frame + b"\0" * proof.ANSWER_BYTES)
        assert len(read_all(connection)) == proof.NONCE_BYTES
        connection.close()


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ({"layout_hash": "another"}, "another part of another model"),
        ({"lane": 1}, "another part of another model"),
        ({"count": COUNT + 1}, "another part of another model"),
        ({"step": 1}, "not kept any more"),
    ],
)
def test_a_member_that_does_not_fit_is_told_why(says, reason):
    with head() as one:
        one.begin(2, DIGEST, [HYBRID])
        with pytest.raises(PeerError, match=reason):
            member(one.unix_address, **{"step": 2} | says)


def test_a_second_member_of_the_same_name_is_refused():
    with head() as one:
        lane = member(one.unix_address)
        with pytest.raises(PeerError, match="connected already"):
            member(one.unix_address)
        one.begin(1, DIGEST, [HYBRID])
        lane.send_gradient(fence(), (), sends(values()))
        assert collect(one).ballot.fault is Fault.NONE


def joined(one, kind="unix", **says):
    lane = member(address_of(one, kind), **says)
    one.begin(1, DIGEST, [HYBRID])
    return lane


@BOTH
@pytest.mark.parametrize(
    "stale",
    [fence(epoch=2), fence(step=2), fence(version=1), fence(mini_batch=1), fence(step=0)],
)
def test_gradients_of_another_moment_do_not_count(kind, stale):
    with head(host="127.0.0.1") as one:
        joined(one, kind).send_gradient(stale, (), sends(values()))
        assert collect(one).ballot.fault is Fault.FENCE


def test_gradients_of_other_weights_do_not_count():
    with head() as one:
        lane = joined(one, digest=DIGEST + 1)
        lane.send_gradient(fence(), (), sends(values()))
        assert collect(one).ballot.fault is Fault.DIGEST


def test_a_joiner_whose_weights_become_others_is_found_out():
    with head() as one:
        lane = joined(one)
        for step, its_digest, fault in ((1, 11, Fault.NONE), (2, 23, Fault.DIGEST)):
            publish(one, values(), step, digest=10 * step + 1)
            assert one.standing(HYBRID).fault is Fault.NONE
            lane.receive_reduced(timeout_s=LONG_S, beat=lambda: None)
            lane.applied(fence(step), its_digest)
            until_known(one, its_digest)
            assert one.standing(HYBRID).fault is fault


def until_known(one, digest):
    guest = one._guests[HYBRID]
    with one._changed:
        assert one._changed.wait_for(lambda: guest.digest == digest, LONG_S)


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gradients_that_are_not_finite_do_not_count(kind, bad):
    gradient = values()
    gradient[COUNT - 1] = bad
    with head(host="127.0.0.1") as one:
        joined(one, kind).send_gradient(fence(), (), sends(gradient))
        assert collect(one).ballot.fault is Fault.NOT_FINITE


def test_a_loss_that_is_not_finite_does_not_reach_the_core():
    with head() as one:
        joined(one).send_gradient(fence(), (0.0, float("nan")), sends(values()))
        assert collect(one).ballot.fault is Fault.NOT_FINITE


def test_damaged_gradients_do_not_count():
    with head() as one:
        lane = joined(one)
        header = Header(
            kind=FrameKind.GRADIENT,
            run_hash=RUN,
            fence=fence(),
            dtype=FrameDtype.FLOAT32,
            count=COUNT,
            checksum=123,
        )
        lane._channels[0].send(encode_header(header), deadline=clock.monotonic() + LONG_S)
        assert collect(one).ballot.fault is Fault.CHECKSUM


def test_what_a_member_writes_after_its_frame_changes_nothing():
    with head() as one:
        lane, gradient = joined(one), values()
        lane.send_gradient(fence(), (), sends(gradient))
        found = collect(one)
        lane._outgoing[:] = np.nan
        assert np.array_equal(found.values, gradient)


@BOTH
def test_the_next_gradient_waits_until_the_one_before_is_added(kind):
    with head(host="127.0.0.1") as one:
        lane, first, second = joined(one, kind), values(1), values(2)
        lane.send_gradient(fence(), (), sends(first))
        found = collect(one)
        if kind == "unix":
            lane.send_gradient(fence(2), (), sends(second))
        else:
            lane._channels[0].send(gradient_header(fence(2)), deadline=clock.monotonic() + LONG_S)
        guest = one._guests[HYBRID]
        arrived = guest._arrived[0]
        with one._changed:
            assert not one._changed.wait_for(lambda: guest._arrived.get(0) is not arrived, 0.5)
        assert np.array_equal(found.values, first)
        assert np.array_equal(collect(one).values, first)
        one.release(HYBRID)
        if kind == "unix":
            assert collect(one, fence(1)).ballot.fault is Fault.FENCE


def gradient_header(at):
    return encode_header(
        Header(
            kind=FrameKind.GRADIENT,
            run_hash=RUN,
            fence=at,
            dtype=FrameDtype.FLOAT32,
            count=COUNT,
            length=4 * COUNT,
        )
    )


@BOTH
def test_a_silent_member_is_late_and_nobody_waits_longer(kind):
    with head(host="127.0.0.1") as one:
        joined(one, kind)
        assert collect(one, within_s=0.3).ballot.fault is Fault.LATE


def test_a_member_that_stops_within_a_frame_is_late_and_then_gone():
    with head(host="127.0.0.1", frame_timeout_s=0.5) as one:
        lane = joined(one, "tcp")
        lane._channels[0].send(
            gradient_header(fence()) + b"\1", deadline=clock.monotonic() + LONG_S
        )
        assert collect(one, within_s=0.05).ballot.fault is Fault.LATE
        assert collect(one).ballot.fault is Fault.GONE
        assert "takes too long" in one.reason_of(HYBRID)


@BOTH
@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n" + b"\0" * HEADER_BYTES,
        encode_header(
            Header(
                kind=FrameKind.GRADIENT,
                run_hash=RUN,
                fence=fence(),
                dtype=FrameDtype.FLOAT32,
                count=2**60,
                length=2**62,
            )
        ),
        encode_header(Header(kind=FrameKind.REDUCED, run_hash=RUN, fence=fence())),
        b"",
    ],
    ids=["text", "oversize", "kind", "end"],
)
def test_a_member_that_sends_garbage_is_gone(kind, garbage):
    with head(host="127.0.0.1") as one:
        lane = joined(one, kind)
        lane._channels[0].send(garbage, deadline=clock.monotonic() + LONG_S)
        if not garbage:
            lane.close()
        assert collect(one).ballot.fault is Fault.GONE


@BOTH
def test_a_joiner_is_given_the_steps_that_it_missed_in_order(kind):
    with head(host="127.0.0.1") as one:
        for step in (1, 2, 3):
            one.begin(step, DIGEST + step - 1, [HYBRID])
            publish(one, values(step), step, digest=DIGEST + step)
        lane = member(address_of(one, kind))
        for step in (1, 2, 3):
            back = lane.receive_reduced(timeout_s=LONG_S, beat=lambda: None)
            assert back.fence == fence(step)
            assert np.array_equal(back.values, values(step))
            lane.applied(fence(step), DIGEST + step)
        one.begin(4, DIGEST + 3, [HYBRID])
        lane.send_gradient(fence(4), (), sends(values(4)))
        assert collect(one, fence(4)).ballot.fault is Fault.NONE
        with one._changed:
            assert one._changed.wait_for(lambda: not any(it.num_users for it in one._kept), LONG_S)
        one.begin(5, DIGEST + 4, [HYBRID])
        assert not one._kept


def test_a_guest_too_far_behind_is_let_go_and_the_core_keeps_no_more():
    with head(max_kept=2) as one:
        lane = joined(one)
        for step in range(1, 6):
            one.begin(step, DIGEST, [HYBRID])
            publish(one, values(step), step)
        assert len(one._kept) == 2
        assert one.standing(HYBRID).fault is Fault.LATE
        with pytest.raises(PeerError, match="too far behind"):
            read_for_ever(lane)


def read_for_ever(lane):
    while True:
        lane.receive_reduced(timeout_s=LONG_S, beat=lambda: None)


def test_who_is_no_member_any_more_is_told_so():
    with head() as one:
        lane = joined(one)
        one.begin(2, DIGEST, [])
        with pytest.raises(PeerError, match="no member any more"):
            lane.receive_reduced(timeout_s=LONG_S, beat=lambda: None)


def test_a_dismissed_member_does_not_come_back_with_its_gradients():
    with head() as one:
        lane = joined(one)
        lane.send_gradient(fence(), (), sends(values()))
        assert collect(one).ballot.fault is Fault.NONE
        one.dismiss(HYBRID, "its norm")
        assert collect(one).ballot.fault is Fault.GONE
        with pytest.raises(PeerError, match="its norm"):
            lane.receive_reduced(timeout_s=LONG_S, beat=lambda: None)


def test_two_members_are_told_apart():
    other = ReplicaId("hybrid-1")
    with head() as one:
        lanes = [member(one.unix_address, replica_id=name) for name in (HYBRID, other)]
        one.begin(1, DIGEST, [HYBRID, other])
        for seed, lane in enumerate(lanes):
            lane.send_gradient(fence(), (), sends(values(seed)))
        assert np.array_equal(collect(one).values, values(0))
        assert np.array_equal(collect(one, replica_id=other).values, values(1))


class Dribbling:
    """A connection whose other side does one byte at a time, and never lets us wait."""

    family = socket.AF_UNIX

    def settimeout(self, _seconds):
        pass

    def send(self, _view):
        return 1

    def recv_into(self, view):
        view[0] = 7
        return 1


def test_one_that_does_a_little_again_and_again_is_late_all_the_same():
    channel, over = Channel(Dribbling()), clock.monotonic() - 1
    assert channel.receive(1, deadline=over) == b"\x07"
    with pytest.raises(LateError, match="in sending"):
        channel.receive(100, deadline=over)
    channel.send(b"x", deadline=over)
    with pytest.raises(LateError, match="in reading what we send"):
        channel.send(bytes(100), deadline=over)


def test_damaged_reduced_gradients_are_noticed_by_the_member():
    with head() as one:
        lane = joined(one)
        publish(one, values(), 1)
        guest = one._guests[HYBRID]
        with one._changed:
            one._changed.wait_for(lambda: guest.next_to_send == Position(1, 1))
        lane._incoming[5] += 1
        # Whether the head's copy or ours came last, one of both is not what the header says.
        guest._outgoing[6] += 1
        with pytest.raises(PeerError, match="damaged"):
            lane.receive_reduced(timeout_s=LONG_S, beat=lambda: None)


def test_memory_that_could_be_cut_off_under_us_is_not_taken():
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 4 * COUNT)
    with pytest.raises(PeerError, match="not sealed"):
        SharedValues(descriptor, COUNT)
    os.close(descriptor)
    sealed = SharedValues.create(COUNT)
    with pytest.raises(PeerError, match="not sealed"):
        SharedValues(sealed.descriptor, COUNT + 1)
    with pytest.raises(PermissionError):
        os.ftruncate(sealed.descriptor, 0)
    sealed.close_descriptor()
