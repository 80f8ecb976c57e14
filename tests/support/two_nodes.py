"""A leader and a follower in one process, with real children, over a network that can be cut."""

import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import anyio

from fake_links import FakeNet
from libra import clock
from libra.wire.node import PROTOCOL, Hello
from libra_supervisor.app.node_hands import NodeHands
from libra_supervisor.app.rank_relay import Tongue
from libra_supervisor.nodes.allegiance import Allegiance
from libra_supervisor.nodes.follower import FollowerEnd
from libra_supervisor.nodes.leader import LeaderEnd, NodeSaid
from libra_supervisor.nodes.lease import LeaseTerms
from libra_supervisor.nodes.members import Charter, NodeJoined, NodeLost
from libra_supervisor.nodes.remote import RemoteNode
from libra_supervisor.nodes.session import KeepLimits
from libra_supervisor.process.tree import StopDeadlines
from libra_supervisor.ranks.link import accept_ranks, rank_socket

TERMS = LeaseTerms(lease_s=3.0, orphan_grace_s=30.0)


class TwoNodes:
    """`place` is the follower's process machinery."""

    def __init__(self, place, tasks, make=None):
        """`make` gives what makes trajectories there: (end of the link, tasks) -> Making."""
        self.place, self.tasks, self.make = place, tasks, make
        self.listener = None
        self.net = FakeNet(delay_s=0.001)
        self.news, self.left = [], []
        self.keep = ()
        self.lead(term=1)

    def lead(self, *, term):
        """Another leader takes over; the one before is gone at once."""
        if term > 1:
            self.scope.cancel()
            self.node.on_lost("its process is gone, and nobody is left to ask")
            self.net.cut()
            self.net.mend()
        charter = Charter(
            run_id=self.place.run_id, run_directory=str(self.place.run_dir), term=term,
            leader=f"L{term}", version="1", config_digest="d", num_nodes=2, lease=TERMS,
        )  # fmt: skip
        self.leader = LeaderEnd(charter, post=self.post, rng=Random(term))
        self.node = RemoteNode(1, self.leader)
        self.net.serve = self.leader.serve
        scope = self.scope = anyio.CancelScope()
        leader = self.leader

        async def run():
            with scope:
                await leader.run()

        self.tasks.start_soon(run)

    async def post(self, event):
        self.news.append(event)
        match event:
            case NodeJoined():
                self.node.on_joined(self.keep)
                if self.listener is not None:
                    self.listener.on_joined(1)
            case NodeLost(_, reason):
                self.node.on_lost(reason)
                if self.listener is not None:
                    self.listener.on_lost(1)
            case NodeSaid(_, said):
                self.node.on_said(said)

    async def follow(self):
        """The follower's program."""
        about = Hello(
            protocol=PROTOCOL, version="1", config_digest="d", run_id="", node=1, host="h",
            boot_id="b", pid=os.getpid(), start_ticks=1, dial=0,
        )  # fmt: skip

        async def on_begin(_welcome):
            pass

        async with anyio.create_task_group() as tasks:
            self.hands = NodeHands(
                self.place.spawner,
                run_id=self.place.run_id,
                tasks=tasks,
                environ={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p),
                },
                devices=("GPU-a", "GPU-b"),
                deadlines=StopDeadlines(term_grace_s=1, kill_wait_s=5),
                on_begin=on_begin,
                on_leave=lambda *how: self.left.append(how),
            )
            side = Allegiance(about, TERMS, KeepLimits(), now=clock.now())
            end = FollowerEnd(side, self.hands, dial=self.net.dial, rng=Random(3))
            self.hands.speak_through(Tongue(end.say, end.say_when_room))
            if self.make is not None:
                self.hands.make_through(self.make(end, tasks))
            directory = self.place.run_dir / "node"
            directory.mkdir()
            with rank_socket(directory) as (path, listener):
                self.hands.control_socket = path
                tasks.start_soon(
                    lambda: accept_ranks(
                        listener, run_id=self.place.run_id, welcome=self.hands.ranks.welcome
                    )
                )
                try:
                    await end.run()
                finally:
                    with anyio.CancelScope(shield=True):
                        await self.hands.end_servers("the test is over")

    async def until_member(self):
        with anyio.fail_after(20):
            while not self.node.is_member:
                await clock.sleep(0.02)


@asynccontextmanager
async def two_nodes(place, make=None):
    async with anyio.create_task_group() as tasks:
        nodes = TwoNodes(place, tasks, make)
        tasks.start_soon(nodes.follow)
        await nodes.until_member()
        yield nodes
        tasks.cancel_scope.cancel()
