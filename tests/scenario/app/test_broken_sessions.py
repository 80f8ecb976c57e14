"""A node whose session was broken off and that does not count as lost yet: nobody minds."""

from contextlib import asynccontextmanager
from random import Random

import anyio
import msgspec
import pytest
import trio.testing

from fake_links import FakeNet
from libra import clock
from libra.errors import NodeAwayError, PeerError
from libra.ids import ChildId, Incarnation, NodeRank, RunId
from libra.wire.node import PROTOCOL, Envelope, Hello, Leave, NodeCommand, RankLinked, ToRank
from libra.wire.rank import Hello as RankHello
from libra_supervisor.nodes.leader import LeaderEnd
from libra_supervisor.nodes.lease import LeaseTerms
from libra_supervisor.nodes.members import Charter, NodeSuspected
from libra_supervisor.nodes.remote import RemoteNode, RemotePort
from libra_supervisor.nodes.remote_child import RemoteChild
from libra_supervisor.process.identity import ProcessIdentity
from libra_supervisor.process.tree import StopDeadlines

TERMS = LeaseTerms(lease_s=10.0, orphan_grace_s=30.0)
ONE = NodeRank(1)
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Bed:
    """A leader's view of node 1, whose own words are written by hand."""

    def __init__(self, connection):
        self.connection, self.news = connection, []

    async def post(self, event):
        self.news.append(event)

    async def say(self, envelope):
        await self.connection.send(msgspec.msgpack.encode(envelope))

    async def break_off(self):
        """It acknowledges what nobody sent."""
        assert await self.node.hindrance() is None
        await self.say(Envelope(99, 1))
        await clock.sleep(0.1)
        assert isinstance(self.news[-1], NodeSuspected)
        assert self.node.is_member
        assert "were sent" in await self.node.hindrance()
        with pytest.raises(NodeAwayError, match="were sent"):
            self.node.say(Leave(0, "a question that matters"))

    async def told(self):
        """Commands that came over, until nothing more does."""
        found = []
        with anyio.move_on_after(1.0):
            while (message := await self.connection.receive()) is not None:
                envelope = msgspec.msgpack.decode(message, type=Envelope)
                if envelope.number:
                    found.append(msgspec.msgpack.decode(envelope.body, type=NodeCommand))
        return [type(it).__name__ for it in found]


@asynccontextmanager
async def bed():
    net = FakeNet()
    charter = Charter(
        run_id="r", run_directory="/r", term=1, leader="L1", version="1", config_digest="d",
        num_nodes=2, lease=TERMS,
    )  # fmt: skip
    hello = Hello(
        protocol=PROTOCOL, version="1", config_digest="d", run_id="", node=1, host="h",
        boot_id="b", pid=7, start_ticks=9, dial=1,
    )  # fmt: skip
    async with anyio.create_task_group() as tasks:
        made = Bed(None)
        end = LeaderEnd(charter, post=made.post, rng=Random(1))
        tasks.start_soon(end.run)
        net.serve = end.serve
        async with net.dial() as made.connection:
            await made.connection.send(msgspec.msgpack.encode(hello))
            await made.connection.receive()
            made.node = RemoteNode(ONE, end)
            made.node.on_joined(())
            yield made
        tasks.cancel_scope.cancel()


def port(node):
    return RemotePort(node, 4711).close


def child(node):
    made = RemoteChild(
        node,
        child_id=ChildId("vllm-0"),
        incarnation=Incarnation("vllm-0-1"),
        identity=ProcessIdentity(5, 6, "b"),
    )
    node.add_child(made)
    return made.reap


def link(node):
    links = []
    node.on_rank = lambda _linked, made: links.append(made)
    hello = RankHello(
        run_id=RunId("r"), attempt=1, rank=0, world_size=1, local_rank=0, dp_rank=0, tp_rank=0,
        pp_rank=0, cp_rank=0, ep_rank=0, pid=5, start_ticks=6,
    )  # fmt: skip
    node.on_said(RankLinked(3, hello))
    return links[0].close


def keep(node):
    return lambda: node.on_joined((ChildId("vllm-0"),))


@pytest.mark.parametrize(
    ("make", "said"),
    [(port, "FreePort"), (child, "Forget"), (link, "DropRank"), (keep, "KeepOnly")],
)
async def test_what_concerns_the_session_alone_is_said_while_it_lasts(make, said):
    async with bed() as it:
        make(it.node)()
        assert await it.told() == ["KeepOnly", said]
    async with bed() as it:
        mention = make(it.node)
        await it.break_off()
        mention()


async def test_a_hurried_end_there_waits_for_the_loss_and_for_nothing_else():
    async with bed() as it:
        made = RemoteChild(
            it.node,
            child_id=ChildId("vllm-0"),
            incarnation=Incarnation("vllm-0-1"),
            identity=ProcessIdentity(5, 6, "b"),
        )
        hurry, ended = anyio.Event(), []

        async def end():
            deadlines = StopDeadlines(term_grace_s=5.0, kill_wait_s=5.0, hurried_grace_s=0.1)
            ended.append(await made.tree.end(deadlines, hurry=hurry))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end)
            await clock.sleep(1.0)
            await it.break_off()
            hurry.set()
            await clock.sleep(1.0)
            assert not ended
            it.node.on_lost("its lease has ended")
        assert "its lease has ended" in ended[0].lost_with


async def test_whoever_waits_for_room_hears_of_the_end_of_the_session():
    async with bed() as it:
        piece = b"x" * (1 << 20)
        for number in range(20):
            it.node.say(ToRank(number, piece))
        waiting = anyio.Event()

        async def stream():
            waiting.set()
            with pytest.raises(PeerError, match="was lost while much was under way"):
                await it.node.stream(ToRank(21, piece))

        with anyio.fail_after(3.0):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream)
                await waiting.wait()
                await it.break_off()
