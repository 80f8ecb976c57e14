"""Words on the link that no leader and no follower says."""

import msgspec
import pytest
import trio.testing

from libra import clock
from libra.wire.node import DropRank, Envelope
from libra_supervisor.nodes.member_record import NodeState
from libra_supervisor.nodes.members import NodeJoined, NodeLost, NodeSuspected
from link_bed import TERMS, bed, hello, replace, word
from pickled import PICKLED, was_unpickled

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def verb(name, **fields):
    """A message by its name, whether there is one of that name or not."""
    return msgspec.msgpack.encode({"type": name, **fields})


NESTED = b"\x91" * 100_000 + b"\xc0"
"""Deeper than any decoder goes, inside a field that nobody asked for."""


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
