"""A gang on several nodes as one child: all agents are started together and ended together.

`AgentsSpawner` looks to supervision like the spawner of one process. What it starts lives as long
as all of its agents do: when the first one ends, for whatever reason, the child has ended.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

import anyio

from libra.errors import ChildError, InvariantError, LibraError, NodeAwayError, came_from
from libra.ids import ChildId, Incarnation, NodeRank
from libra_supervisor.process.child import ExitStatus, RunningChild
from libra_supervisor.process.identity import ProcessIdentity
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.process.spec import ProcessSpec
from libra_supervisor.process.tree import EndableTree, StopDeadlines, TreeEnded
from libra_supervisor.ranks.torchrun import GangSpec, with_port


class HeldPort(Protocol):
    """A port that nobody else is given until it is closed."""

    port: int

    def close(self) -> None: ...


HoldPort: TypeAlias = Callable[[NodeRank], Awaitable[HeldPort]]
"""Holds a free port of a node. Raises LibraError when there is none or the node is away."""


class AgentsSpawner:
    """`Spawner` for attempts on several nodes."""

    def __init__(self, spawner_of: Callable[[NodeRank], Spawner], hold_port: HoldPort) -> None:
        self._spawner_of = spawner_of
        self._hold_port = hold_port

    async def spawn(self, spec: ProcessSpec, incarnation: Incarnation) -> RunningChild:
        """Start every agent, or none. Raises ChildError."""
        if not isinstance(spec, GangSpec):
            return await self._spawner_of(NodeRank(0)).spawn(spec, incarnation)
        try:
            held = await self._hold_port(spec.parts[0][0])
        except LibraError as error:
            raise ChildError(f"the ranks have no port to meet at: {error}") from error
        try:
            agents = await self._all_started(spec, incarnation, held.port)
        except BaseException:
            held.close()
            raise
        return AgentsChild(spec.child_id, incarnation, agents, held)

    async def adopt(
        self, child_id: ChildId, identity: ProcessIdentity, incarnation: Incarnation
    ) -> RunningChild | None:
        """Raises InvariantError: ranks never outlive their supervisor."""
        raise InvariantError(f"{incarnation} ({child_id}, pid {identity.pid}) cannot be adopted")

    async def clear(self, child_id: ChildId, kill_wait_s: float) -> TreeEnded:
        """On this node; the others end what is left there before they start anything."""
        return await self._spawner_of(NodeRank(0)).clear(child_id, kill_wait_s)

    async def _all_started(
        self, spec: GangSpec, incarnation: Incarnation, port: int
    ) -> dict[NodeRank, RunningChild]:
        started: dict[NodeRank, RunningChild] = {}
        errors: list[ChildError] = []

        async def start(node: NodeRank, part: ProcessSpec) -> None:
            try:
                name = Incarnation(f"{incarnation}@{node}")
                started[node] = await self._spawner_of(node).spawn(with_port(part, port), name)
            except ChildError as error:
                errors.append(error)

        try:
            async with anyio.create_task_group() as tasks:
                for node, part in spec.parts:
                    tasks.start_soon(start, node, part)
        except BaseException:
            await _end_at_once(list(started.values()))
            raise
        if errors:
            await _end_at_once(list(started.values()))
            raise next((it for it in errors if came_from(it, NodeAwayError)), errors[0])
        return {node: started[node] for node, _ in spec.parts}


class AgentsChild:
    """`RunningChild` over the agents of one attempt."""

    def __init__(
        self,
        child_id: ChildId,
        incarnation: Incarnation,
        agents: dict[NodeRank, RunningChild],
        held: HeldPort,
    ) -> None:
        self.child_id = child_id
        self.incarnation = incarnation
        self._agents = agents
        self._held = held
        self._status: ExitStatus | None = None
        self._first: RunningChild | None = None
        own = self._own
        self.tree: EndableTree = AgentsTree(
            [agent.tree for agent in agents.values()], own=None if own is None else own.tree
        )

    @property
    def identity(self) -> ProcessIdentity:
        """Of the agent here, if there is one: the others' are pids of other machines."""
        return (self._own or next(iter(self._agents.values()))).identity

    async def wait(self) -> ExitStatus:
        """Until the first agent has ended."""
        if self._status is None:
            async with anyio.create_task_group() as tasks:

                async def note(agent: RunningChild) -> None:
                    status = await agent.wait()
                    if self._status is None:
                        self._status, self._first = status, agent
                    tasks.cancel_scope.cancel()

                for agent in self._agents.values():
                    tasks.start_soon(note, agent)
        if self._status is None:
            raise InvariantError("an attempt without agents was waited for")
        return self._status

    async def last_lines(self, num_lines: int) -> tuple[str, ...]:
        """Of the agent that ended first, which knows most; before that, of the first one."""
        agent = self._first or next(iter(self._agents.values()))
        return await agent.last_lines(num_lines)

    def attach_rank(self, rank: int, out_fd: int, err_fd: int) -> None:
        """Of a rank here; the others' are attached on their own nodes."""
        if self._own is None:
            raise InvariantError(f"rank {rank} has pipes here, where no agent is")
        self._own.attach_rank(rank, out_fd, err_fd)

    def reap(self) -> None:
        for agent in self._agents.values():
            agent.reap()
        self._held.close()

    @property
    def _own(self) -> RunningChild | None:
        return self._agents.get(NodeRank(0))


class AgentsTree:
    """`EndableTree` over the trees of all agents."""

    def __init__(self, trees: Sequence[EndableTree], *, own: EndableTree | None) -> None:
        self._trees = trees
        self._own = own

    def add_root(self, identity: ProcessIdentity) -> None:
        if self._own is not None:
            self._own.add_root(identity)

    async def observe(self, *, max_age_s: float = 0.0) -> None:
        if self._own is not None:
            await self._own.observe(max_age_s=max_age_s)

    async def end(self, deadlines: StopDeadlines, *, hurry: anyio.Event | None = None) -> TreeEnded:
        """End all side by side: a rank that waits for one that is gone would wait for ever."""
        ended: list[TreeEnded] = []

        async def end(tree: EndableTree) -> None:
            ended.append(await tree.end(deadlines, hurry=hurry))

        async with anyio.create_task_group() as tasks:
            for tree in self._trees:
                tasks.start_soon(end, tree)
        return TreeEnded(
            survivors=tuple(row for one in ended for row in one.survivors),
            detail="; ".join(one.detail for one in ended if one.detail),
            num_killed=sum(one.num_killed for one in ended),
            ended_in_grace=all(one.ended_in_grace for one in ended),
            removed_segments=tuple(name for one in ended for name in one.removed_segments),
            took_s=max((one.took_s for one in ended), default=0.0),
            lost_with="; ".join(sorted({one.lost_with for one in ended if one.lost_with})),
        )


async def _end_at_once(agents: list[RunningChild]) -> None:
    """End those that were started when one was not."""
    with anyio.CancelScope(shield=True):  # bounded by the deadlines
        async with anyio.create_task_group() as tasks:
            for agent in agents:
                tasks.start_soon(agent.tree.end, StopDeadlines(term_grace_s=0))
    for agent in agents:
        agent.reap()
