"""The link, its followers and torchrun over hosts with addresses of their own."""

import sys
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import anyio
import psutil
import pytest

from fake_runs import write_config
from gangs import config as supervision
from gangs import of, ready, trained
from libra import clock
from libra.config.load import load_config
from libra.errors import PeerError
from libra.planner.plan import TrainPlacement
from libra.version import __version__
from libra.wire.node import Leave
from libra.wire.rank import TrainStep
from libra_supervisor.app.recall import record_run_id
from libra_supervisor.app.shared_config import config_digest
from libra_supervisor.events import ChildWaiting, GangLost
from libra_supervisor.instances.port_lease import lease_port
from libra_supervisor.nodes.interface import interface_of
from libra_supervisor.nodes.leader import LeaderEnd, NodeSaid
from libra_supervisor.nodes.lease import LeaseTerms
from libra_supervisor.nodes.members import Charter, NodeJoined, NodeLost, NodeSuspected
from libra_supervisor.nodes.remote import RemoteNode, remote_port
from libra_supervisor.nodes.remote_child import RemoteSpawner
from libra_supervisor.nodes.term import take_term
from libra_supervisor.nodes.transport import node_listener
from libra_supervisor.ranks.agents import AgentsSpawner
from libra_supervisor.ranks.gang import Gang
from libra_supervisor.ranks.torchrun import AgentSite, GangSite
from libra_supervisor.run_directory import RunDirectory
from netns_hosts import crash, hosts
from processes import CHILDREN, site, until

TOKEN = "a token of these nodes"
TERMS = LeaseTerms(lease_s=4.0, orphan_grace_s=20.0)
USUAL_TERMS = LeaseTerms(lease_s=15.0, orphan_grace_s=20.0)
pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


class Cluster:
    """The leader's side on host 0, in the test's own process; followers are real programs."""

    def __init__(self, made, place, run_config, terms):
        self.hosts, self.place, self.run_config = made, place, run_config
        self.news = []
        self.directory = RunDirectory(place.run_dir)
        self.directory.create()
        record_run_id(self.directory, place.run_id)
        charter = Charter(
            run_id=place.run_id,
            run_directory=str(place.run_dir),
            term=take_term(place.run_dir, "the test"),
            leader="the test",
            version=__version__,
            config_digest=config_digest(load_config(run_config, purpose="plan").config),
            num_nodes=len(made.addresses),
            lease=terms,
        )
        self.leader = LeaderEnd(charter, post=self.post, rng=Random(1))
        self.nodes = {rank: RemoteNode(rank, self.leader) for rank in range(1, len(made.addresses))}
        self.followers = {}

    async def post(self, event):
        self.news.append(event)
        match event:
            case NodeJoined(node):
                self.nodes[node].on_joined(())
            case NodeLost(node, reason):
                self.nodes[node].on_lost(reason)
            case NodeSaid(node, said):
                self.nodes[node].on_said(said)

    def start(self, rank):
        self.followers[rank] = self.hosts.follow(
            rank,
            port=self.port,
            config=self.run_config,
            run_dir=self.place.run_dir,
            token=TOKEN,
        )

    async def until_members(self):
        await until(lambda: all(node.is_member for node in self.nodes.values()), within_s=60)

    def kinds(self, rank):
        links = (NodeJoined, NodeSuspected, NodeLost)
        return [type(it) for it in self.news if isinstance(it, links) and it.node == rank]

    def said(self):
        outs = sorted(self.place.run_dir.glob("follower-*.out"))
        return "\n".join(path.read_text()[-3000:] for path in outs)


@asynccontextmanager
async def cluster(tmp_path, *, num_hosts=3, terms=TERMS):
    run_config = write_config(tmp_path, total_steps=1)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with hosts(num_hosts) as made:
        async with site(run_dir) as place, anyio.create_task_group() as tasks:
            found = Cluster(made, place, run_config, terms)
            async with node_listener(
                found.leader.serve, host=made.addresses[0], port=0, token=TOKEN
            ) as found.port:
                tasks.start_soon(found.leader.run)
                for rank in found.nodes:
                    found.start(rank)
                await found.until_members()
                yield found
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def torchrun_over(found):
    """The real torchrun with a rank on every host, over gloo."""
    path = {"PYTHONPATH": ":".join(str(Path(p).resolve()) for p in sys.path if p)}
    agents = tuple(
        AgentSite(node=rank, host=address, num_ranks=1, env=path)
        for rank, address in enumerate(found.hosts.addresses)
    )
    here = {"GLOO_SOCKET_IFNAME": interface_of(agents[0].host), "PATH": "/usr/bin:/bin"}
    agents = (AgentSite(node=0, host=agents[0].host, num_ranks=1, env=path | here), *agents[1:])
    remote = {rank: RemoteSpawner(node) for rank, node in found.nodes.items()}

    async def hold(node):
        if node:
            return await remote_port(found.nodes[node], agents[node].host, 0)
        return lease_port(agents[0].host)

    async def hindrance():
        reasons = [await node.hindrance() for node in found.nodes.values()]
        return next((reason for reason in reasons if reason is not None), None)

    async def choose(_attempt):
        return None

    gang = Gang(
        GangSite(
            run_id=found.place.run_id,
            directory=found.directory,
            placement=TrainPlacement(
                tp=1, pp=1, cp=1, ep=1, dp=len(agents), slots=tuple(range(len(agents)))
            ),
            device="cpu",
            env={},
            agents=agents,
            program=(str(CHILDREN / "torch_rank.py"),),
        ),
        spawner=AgentsSpawner(lambda node: remote.get(node, found.place.spawner), hold),
        config=supervision(start_timeout_s=120),
        choose=choose,
        post=found.place.post,
        rng=Random(5),
        hindrance=hindrance,
    )
    async with anyio.create_task_group() as tasks:

        async def welcome(hello, link):
            try:
                await gang.welcome(hello, link)
            except PeerError:
                pass
            finally:
                link.close()

        for node in found.nodes.values():
            node.on_rank = lambda said, link: tasks.start_soon(welcome, said.hello, link)
        tasks.start_soon(gang.run)
        yield gang
        gang.stop()
        with anyio.fail_after(60):
            await gang.until_down()
        tasks.cancel_scope.cancel()


async def test_torchrun_spans_three_hosts_and_survives_the_crash_of_one(tmp_path):
    async with cluster(tmp_path) as found, torchrun_over(found) as gang:
        place = found.place
        await ready(place, within_s=120)
        assert sorted(gang.members) == [0, 1, 2]
        await gang.broadcast(TrainStep(1, ()))
        await until(lambda: trained(place, 1) == [0, 1, 2], within_s=20)
        crash(found.followers[2])
        await until(lambda: of(place, GangLost), within_s=60)
        await until(lambda: of(place, ChildWaiting), within_s=60)
        assert "node 2" in of(place, ChildWaiting)[0].reason
        found.start(2)
        await ready(place, 2, within_s=120)
        await gang.broadcast(TrainStep(1, ()))
        await until(lambda: trained(place, 2) == [0, 1, 2], within_s=20)
        assert found.kinds(1) == [NodeJoined]
        assert found.kinds(2)[0] is NodeJoined
        assert found.kinds(2)[-1] is NodeJoined
        assert NodeLost in found.kinds(2)


async def test_a_link_that_is_cut_and_healed_costs_what_the_lease_says(tmp_path):
    async with cluster(tmp_path) as found:
        node, place = found.nodes[1], found.place
        spec = place.spec("/bin/sleep", "1000", child_id="server")
        server = await RemoteSpawner(node).spawn(spec, "server-1")
        ranks = place.spec("/bin/sleep", "1000", child_id="ranks", is_bound_to_supervisor=True)
        bound = await RemoteSpawner(node).spawn(ranks, "ranks-1")
        found.hosts.cut(1)
        await clock.sleep(TERMS.lease_s / 4)
        found.hosts.heal(1)
        await clock.sleep(TERMS.lease_s)
        # A short cut is nothing.
        assert NodeLost not in found.kinds(1)
        found.hosts.cut(1)
        cut_at = clock.now()
        await until(lambda: NodeLost in found.kinds(1), within_s=30)
        assert clock.now() - cut_at > TERMS.lease_s / 2
        assert (await bound.wait()).why.startswith("node 1 was lost")
        assert (await server.wait()).why.startswith("node 1 was lost")
        found.hosts.heal(1)
        await until(lambda: found.kinds(1)[-1] is NodeJoined, within_s=30)
        again = await RemoteSpawner(node).spawn(spec, "server-2")
        assert (await again.last_lines(5)) == ()
        assert found.kinds(2) == [NodeJoined]
        for number, one in found.nodes.items():
            one.say(Leave(0, "the run is over"))
            with anyio.fail_after(30):
                while found.followers[number].poll() is None:
                    await clock.sleep(0.1)
            assert found.followers[number].returncode == 0, found.said()


async def test_a_narrow_link_that_drops_packets_loses_nothing(tmp_path):
    # What it carries here takes five seconds, and beats wait behind it.
    async with cluster(tmp_path, num_hosts=2, terms=USUAL_TERMS) as found:
        found.hosts.worsen(1)
        spawner = RemoteSpawner(found.nodes[1])
        names = [f"echo-{number}" for number in range(12)]

        async def one(name):
            script = f"echo {name}; exit 7"
            spec = found.place.spec(
                "/bin/sh", "-c", script, child_id=name, env={"PADDING": "x" * 20_000}
            )
            child = await spawner.spawn(spec, f"{name}-1")
            assert (await child.wait()).exit_code == 7
            log = found.place.run_dir / "logs" / f"{name}.log"
            await until(log.exists)

        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(one, name)
        assert found.kinds(1) == [NodeJoined]


async def test_the_leader_listens_on_its_own_address_alone(tmp_path):
    async with cluster(tmp_path, num_hosts=2) as found:
        listening = [
            it.laddr.ip
            for it in psutil.Process().net_connections("tcp")
            if it.status == psutil.CONN_LISTEN and it.laddr.port == found.port
        ]
        assert listening == [found.hosts.addresses[0]]
