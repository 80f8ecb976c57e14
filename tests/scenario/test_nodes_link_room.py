"""How much the link carries, keeps and lets wait."""

import anyio
import pytest
import trio.testing

from libra import clock
from libra.errors import PeerError
from libra.wire.node import FromRank
from libra_supervisor.nodes.leader import MOST_UNHEARD
from libra_supervisor.nodes.members import NodeJoined, NodeLost, NodeSuspected
from libra_supervisor.nodes.session import KeepLimits
from link_bed import TERMS, bed, charter, replace, word

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


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
