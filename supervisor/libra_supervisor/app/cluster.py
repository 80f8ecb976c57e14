"""The leader's cluster: the link to every follower, and what the parts of a run use of it.

cluster = Cluster(launch, run_id, site=..., token=..., post=...)
async with cluster.running():
    ...
    await cluster.dismiss(exit_code, reason)

The loop knows nothing of it: a child on another node is a child, and a node that is lost is the end
of its children.
"""

import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import groupby
from random import Random
from typing import Final, Protocol, TypeAlias, assert_never
from weakref import WeakValueDictionary

import anyio
import anyio.abc
import anyio.to_thread

from libra import clock
from libra.config.run import RunConfig
from libra.errors import LibraError, PeerError, SiteError
from libra.ids import ChildId, NodeRank, RunId
from libra.planner.plan import TrainPlacement
from libra.tracing.log import get_log
from libra.version import __version__
from libra.wire.api import NodeStatus
from libra.wire.instance import WeightsReceipt
from libra.wire.node import Leave, RankLinked, StopAsked
from libra.wire.rank import Hello
from libra_supervisor import events
from libra_supervisor.app.following import GLOO_VARIABLE
from libra_supervisor.app.shared_config import config_digest, option_digests
from libra_supervisor.events import StopRequested
from libra_supervisor.instances.port_lease import lease_port
from libra_supervisor.nodes.interface import interface_of
from libra_supervisor.nodes.leader import ClusterEvent, LeaderEnd, NodeSaid
from libra_supervisor.nodes.lease import LeaseTerms
from libra_supervisor.nodes.member_record import MemberRecord
from libra_supervisor.nodes.members import (
    Charter,
    NodeJoined,
    NodeLost,
    NodeRecovered,
    NodeSuspected,
)
from libra_supervisor.nodes.relayed_link import RelayedLink
from libra_supervisor.nodes.remote import NOT_YET, RemoteNode, remote_port
from libra_supervisor.nodes.remote_child import RemoteSpawner
from libra_supervisor.nodes.site import LEADER, Site
from libra_supervisor.nodes.term import (
    TERM_NAME,
    RunEnd,
    TermRecord,
    end_term,
    read_term,
    take_term,
)
from libra_supervisor.nodes.transport import leader_tls, node_listener
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.ranks.agents import AgentsSpawner, HeldPort
from libra_supervisor.ranks.gang import Gang
from libra_supervisor.ranks.torchrun import AgentSite
from libra_supervisor.run_directory import RunDirectory

ToLoop: TypeAlias = StopRequested | events.NodeJoined | events.NodeLost

_DISMISS_S: Final = 5.0
_POLL_S: Final = 0.1

_log = get_log()


class NodeListener(Protocol):
    """Who wants to know which nodes come and go."""

    def on_joined(self, node: NodeRank) -> None:
        """A new session; whatever it did in an earlier one is over."""

    def on_suspected(self, node: NodeRank) -> None: ...

    def on_recovered(self, node: NodeRank) -> None: ...

    def on_lost(self, node: NodeRank) -> None: ...


class Cluster:
    """Node 0's view of all nodes. Made inside the event loop; takes the next term."""

    def __init__(
        self,
        directory: RunDirectory,
        config: RunConfig,
        run_id: RunId,
        *,
        site: Site,
        token: str,
        post: Callable[[ToLoop], Awaitable[None]],
    ) -> None:
        """`config` is what the nodes were started with, before a plan was written into it."""
        self.site = site
        self._directory = directory
        self._cluster = config.cluster
        self._token = token
        self._post = post
        self._leader = secrets.token_hex(8)
        self._term = take_term(directory.root, self._leader)
        lease = LeaseTerms(
            lease_s=self._cluster.node_lease_s, orphan_grace_s=self._cluster.node_orphan_grace_s
        )
        self._lease = lease
        charter = Charter(
            run_id=run_id,
            run_directory=str(directory.root),
            term=self._term,
            leader=self._leader,
            version=__version__,
            config_digest=config_digest(config),
            option_digests=option_digests(config),
            num_nodes=site.num_nodes,
            lease=lease,
        )
        self._end = LeaderEnd(
            charter,
            post=self._on_event,
            rng=Random(secrets.randbits(64)),  # noqa: S311 - names
            is_replaced=self._has_successor,
        )
        self.nodes: Mapping[NodeRank, RemoteNode] = {
            NodeRank(rank): RemoteNode(NodeRank(rank), self._end)
            for rank in range(1, site.num_nodes)
        }
        self._tasks: anyio.abc.TaskGroup | None = None
        self._gangs: WeakValueDictionary[str, Gang] = WeakValueDictionary()
        """By name, as long as they live."""

        self.listener: NodeListener | None = None
        """Hears of nodes after their children have."""

        self._is_replaced = False
        self._why_replaced = ""
        self._may_stay: dict[NodeRank, frozenset[ChildId]] | None = None
        self._joined_early: set[NodeRank] = set()
        self._leave: Leave | None = None
        """The run is over: what every node is told."""

    @property
    def term(self) -> int:
        return self._term

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen and lead while the block runs.

        Raises SiteError, from the block too, when the port is in use or another leader took over.
        """
        tls = leader_tls(
            self._cluster.node_tls_cert, self._cluster.node_tls_key, self._cluster.node_tls_ca
        )
        host, port = self.site.own_host, self.site.port
        async with (
            node_listener(
                self._end.serve,
                host=host,
                port=port,
                token=self._token,
                tls=tls,
                num_followers=len(self.nodes),
            ) as bound,
            anyio.create_task_group() as tasks,
        ):
            _log.info("leads", term=self._term, host=host, port=bound)
            self._tasks = tasks
            for node in self.nodes.values():
                node.on_rank = self._on_rank
                node.on_stop = self._on_stop
            tasks.start_soon(self._end.run)
            tasks.start_soon(self._watch_term)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    def let_stay(self, children: Mapping[NodeRank, frozenset[ChildId]]) -> None:
        """What may go on of what an earlier leader started on a node; the rest is ended there.

        Until this is said no node is a member. It holds for the first session of each.
        """
        self._may_stay = dict(children)
        for node in sorted(self._joined_early):
            self._take_in(node)

    def spawner_for(self, node: NodeRank, own: Spawner) -> Spawner:
        """What starts children on `node`."""
        return own if node == LEADER else RemoteSpawner(self.nodes[node])

    def gang_spawner(self, own: Spawner) -> AgentsSpawner:
        return AgentsSpawner(lambda node: self.spawner_for(node, own), self._hold_port)

    async def gang_hindrance(self, placement: TrainPlacement) -> str | None:
        """Why no attempt may begin: its nodes have to be there, and nobody may obey another."""
        if not self._end.reigns():
            return NOT_YET
        used = {placement.node_of_rank(rank) for rank in range(len(placement.slots))}
        for node in sorted(used - {LEADER}):
            if (reason := await self.nodes[node].hindrance()) is not None:
                return reason
        return None

    def agents(
        self, placement: TrainPlacement, environ: Mapping[str, str], devices: Sequence[str]
    ) -> tuple[AgentSite, ...]:
        """One for each node that has ranks, in the order of the ranks.

        `devices` are this node's CUDA devices by slot, empty on CPU; other nodes look up their own.
        """
        ranks = [(placement.node_of_rank(rank), slot) for rank, slot in enumerate(placement.slots)]
        return tuple(
            self._agent(node, [slot for _, slot in group], environ, devices)
            for node, group in groupby(ranks, key=lambda rank: rank[0])
        )

    async def read_weights(
        self, node: NodeRank, directory: str, manifest_hash: str
    ) -> WeightsReceipt | None:
        """`libra_supervisor.ports.Readers`."""
        return await self.nodes[node].read_weights(directory, manifest_hash)

    def take_in_ranks_for(self, gang: Gang, name: ChildId) -> None:
        """Ranks of that name which link on other nodes belong to it."""
        self._gangs[name] = gang

    async def dismiss(self, exit_code: int, reason: str) -> None:
        """Have every member leave; waits a moment for the word to get there.

        Who is not there, and knows this leader, reads it from the run directory.
        Who was replaced says nothing: its followers are the other leader's.
        """
        if self._is_replaced:
            return
        self._leave = Leave(exit_code, reason)
        for node in self.nodes:
            self._say_leave(node)
        with anyio.move_on_after(_DISMISS_S):  # the disk may hang
            await self._write_end(RunEnd(exit_code, reason))
        with anyio.move_on_after(_DISMISS_S):
            while any(it.session_id and it.session.num_kept for it in self._end.records):
                await clock.sleep(_POLL_S)

    def status(self, note_of: Callable[[NodeRank], str]) -> tuple[NodeStatus, ...]:
        """Every node, this one first; `note_of` adds what the run makes of it."""
        now = clock.now()
        own = NodeStatus(node=0, host=self.site.own_host, state="leads", since_s=None, detail="")
        others = (
            NodeStatus(
                node=record.node,
                host=self.site.hosts[record.node],
                state=record.state.value,
                since_s=now - record.since,
                detail="; ".join(filter(None, (*_reasons(record), note_of(record.node)))),
            )
            for record in self._end.records
        )
        return (own, *others)

    # Parts

    def _agent(
        self, node: NodeRank, slots: list[int], environ: Mapping[str, str], devices: Sequence[str]
    ) -> AgentSite:
        host = self.site.hosts[node]
        env: dict[str, str] = {}
        if node == LEADER:
            env = dict(environ)
            interface = interface_of(host)
            if GLOO_VARIABLE not in env and interface is not None:
                env[GLOO_VARIABLE] = interface
        return AgentSite(
            node=node,
            host=host,
            num_ranks=len(slots),
            env=env,
            visible_devices=_visible(node, slots, devices),
        )

    async def _hold_port(self, node: NodeRank) -> HeldPort:
        host = self.site.hosts[node]
        if node == LEADER:
            return lease_port(host)
        return await remote_port(self.nodes[node], host, 0)

    async def _on_event(self, event: ClusterEvent) -> None:  # noqa: C901, PLR0912 - a table
        match event:
            case NodeSaid(node, said):
                self.nodes[node].on_said(said)
            case NodeJoined(node, hello, is_return):
                _log.info("node_joined", node=node, host=hello.host, is_return=is_return)
                self._joined_early.add(node)
                self._take_in(node)
                self._say_leave(node)
                await self._post(events.NodeJoined(node))
            case NodeSuspected(node, reason):
                _log.warning("node_suspected", node=node, why=reason)
                if self.listener is not None:
                    self.listener.on_suspected(node)
            case NodeRecovered(node):
                _log.info("node_recovered", node=node)
                if self.listener is not None:
                    self.listener.on_recovered(node)
            case NodeLost(node, reason):
                _log.warning("node_lost", node=node, why=reason)
                self._joined_early.discard(node)
                self.nodes[node].on_lost(reason)
                if self.listener is not None:
                    self.listener.on_lost(node)
                await self._post(events.NodeLost(node, reason))
            case _:
                assert_never(event)

    def _say_leave(self, node: NodeRank) -> None:
        if self._leave is not None:
            with suppress(PeerError):  # it has no session
                self._end.tell(node, self._leave)

    async def _write_end(self, end: RunEnd) -> None:
        if await self._has_successor():
            return
        write = partial(end_term, self._directory.root, self._term, self._leader, end)
        try:
            await anyio.to_thread.run_sync(write, abandon_on_cancel=True)
        except SiteError as error:
            _log.warning("end_not_written", why=str(error))

    def _take_in(self, node: NodeRank) -> None:
        """Have it end what may not stay; from then on it is asked for things."""
        if self._may_stay is None:
            return
        self._joined_early.discard(node)
        self.nodes[node].on_joined(tuple(sorted(self._may_stay.pop(node, ()))))
        if self.listener is not None:
            self.listener.on_joined(node)

    def _on_rank(self, linked: RankLinked, link: RelayedLink) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(self._welcome, linked, link)

    async def _welcome(self, linked: RankLinked, link: RelayedLink) -> None:
        try:
            await self._gang_of(linked.hello).welcome(linked.hello, link)
        except PeerError as error:
            _log.info("rank_turned_away", rank=linked.hello.rank, why=str(error))
        finally:
            link.close()

    def _gang_of(self, hello: Hello) -> Gang:
        gang = self._gangs.get(hello.gang)
        if gang is None:
            raise PeerError(f"nobody waits for ranks of {hello.gang}")
        return gang

    def _on_stop(self, asked: StopAsked) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(self._ask_to_stop, asked)

    async def _ask_to_stop(self, asked: StopAsked) -> None:
        await self._post(StopRequested(asked.reason, now=asked.in_hurry, exit_code=asked.exit_code))

    async def check_after_stall(self, stalled_s: float) -> None:
        """Before anything is done by a leader that stood still for so long.

        Raises SiteError when it was replaced meanwhile.
        """
        if stalled_s >= self._lease.suspect_after_s:
            _log.warning("leader_stalled", stalled_s=round(stalled_s, 1))
            await self._check_term()

    async def _watch_term(self) -> None:
        """End a leader that was taken for dead and replaced, on another machine, while it slept."""
        while True:
            await clock.sleep(self._lease.beat_period_s)
            await self._check_term()

    async def _check_term(self) -> None:
        if not await self._has_successor():
            return
        self._is_replaced = True
        for node in self.nodes.values():
            # They obey the other leader: what they have of this one is not waited for.
            node.on_lost(self._why_replaced)
        raise SiteError(self._why_replaced)

    async def _has_successor(self) -> bool:
        try:
            found = await anyio.to_thread.run_sync(
                read_term, self._directory.root, abandon_on_cancel=True
            )
        except LibraError as error:
            _log.warning("term_not_read", why=str(error))
            return False
        self._why_replaced = self._why_not_ours(found)
        return bool(self._why_replaced)

    def _why_not_ours(self, found: TermRecord | None) -> str:
        root, own = self._directory.root, f"(term {self._term}, pid {os.getpid()})"
        if found is None:
            return (
                f"{root / TERM_NAME}, which says that this process {own} leads, is gone: somebody "
                "removed it or the run directory, and another leader may have begun"
            )
        if (found.term, found.leader) == (self._term, self._leader):
            return ""
        return f"another leader (term {found.term}) took over {root} from this one {own}"


def _reasons(record: MemberRecord) -> tuple[str, ...]:
    """What the leader knows of why a node is away, or of another one in its name."""
    refused = f"refused: {record.why_refused}" if record.why_refused else ""
    return record.why_silent, refused


def _visible(node: NodeRank, slots: list[int], devices: Sequence[str]) -> tuple[str, ...]:
    if not devices:
        return ()
    return tuple(devices[slot] if node == LEADER else str(slot) for slot in slots)
