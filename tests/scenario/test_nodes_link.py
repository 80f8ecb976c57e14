"""Both ends of the link on virtual time, over a network that is cut, slow or silent."""

from contextlib import suppress
from random import Random

import pytest
import trio.testing

from fake_links import FakeNet
from libra import clock
from libra.errors import ConfigError, PeerError
from libra.wire.node import FreePort
from libra_supervisor.nodes.allegiance import Allegiance
from libra_supervisor.nodes.follower import FollowerEnd
from libra_supervisor.nodes.leader import LeaderEnd
from libra_supervisor.nodes.members import NodeJoined, NodeLost, NodeRecovered, NodeSuspected
from libra_supervisor.nodes.session import KeepLimits
from link_bed import TERMS, ToldHands, bed, charter, hello, replace, word

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


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


async def test_a_node_is_welcome_once_its_leader_has_heard_of_it():
    async with bed() as it:
        it.post_s = 3.0
        it.start()
        await clock.sleep(5.0)
        assert it.kinds() == [NodeJoined]
        assert it.hands.at("begin") > 3.0
