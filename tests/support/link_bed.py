"""One leader and one follower on a network that is cut, slow or silent."""

from contextlib import asynccontextmanager
from random import Random

import anyio
import msgspec

from fake_links import FakeNet
from libra import clock
from libra.errors import PeerError
from libra.wire.node import PROTOCOL, DropRank, FromRank, Hello
from libra_supervisor.nodes.allegiance import Allegiance
from libra_supervisor.nodes.follower import FollowerEnd
from libra_supervisor.nodes.leader import LeaderEnd, NodeSaid
from libra_supervisor.nodes.lease import LeaseTerms
from libra_supervisor.nodes.members import Charter
from libra_supervisor.nodes.session import KeepLimits

TERMS = LeaseTerms(lease_s=10.0, orphan_grace_s=30.0)


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
