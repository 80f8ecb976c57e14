"""Both ends of the link on virtual time, over a network that is cut, slow or silent."""

from contextlib import asynccontextmanager, suppress
from random import Random

import anyio
import msgspec
import pytest
import trio.testing

from fake_links import FakeNet
from libra import clock
from libra.errors import ConfigError, PeerError
from libra.wire.node import (
    PROTOCOL,
    DropRank,
    Envelope,
    FreePort,
    FromRank,
    Hello,
)
from libra_supervisor.nodes.allegiance import Allegiance
from libra_supervisor.nodes.follower import FollowerEnd
from libra_supervisor.nodes.leader import MOST_UNHEARD, LeaderEnd, NodeSaid
from libra_supervisor.nodes.lease import LeaseTerms
from libra_supervisor.nodes.member_record import NodeState
from libra_supervisor.nodes.members import (
    Charter,
    NodeJoined,
    NodeLost,
    NodeRecovered,
    NodeSuspected,
)
from libra_supervisor.nodes.session import KeepLimits
from pickled import PICKLED, was_unpickled

TERMS = LeaseTerms(lease_s=10.0, orphan_grace_s=30.0)
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def charter(**changes):
    known = Charter(
        run_id="r", run_directory="/r", term=1, leader="L1", version="1", config_digest="d",
        num_nodes=3, lease=TERMS,
    )  # fmt: skip
    return msgspec.structs.replace(known, **changes)


def hello(node=1, **changes):
    known = Hello(
        protocol=PROTOCOL, version="1", config_digest="d", run_id="", node=node, host="h",
        boot_id="b", pid=7, start_ticks=9, dial=0,
    )  # fmt: skip
    return msgspec.structs.replace(known, **changes)


def verb(name, **fields):
    """A message by its name, whether there is one of that name or not."""
    return msgspec.msgpack.encode({"type": name, **fields})


NESTED = b"\x91" * 100_000 + b"\xc0"
"""Deeper than any decoder goes, inside a field that nobody asked for."""


class ToldHands:
    """Notes what it is told and when."""

    def __init__(self):
        self.log = []
        self.let_go_s = self.begin_s = 0.0

    def note(self, *what):
        self.log.append((round(clock.now(), 2), *what))

    def children(self):
        return ()

    async def begin(self, welcome):
        await clock.sleep(self.begin_s)
        self.note("begin", welcome.term)

    async def obey(self, command):
        self.note(command)

    async def let_go(self, reason):
        await clock.sleep(self.let_go_s)
        self.note("let go")

    async def end_servers(self, reason):
        if ("servers ended",) not in [entry[1:] for entry in self.log]:
            self.note("servers ended")

    def commands(self):
        return [entry[1] for entry in self.log if not isinstance(entry[1], str)]

    def words(self):
        return [entry[1] for entry in self.log if isinstance(entry[1], str)]

    def at(self, word):
        return next(entry[0] for entry in self.log if entry[1] == word)


class Bed:
    """One leader and one follower, as node 1."""

    def __init__(self, tasks):
        self.tasks, self.news, self.net = tasks, [], FakeNet()
        self.replaced, self.num_looks = False, 0
        self.post_s, self.is_senseless = 0.0, False
        self.hands = ToldHands()
        self.leader = self.new_leader(charter())
        self.scope = None

    async def post(self, event):
        await clock.sleep(self.post_s)
        if self.is_senseless and isinstance(event, NodeSaid):
            raise PeerError("nonsense")
        self.news.append(event)

    async def is_replaced(self):
        self.num_looks += 1
        return self.replaced

    def new_leader(self, known):
        leader = LeaderEnd(
            known, post=self.post, rng=Random(known.term), is_replaced=self.is_replaced
        )
        scope = self.leader_scope = anyio.CancelScope()

        async def run():
            with scope:
                await leader.run()

        self.tasks.start_soon(run)
        self.net.serve = leader.serve
        return leader

    def start(self, about=None, keep=KeepLimits()):  # noqa: B008 - frozen
        side = Allegiance(about or hello(), TERMS, keep, now=clock.now())
        self.follower = FollowerEnd(side, self.hands, dial=self.net.dial, rng=Random(5))

        async def run():
            with anyio.CancelScope() as self.scope:
                await self.follower.run()

        self.tasks.start_soon(run)

    def kinds(self):
        return [type(event) for event in self.news if not isinstance(event, NodeSaid)]

    def said(self):
        return [event.event for event in self.news if isinstance(event, NodeSaid)]


@asynccontextmanager
async def bed():
    async with anyio.create_task_group() as tasks:
        yield Bed(tasks)
        tasks.cancel_scope.cancel()


def replace(number):
    return DropRank(number)


def word(number):
    return FromRank(1, b"%d" % number)


async def test_commands_and_events_go_both_ways_in_order():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        for number in range(50):
            it.leader.tell(1, replace(number))
            it.follower.say(word(number))
        await clock.sleep(1.0)
        assert it.hands.commands() == [replace(number) for number in range(50)]
        assert it.said() == [word(number) for number in range(50)]
        assert it.kinds() == [NodeJoined]
        assert it.leader.records[0].session.num_kept == 0


async def test_what_is_said_while_a_session_begins_waits_for_it():
    async with bed() as it:
        it.hands.begin_s = 1.0
        it.start()
        for number in range(40):
            await clock.sleep(0.05)
            it.follower.say(word(number))
        await clock.sleep(1.0)
        assert it.kinds() == [NodeJoined]
        first = it.said()[0]
        assert it.said() == [word(number) for number in range(int(first.event), 40)]
        assert int(first.event) < 10


async def test_a_leader_that_was_replaced_lets_nobody_in():
    async with bed() as it:
        it.replaced = True
        it.start()
        await clock.sleep(3.0)
        assert it.net.num_dials > 2
        assert it.kinds() == []
        it.replaced = False
        await clock.sleep(10.0)
        assert it.kinds() == [NodeJoined]


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_leader_that_stood_still_renews_a_lease_only_while_nobody_else_leads(replaced):
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        it.replaced = replaced
        # A sign of life is under way all the time that the process stands still.
        it.net.delay_s = 0.5
        await clock.sleep(1.3)
        heard = it.leader.records[0].heard
        trio.lowlevel.current_clock().jump(7.0)
        await clock.sleep(0.2)
        is_renewed = it.leader.records[0].heard > heard
        assert is_renewed is not replaced
        assert it.num_looks > 1
        if replaced:
            # Nor later, nor does it say of anybody that he is gone: that is the other one's.
            await clock.sleep(3 * TERMS.lost_after_s)
            assert it.leader.records[0].heard == heard
            assert it.kinds() == [NodeJoined]


async def test_a_node_that_is_no_member_cannot_be_told_anything():
    async with bed() as it:
        with pytest.raises(PeerError, match="node 2 is joining"):
            it.leader.tell(2, replace(0))
        assert it.leader.has_let_go(2)


async def test_a_short_cut_loses_and_repeats_nothing():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        for number in range(30):
            it.leader.tell(1, replace(number))
            it.follower.say(word(number))
            if number % 10 == 5:
                it.net.cut()
                await clock.sleep(0.5)
                it.net.mend()
            await clock.sleep(0.05)
        await clock.sleep(5.0)
        assert it.hands.commands() == [replace(number) for number in range(30)]
        assert it.said() == [word(number) for number in range(30)]
        assert it.hands.words() == ["begin"]
        assert it.kinds() == [NodeJoined]


@pytest.mark.parametrize("how", ["cut", "silent"])
async def test_who_is_cut_off_lets_go_before_it_counts_as_lost(how):
    async with bed() as it:
        it.start()
        await clock.sleep(5.0)
        it.leader.tell(1, replace(0))
        await clock.sleep(1.0)
        if how == "cut":
            it.net.cut()
        else:
            it.net.is_silent = True
        while it.kinds()[-1] is not NodeLost:
            await clock.sleep(0.1)
        lost_at = clock.now()
        assert it.kinds() == [NodeJoined, NodeSuspected, NodeLost]
        assert 4.0 + TERMS.lease_s < it.hands.at("let go") < lost_at - 0.5
        assert it.leader.has_let_go(1)
        it.net.mend()
        await clock.sleep(8.0)
        assert it.kinds()[3:] == [NodeJoined]
        joined = [event for event in it.news if isinstance(event, NodeJoined)]
        assert [event.is_return for event in joined] == [False, True]
        assert it.hands.words() == ["begin", "let go", "begin"]
        # Nothing of the old session is done in the new one.
        it.leader.tell(1, replace(1))
        await clock.sleep(3.0)
        assert it.hands.commands() == [replace(0), replace(1)]


async def test_a_silence_that_ends_in_time_is_a_suspicion_only():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        it.net.is_silent = True
        it.leader.tell(1, replace(0))
        await clock.sleep(5.2)
        it.net.mend()
        await clock.sleep(8.0)
        assert it.kinds() == [NodeJoined, NodeSuspected, NodeRecovered]
        assert it.hands.commands() == [replace(0)]
        assert it.hands.words() == ["begin"]


async def test_a_session_whose_lease_has_ended_is_never_taken_up_again():
    """Though it is back before it counts as lost: what ended there would be waited for."""
    async with bed() as it:
        it.start()
        await clock.sleep(0.5)
        it.leader.tell(1, replace(0))
        await clock.sleep(0.5)
        it.net.is_silent = True
        it.leader.tell(1, replace(1))
        await clock.sleep(7.0)
        # It dials until its lease is over.
        it.net.mend()
        await clock.sleep(3.5)
        it.follower.say(word(0))
        assert it.leader.why_untold(1) is None
        await clock.sleep(5.0)
        assert it.kinds() == [NodeJoined, NodeSuspected, NodeLost, NodeJoined]
        lost = next(event for event in it.news if isinstance(event, NodeLost))
        assert lost.reason == "its lease had ended"
        assert it.hands.words() == ["begin", "let go", "begin"]
        assert (it.hands.commands(), it.said()) == ([replace(0)], [])


async def test_servers_wait_for_a_leader_that_is_started_again_and_not_for_ever():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        it.leader.tell(1, FreePort(1))
        await clock.sleep(1.0)
        it.net.cut()
        await clock.sleep(TERMS.lease_s + TERMS.orphan_grace_s - 3.0)
        assert it.hands.words() == ["begin", "let go"]
        await clock.sleep(8.0)
        assert it.hands.words() == ["begin", "let go", "servers ended"]


async def test_a_new_leader_takes_over_with_a_session_of_its_own():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        it.leader.tell(1, replace(0))
        await clock.sleep(1.0)
        it.leader_scope.cancel()
        it.net.cut()
        await clock.sleep(2.0)
        it.net.mend()
        it.news.clear()
        it.leader = it.new_leader(charter(term=2, leader="L2"))
        await clock.sleep(4.0)
        assert it.kinds() == [NodeJoined]
        assert it.hands.words() == ["begin", "let go", "begin"]
        assert not it.leader.has_let_go(2)
        assert not it.leader.reigns()
        await clock.sleep(TERMS.lost_after_s)
        assert it.leader.reigns()
        assert it.leader.has_let_go(2)


async def test_a_leader_of_an_older_term_is_not_obeyed():
    async with bed() as it:
        it.start(hello(term=2))
        await clock.sleep(3.0)
        assert it.hands.words() == []
        assert it.kinds() == []
        assert it.net.num_dials > 2
        it.leader = it.new_leader(charter(term=2, leader="L2"))
        await clock.sleep(8.0)
        assert it.hands.words() == ["begin"]


async def test_another_leader_of_the_same_term_is_not_obeyed():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        it.net.cut()
        it.net.mend()
        it.leader = it.new_leader(charter(leader="another"))
        await clock.sleep(0.5)
        with suppress(PeerError):
            # It takes the node for a member until it finds that nothing is confirmed.
            it.leader.tell(1, replace(0))
        await clock.sleep(20.0)
        assert it.hands.commands() == []
        assert it.hands.words() == ["begin"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "2"}, "Libra 2, here 1"),
        ({"protocol": 99}, "protocol 99"),
        ({"run_id": "other"}, "it belongs to run other, this is r"),
        ({"config_digest": "x"}, "its configuration is another one"),
        ({"node": 3}, "there is no node 3 among 3"),
        ({"node": 0}, "there is no node 0"),
    ],
)
async def test_who_does_not_fit_is_refused_for_good(changes, said):
    net, leader = FakeNet(), LeaderEnd(charter(), post=None, rng=Random(1))
    net.serve = leader.serve
    side = Allegiance(hello(**changes), TERMS, KeepLimits(), now=clock.now())
    follower = FollowerEnd(side, ToldHands(), dial=net.dial, rng=Random(5))
    with pytest.raises(ConfigError, match=said):
        await follower.run()


async def test_a_second_machine_for_a_rank_has_to_wait_until_the_first_has_let_go():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        first, other = it.hands, ToldHands()
        it.hands = other
        old_scope = it.scope
        it.start(hello(boot_id="b2", host="h2"))
        await clock.sleep(20.0)
        assert other.words() == []
        assert first.words() == ["begin"]
        assert it.kinds() == [NodeJoined]
        old_scope.cancel()
        await clock.sleep(TERMS.lost_after_s + 6.0)
        assert other.words()[-1] == "begin"
        assert it.kinds() == [NodeJoined, NodeSuspected, NodeLost, NodeJoined]


async def test_a_restarted_follower_of_the_same_machine_is_taken_at_once():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        it.scope.cancel()
        it.start(hello(pid=8, start_ticks=10))
        await clock.sleep(1.0)
        assert it.kinds() == [NodeJoined, NodeLost, NodeJoined]


async def test_what_a_silent_node_is_owed_is_bounded_and_then_its_session_is_over():
    async with bed() as it:
        it.leader = it.new_leader(charter(keep=KeepLimits(num_messages=100)))
        it.start()
        await clock.sleep(1.0)
        it.net.is_silent = True
        for number in range(100):
            it.leader.tell(1, replace(number))
        with pytest.raises(PeerError, match="100 messages"):
            it.leader.tell(1, replace(100))
        await clock.sleep(0.1)
        assert it.kinds() == [NodeJoined, NodeSuspected]
        assert "100 messages" in it.news[-1].reason
        with pytest.raises(PeerError, match="node 1 is suspected"):
            it.leader.tell(1, replace(0))
        assert not it.leader.has_let_go(1)
        await clock.sleep(1.0)
        it.net.mend()
        await clock.sleep(8.0)
        assert it.kinds()[-1] is NodeJoined
        assert it.hands.commands() == []


async def test_what_a_follower_keeps_is_bounded_and_then_it_begins_anew():
    async with bed() as it:
        it.start(keep=KeepLimits(num_messages=50))
        await clock.sleep(1.0)
        it.leader.tell(1, replace(0))
        await clock.sleep(1.0)
        it.net.is_silent = True
        for number in range(60):
            it.follower.say(word(number))
        await clock.sleep(0.5)
        assert it.hands.words() == ["begin", "let go"]
        it.net.mend()
        await clock.sleep(8.0)
        assert it.hands.words() == ["begin", "let go", "begin"]
        assert it.said() == []


async def test_long_streams_wait_for_room_and_others_go_between():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        piece = b"x" * (1 << 20)

        async def stream():
            for _ in range(64):
                await it.follower.say_when_room(FromRank(1, piece))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream)
            await clock.sleep(0.001)
            assert it.follower._allegiance.kept_bytes < 20 << 20
        await clock.sleep(1.0)
        assert len(it.said()) == 64


async def test_an_expelled_node_counts_as_lost_only_after_its_lease():
    async with bed() as it:
        it.start()
        await clock.sleep(5.0)
        it.leader.expel(1, "it does not end a process")
        await clock.sleep(0.001)
        assert it.kinds() == [NodeJoined, NodeSuspected]
        assert not it.leader.has_let_go(1)
        await clock.sleep(1.0)
        # It is told so, lets go and comes back at once.
        assert it.kinds() == [NodeJoined, NodeSuspected, NodeLost, NodeJoined]


@pytest.mark.case("R-B101", "R-B102")
@pytest.mark.parametrize(
    "message",
    [
        PICKLED, b"", b"\xc1", b"garbage", msgspec.msgpack.encode({"type": "Hello"}),
        msgspec.msgpack.encode(Envelope(0, 0)), msgspec.msgpack.encode(DropRank(1)),
        b"\x82\xa4type\xa5Hello\xa1x" + NESTED, msgspec.msgpack.encode(hello(host="h" * (1 << 20))),
    ],
)  # fmt: skip
async def test_a_first_message_that_is_no_hello_ends_the_connection(message):
    async with bed() as it, it.net.dial() as connection:
        await connection.send(message)
        assert await connection.receive() is None
        assert it.kinds() == []
        assert not was_unpickled()


async def test_who_says_nothing_is_not_waited_for():
    async with bed() as it, it.net.dial() as connection:
        assert await connection.receive() is None
        assert 9.0 < clock.now() < 12.0


@pytest.mark.case("R-B101", "R-B102")
@pytest.mark.parametrize(
    "envelope",
    [
        PICKLED,
        Envelope(0, 1, 1, PICKLED),
        Envelope(0, 1, 1, verb("Leave", exit_code=0, reason="a follower does not order")),
        Envelope(0, 1, 1, verb("StopAsked.__init__", reason="", in_hurry=True)),
        Envelope(5, 1),
        Envelope(0, 1, 7, b"x"),
        Envelope(0, 1, 1, b"no event"),
        Envelope(0, 1, 1, b"\x82\xa4type\xa7Started\xa1x" + NESTED),
        b"\x95\x00\x01\x01\xc4\x00" + NESTED,
        b"",
        b"\xc1",
    ],
)
async def test_a_member_that_breaks_the_protocol_is_put_out_and_not_the_others(envelope):
    async with bed() as it, it.net.dial() as connection:
        it.start(hello(node=2, boot_id="c"))
        await connection.send(msgspec.msgpack.encode(hello(dial=1)))
        assert await connection.receive() is not None
        await connection.send(
            envelope if isinstance(envelope, bytes) else msgspec.msgpack.encode(envelope)
        )
        while await connection.receive() is not None:
            pass
        await clock.sleep(0.1)
        if not isinstance(envelope, bytes):
            assert [type(it) for it in it.news if it.node == 1] == [NodeJoined, NodeSuspected]
        await clock.sleep(TERMS.lost_after_s + 1.0)
        states = {record.node: record.state for record in it.leader.records}
        assert states == {1: NodeState.LOST, 2: NodeState.MEMBER}
        assert it.said() == []
        assert not was_unpickled()


@pytest.mark.parametrize("reply", [b"", b"\xc1", b"\x82\xa4type\xa7Welcome\xa1x" + NESTED])
async def test_whoever_answers_like_no_leader_is_dialled_again(reply):
    async with bed() as it:

        async def stranger(connection):
            await connection.receive()
            await connection.send(reply)

        it.net.serve, serve = stranger, it.net.serve
        it.start()
        await clock.sleep(5.0)
        assert it.net.num_dials > 2
        assert it.hands.words() == []
        it.net.serve = serve
        await clock.sleep(8.0)
        assert it.hands.words() == ["begin"]


@pytest.mark.case("R-B101", "R-B102")
@pytest.mark.parametrize(
    "body",
    [
        b"no command", b"\x82\xa4type\xa8FreePort\xa1x" + NESTED, PICKLED,
        verb("StopAsked", reason="a leader does not ask", in_hurry=True), verb("ranks.drop_all"),
    ],
)  # fmt: skip
async def test_a_leader_that_says_no_command_is_left_and_joined_anew(body):
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        it.leader.tell(1, replace(0))
        _, envelope = it.leader._members.put(1, body, now=clock.now())
        it.leader._outgoing[1].add(envelope)
        it.leader.tell(1, replace(1))
        await clock.sleep(3.0)
        assert it.hands.words() == ["begin", "let go", "begin"]
        assert it.hands.commands() == [replace(0)]
        it.leader.tell(1, replace(2))
        await clock.sleep(1.0)
        assert it.hands.commands() == [replace(0), replace(2)]
        assert not was_unpickled()


async def test_a_member_whose_words_make_no_sense_to_who_hears_them_is_put_out():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        it.is_senseless = True
        it.follower.say(word(1))
        await clock.sleep(0.1)
        it.is_senseless = False
        assert it.kinds() == [NodeJoined, NodeSuspected]
        (suspected,) = [event for event in it.news if isinstance(event, NodeSuspected)]
        assert suspected.reason == "what it said makes no sense: nonsense"
        await clock.sleep(5.0)
        # The same process may begin anew.
        assert it.kinds() == [NodeJoined, NodeSuspected, NodeLost, NodeJoined]


async def test_news_reach_a_slow_listener_in_order_and_none_is_lost_with_a_connection():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        it.post_s = 3.0
        for number in range(3):
            it.follower.say(word(number))
        await clock.sleep(1.0)
        # What has come in is passed on, whatever becomes of the connection.
        assert (it.leader.records[0].session.received, it.said()) == (3, [])
        it.net.cut()
        await clock.sleep(TERMS.lost_after_s)
        it.net.mend()
        it.post_s = 0.0
        await clock.sleep(30.0)
        assert it.said() == [word(number) for number in range(3)]
        assert it.kinds() == [NodeJoined, NodeSuspected, NodeLost, NodeJoined]


async def test_a_node_is_welcome_once_its_leader_has_heard_of_it():
    async with bed() as it:
        it.post_s = 3.0
        it.start()
        await clock.sleep(5.0)
        assert it.kinds() == [NodeJoined]
        assert it.hands.at("begin") > 3.0


async def test_a_link_without_news_carries_signs_of_life_alone():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        before = it.net.num_messages
        await clock.sleep(10 * TERMS.beat_period_s)
        # One there and one back.
        assert 18 <= it.net.num_messages - before <= 22
        before = it.net.num_messages
        for number in range(50):
            it.leader.tell(1, replace(number))
        await clock.sleep(0.1)
        # Each is acknowledged, which is acknowledged once more and no further.
        assert 50 < it.net.num_messages - before <= 150


async def test_who_says_more_than_can_be_heard_waits():
    async with bed() as it:
        it.start()
        await clock.sleep(1.0)
        it.post_s = 0.01
        for number in range(1000):
            it.follower.say(word(number))
        for _ in range(20):
            await clock.sleep(0.2)
            assert it.leader._postbox.depth <= MOST_UNHEARD + 2
        assert 300 < len(it.said()) < 500
        await clock.sleep(10.0)
        assert it.said() == [word(number) for number in range(1000)]
        assert it.kinds() == [NodeJoined]
