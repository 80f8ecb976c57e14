"""Sessions, members and terms where one input decides."""

import msgspec
import pytest

from libra.config.nodes import NodesConfig
from libra.errors import OverloadedError, PeerError, SiteError
from libra.wire.node import PROTOCOL, Envelope, Hello, Refused
from libra_supervisor.nodes.lease import Lease, LeaseTerms, Standing
from libra_supervisor.nodes.member_record import NodeState
from libra_supervisor.nodes.members import Admitted, Charter, Members
from libra_supervisor.nodes.session import KeepLimits, Session
from libra_supervisor.nodes.term import obey_term, obeyed_term, read_term, take_term

TERMS = LeaseTerms(lease_s=10.0, orphan_grace_s=30.0)


def members(*, term=1, keep=KeepLimits(), **options):  # noqa: B008 - frozen
    return Members(
        Charter(
            run_id="r", run_directory="/r", term=term, leader="L", version="1", config_digest="d",
            num_nodes=3, lease=TERMS, keep=keep, **options,
        ),
        now=0.0,
    )  # fmt: skip


def hello(**changes):
    known = Hello(
        protocol=PROTOCOL, version="1", config_digest="d", run_id="", node=1, host="h",
        boot_id="b", pid=7, start_ticks=9, dial=1,
    )  # fmt: skip
    return msgspec.structs.replace(known, **changes)


def said(machine, said_hello, *, connection, now=0.0):
    return machine.on_hello(
        said_hello, connection=connection, fresh_session=f"s{connection}", now=now
    )


# Sessions


def two_sides(**limits):
    return Session(KeepLimits(**limits)), Session(KeepLimits(**limits))


def test_what_was_under_way_when_a_connection_ended_is_sent_again_once():
    here, there = two_sides()
    sent = [here.put(b"%d" % number, beat=0) for number in range(5)]
    assert [there.on_number(envelope.number) for envelope in sent[:2]] == [True, True]
    again = here.resume(there.received, beat=3)
    assert [(it.number, it.body, it.beat) for it in again] == [
        (3, b"2", 3), (4, b"3", 3), (5, b"4", 3)
    ]  # fmt: skip
    assert not there.on_number(sent[1].number)
    assert [there.on_number(envelope.number) for envelope in again] == [True] * 3
    here.on_ack(there.received)
    assert (here.num_kept, here.kept_bytes) == (0, 0)


def test_what_makes_no_sense_is_an_error_of_the_peer():
    here, there = two_sides()
    here.put(b"x", beat=0)
    with pytest.raises(PeerError, match="acknowledged"):
        here.on_ack(2)
    with pytest.raises(PeerError, match="came after 0"):
        there.on_number(2)
    here.on_ack(1)
    with pytest.raises(PeerError, match="not kept"):
        here.resume(0, beat=0)
    with pytest.raises(PeerError, match="acknowledged"):
        here.resume(9, beat=0)


def test_what_is_kept_is_bounded_by_number_and_by_size():
    few, _ = two_sides(num_messages=2)
    few.put(b"", beat=0)
    few.put(b"", beat=0)
    with pytest.raises(OverloadedError, match="2 messages"):
        few.put(b"", beat=0)
    few.on_ack(1)
    few.put(b"", beat=0)
    small, _ = two_sides(num_bytes=1000)
    small.put(b"x" * 900, beat=0)
    with pytest.raises(OverloadedError, match="wait for the other node"):
        small.put(b"x" * 100, beat=0)
    with pytest.raises(OverloadedError, match="longer than the link takes"):
        Session(KeepLimits()).put(b"x" * (9 << 20), beat=0)


# The lease


def test_a_confirmation_counts_from_when_the_sign_of_life_was_sent():
    lease = Lease(TERMS, now=0.0)
    assert lease.standing(now=0.0) is Standing.LET_GO
    first, second = lease.beat(now=1.0), lease.beat(now=2.0)
    lease.on_heard(second)
    assert (lease.until, lease.standing(now=11.9)) == (12.0, Standing.HELD)
    lease.on_heard(first)
    assert lease.until == 12.0
    assert lease.standing(now=12.0) is Standing.LET_GO
    assert lease.standing(now=42.0) is Standing.OVER


def test_the_shortest_lease_that_may_be_configured_leaves_time_to_send_a_beat_again():
    shortest = msgspec.convert({"node_lease_s": 1}, NodesConfig).node_lease_s
    terms = LeaseTerms(lease_s=shortest, orphan_grace_s=0.0)
    # Linux sends a segment again after 0.2 s, and beats do not wait for each other.
    assert terms.beat_period_s >= 0.2
    assert terms.suspect_after_s >= 2 * terms.beat_period_s
    with pytest.raises(msgspec.ValidationError, match="node_lease_s"):
        msgspec.convert({"node_lease_s": 0.9}, NodesConfig)


def test_after_its_end_an_older_sign_of_life_confers_nothing():
    lease = Lease(TERMS, now=0.0)
    number = lease.beat(now=1.0)
    lease.end(now=2.0)
    lease.on_heard(number)
    assert lease.standing(now=2.0) is Standing.LET_GO
    # The end of what has ended long ago gives servers no more time.
    lease.end(now=20.0)
    assert lease.orphaned_at == 30.0


def test_signs_of_life_that_nobody_confirms_do_not_pile_up():
    lease = Lease(TERMS, now=0.0)
    for number in range(100_000):
        lease.beat(now=number / 5000)
    assert len(lease._open) <= 1025


@pytest.mark.parametrize("num_under_way", [1, 1000, 50_000])
def test_however_many_signs_of_life_one_round_trip_holds_it_renews_the_lease(num_under_way):
    lease = Lease(TERMS, now=0.0)
    sent_at = [3.0 + 2.0 * number / num_under_way for number in range(num_under_way)]
    numbers = [lease.beat(now=now) for now in sent_at]
    for number, sent in zip(numbers, sent_at, strict=True):
        lease.on_heard(number)
        # Never later than the truth allows, and hardly earlier.
        assert sent + 10.0 - 10.0 / 1000 <= lease.until <= sent + 10.0
    lease.beat(now=6.0)
    lease.on_heard(numbers[-1] + 1)
    assert lease.until == 16.0


def test_a_sign_of_life_that_was_never_sent_is_confirmed_by_nobody_honest():
    lease = Lease(TERMS, now=0.0)
    with pytest.raises(PeerError, match="sign of life 2 is confirmed, 1 were sent"):
        lease.on_heard(lease.beat(now=0.0) + 1)
    assert lease.standing(now=0.0) is Standing.LET_GO


# Members


def test_a_hello_that_was_overtaken_on_its_way_is_refused():
    machine = members()
    assert isinstance(said(machine, hello(dial=2), connection=2), Admitted)
    for late in (hello(dial=1), hello(dial=2), hello(pid=6, start_ticks=8, dial=5)):
        answer = said(machine, late, connection=1)
        assert isinstance(answer, Refused)
        assert not answer.is_final
    assert machine[1].session_id == "s2"
    resumed = said(machine, hello(dial=3, session="s2"), connection=3)
    assert isinstance(resumed, Admitted)
    assert resumed.replaced == 2
    assert isinstance(said(machine, hello(dial=2, session="s2"), connection=4), Refused)
    assert machine[1].connection == 3
    # The newest is the one that took the session up, not the one that began it.
    assert isinstance(said(machine, hello(dial=9, session="s2"), connection=5), Admitted)
    assert isinstance(said(machine, hello(dial=8, session="s2"), connection=6), Refused)
    assert isinstance(said(machine, hello(dial=8), connection=7), Refused)
    assert machine[1].connection == 5


def test_messages_of_a_connection_that_was_replaced_count_no_more():
    machine = members()
    said(machine, hello(), connection=1)
    said(machine, hello(dial=2, session="s1"), connection=2)
    with pytest.raises(PeerError, match="is over"):
        machine.on_envelope(1, Envelope(0, 5), now=1.0)
    with pytest.raises(PeerError, match="is over"):
        machine.beat(1)
    assert machine[1].heard == 0


def test_a_node_that_falls_silent_is_suspected_then_lost_and_returns():
    machine = members()
    said(machine, hello(), connection=1)
    machine.on_envelope(1, Envelope(0, 1), now=1.0)
    assert machine.next_deadline() == 1.0 + TERMS.suspect_after_s
    assert machine.on_time(now=5.9) == ()
    (suspected,) = machine.on_time(now=6.0)
    assert suspected.reason == "it is silent"
    assert not machine.has_let_go(1, now=6.0)
    assert machine.on_time(now=1.0 + TERMS.lost_after_s - 0.1) == ()
    assert machine.next_deadline() == 1.0 + TERMS.lost_after_s
    machine.on_time(now=1.0 + TERMS.lost_after_s)
    assert machine.state_of(1) is NodeState.LOST
    assert machine.has_let_go(1, now=99.0)
    assert isinstance(said(machine, hello(dial=2, session="s1"), connection=2), Refused)
    answer = said(machine, hello(dial=3), connection=3, now=99.0)
    assert [type(it).__name__ for it in answer.news] == ["NodeJoined"]
    assert answer.news[0].is_return


def kinds(news):
    return [type(it).__name__ for it in news]


def filled(machine):
    """Put more into the session of node 1 than it may keep."""
    machine.put(1, b"x" * 900, now=1.0)
    with pytest.raises(PeerError, match="wait for the other node"):
        machine.put(1, b"x" * 100, now=1.0)


def misses(machine):
    """Node 1 claims not to have what it has acknowledged."""
    machine.put(1, b"x", now=1.0)
    machine.on_envelope(1, Envelope(1, 1), now=1.0)
    again = hello(dial=2, session="s1", received=0)
    assert isinstance(said(machine, again, connection=2, now=1.0), Refused)


def breaks(machine):
    with pytest.raises(PeerError, match="were sent"):
        machine.on_envelope(1, Envelope(5, 1), now=1.0)


@pytest.mark.parametrize("how", [filled, misses, breaks])
def test_a_session_that_is_broken_off_makes_its_node_suspected_once(how):
    machine = members(keep=KeepLimits(num_bytes=1000))
    said(machine, hello(), connection=1)
    how(machine)
    assert machine.state_of(1) is NodeState.SUSPECTED
    assert not machine.is_open(1)
    (news,) = machine.take_news()
    assert (type(news).__name__, news.node) == ("NodeSuspected", 1)
    assert news.reason == machine[1].why_silent
    assert machine.take_news() == ()
    assert machine.expel(1, "once more", now=1.0) == ()
    # It comes back with a new session, and what it had is lost.
    answer = said(machine, hello(dial=3), connection=3, now=2.0)
    assert kinds(answer.news) == ["NodeLost", "NodeJoined"]


def test_news_of_a_call_that_raised_come_before_those_of_the_next():
    machine = members()
    said(machine, hello(), connection=1)
    breaks(machine)
    answer = said(machine, hello(dial=2), connection=2, now=2.0)
    assert kinds(answer.news) == ["NodeSuspected", "NodeLost", "NodeJoined"]
    breaks_again = Envelope(9, 1)
    with pytest.raises(PeerError):
        machine.on_envelope(2, breaks_again, now=2.0)
    assert kinds(machine.on_time(now=2.0 + TERMS.lost_after_s)) == ["NodeSuspected", "NodeLost"]


def test_another_machine_is_refused_until_the_first_has_let_go():
    machine = members()
    said(machine, hello(), connection=1)
    other = hello(boot_id="another", host="h2", dial=1)
    for now in (1.0, 6.0, TERMS.lost_after_s - 0.1):
        machine.on_time(now=now)
        answer = said(machine, other, connection=2, now=now)
        assert answer == Refused(
            reason="node 1 is h, which may still act; come back later", is_final=False
        )
    machine.on_time(now=TERMS.lost_after_s)
    assert isinstance(said(machine, other, connection=3, now=TERMS.lost_after_s), Admitted)


def test_why_a_node_was_suspected_is_forgotten_when_it_speaks_again():
    machine = members()
    said(machine, hello(), connection=1)
    machine.on_time(now=6.0)
    assert machine[1].why_silent == "it is silent"
    _, news = machine.on_envelope(1, Envelope(0, 1), now=7.0)
    assert kinds(news) == ["NodeRecovered"]
    assert (machine[1].why_silent, machine.state_of(1)) == ("", NodeState.MEMBER)
    machine.expel(1, "it does not end a process", now=8.0)
    (lost,) = machine.on_time(now=99.0)
    assert lost.reason == "it does not end a process"
    with pytest.raises(PeerError, match="node 1 is lost: it does not end a process"):
        machine.put(1, b"x", now=99.0)
    said(machine, hello(dial=2), connection=2, now=100.0)
    assert machine[1].why_silent == ""


def test_a_later_leader_waits_for_the_leases_of_the_one_before():
    machine = members(term=2)
    said(machine, hello(), connection=1)
    assert not machine.reigns(now=TERMS.lost_after_s - 0.1)
    assert machine.reigns(now=TERMS.lost_after_s)
    assert members().reigns(now=0.0)


OURS = dict.fromkeys("abcdef", "1")


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (OURS | {"b": "2"}, " (b)"),
        (dict.fromkeys("abcde", "1"), " (f)"),
        (OURS | {"x": "1", "a": "2"}, " (a, x)"),
        (dict.fromkeys("abcdef", "2"), " (a, b, c and 3 more)"),
        (OURS, ""),
    ],
)
def test_who_has_another_configuration_is_told_in_what(theirs, said):
    machine = members(option_digests=OURS)
    refused = machine.on_hello(
        hello(config_digest="x", option_digests=theirs), connection=1, fresh_session="s", now=0.0
    )
    assert refused == Refused(reason=f"its configuration is another one{said}", is_final=True)
    assert isinstance(
        machine.on_hello(hello(dial=2), connection=2, fresh_session="s", now=0.0), Admitted
    )


# Terms


def test_every_leader_has_a_higher_term_than_all_before_it(tmp_path):
    assert read_term(tmp_path) is None
    assert [take_term(tmp_path, f"L{number}") for number in range(3)] == [1, 2, 3]
    assert read_term(tmp_path).leader == "L2"
    obey_term(tmp_path, 9, "other")
    assert take_term(tmp_path, "L3") == 10


DAMAGED = [
    b"", b"{", b'{"term": "x"}', b'{"term": 1}', b"\xff", b'{"term": -5, "leader": ""}',
    b'{"term": 0, "leader": ""}', b'{"term": 100000000000000000000000, "leader": ""}',
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED)
@pytest.mark.parametrize(
    ("read", "advice"),
    [
        (lambda path: take_term(path, "L"), 'higher than the term of any line "leads"'),
        (obeyed_term, "being the term in the run directory's own term.json"),
    ],
)
def test_a_damaged_term_is_not_taken_for_none(tmp_path, content, read, advice):
    path = tmp_path / "term.json"
    path.write_bytes(content)
    with pytest.raises(SiteError, match="two leaders") as found:
        read(tmp_path)
    assert str(found.value).startswith(f"{path} cannot be read (")
    assert '{"term": N, "leader": ""}' in str(found.value)
    assert advice in str(found.value)
    # What it says to do helps.
    path.write_text('{"term": 7, "leader": ""}')
    assert read(tmp_path)


@pytest.mark.parametrize("run_s", [None, 1, 2])
def test_a_leader_that_its_nodes_would_refuse_for_ever_does_not_begin(tmp_path, run_s):
    own = tmp_path / "nodes" / "1"
    own.mkdir(parents=True)
    obey_term(own, 3, "L")
    if run_s is not None:
        obey_term(tmp_path, run_s, "L")
    with pytest.raises(SiteError, match=r"two leaders.* being 3 at least, and being higher") as it:
        take_term(tmp_path, "another")
    said = f"{tmp_path}/term.json is gone or out of date: {own}/term.json says that the node has"
    assert str(it.value).startswith(f"{said} obeyed term 3. ")
    # What it says to do helps, and so does what the leader writes by itself.
    obey_term(tmp_path, 3, "")
    assert take_term(tmp_path, "another") == 4
    # A node's own damage is for the node to say.
    (own / "term.json").write_text("{")
    assert take_term(tmp_path, "another") == 5


def test_no_term_is_written_that_nobody_could_read(tmp_path):
    obey_term(tmp_path, 10**9 - 1, "")
    assert take_term(tmp_path, "L") == 10**9
    with pytest.raises(SiteError, match=f"no term comes after {10**9}; start a new run directory"):
        take_term(tmp_path, "L")
    assert read_term(tmp_path).term == 10**9


def test_a_term_that_cannot_be_written_is_the_site_s_fault(tmp_path):
    with pytest.raises(SiteError, match=r"cannot write .*No such file"):
        take_term(tmp_path / "gone", "L")
