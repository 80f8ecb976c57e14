"""What a follower does for its leader: starts and ends processes here, holds ports, looks.

Ranks (children that are bound) end with the lease; servers wait for a leader. A child that nobody
claims in a new session is ended before anything is started under its name, so a slot never has two.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol, assert_never

import anyio
import anyio.abc

from libra.errors import InvariantError, LibraError, PeerError, SiteError
from libra.ids import ChildId, Incarnation, RunId
from libra.storage.lease_file import LEASE_VARIABLE
from libra.tracing.log import get_log
from libra.wire import node as wire
from libra.wire import node_rollouts as rollouts
from libra.wire.node import NodeCommand, NodeEvent, Welcome
from libra.wire.node_rollouts import RolloutOrder
from libra.wire.rank import Hello as RankHello
from libra_supervisor.app.node_looks import devices_of, read, seen
from libra_supervisor.app.rank_relay import RankRelay, Tongue
from libra_supervisor.instances.port_lease import PortLease, lease_port
from libra_supervisor.process.child import RunningChild
from libra_supervisor.process.identity import boot_id
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.process.spec import Limits, ProcessSpec
from libra_supervisor.process.tree import StopDeadlines, TreeEnded

if TYPE_CHECKING:
    from libra_supervisor.app.lease_note import LeaseNote

CONTROL_VARIABLE: Final = "LIBRA_CONTROL"
DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
ATTEMPT_VARIABLE: Final = "LIBRA_ATTEMPT"
GANG_VARIABLE: Final = "LIBRA_GANG"
_KILL_WAIT_S: Final = 5.0
_LET_GO: Final = "its session ended while it was started"

_log = get_log()


class Making(Protocol):
    """What makes trajectories here."""

    def obey(self, order: RolloutOrder) -> None:
        """Begin what is asked for, without waiting."""

    def let_go(self, reason: str) -> None:
        """Make nothing any more, and take no requests anywhere; ends beside."""


class HeldChild:
    """A process here, until the leader forgets it."""

    def __init__(
        self, child: RunningChild, *, is_bound: bool, gang: str = "", attempt: str = ""
    ) -> None:
        """`gang` and `attempt` are those whose ranks it starts, if any."""
        self.child = child
        self.is_bound = is_bound
        self.gang, self.attempt = gang, attempt
        self.hurry = anyio.Event()
        self.has_ended = False

    @property
    def child_id(self) -> ChildId:
        return self.child.child_id


class NodeHands:
    """`libra_supervisor.nodes.follower.Hands`. `tasks` owns what takes time."""

    def __init__(  # noqa: PLR0913 - what a node's processes need of it
        self,
        spawner: Spawner,
        *,
        run_id: RunId,
        tasks: anyio.abc.TaskGroup,
        environ: Mapping[str, str],
        devices: tuple[str, ...],
        deadlines: StopDeadlines,
        on_begin: Callable[[Welcome], Awaitable[None]],
        on_leave: Callable[[int, str], None],
    ) -> None:
        self._spawner = spawner
        self._run_id = run_id
        self._tasks = tasks
        self._environ = environ
        self._devices = devices
        self._deadlines = deadlines
        self._on_begin = on_begin
        self._on_leave = on_leave
        self._tongue: Tongue | None = None
        self._making: Making | None = None
        self._session = 0
        self._term = 0
        self._swept = anyio.Event()
        self._held: dict[Incarnation, HeldChild] = {}
        self._ports: dict[int, PortLease] = {}
        self.ranks = RankRelay(self.agent_of)
        self.control_socket = ""
        """Of the ranks here."""

        self.lease: LeaseNote | None = None
        """What ranks read of the lease; None: they are ended from here alone."""

    def speak_through(self, tongue: Tongue) -> None:
        self._tongue = tongue
        self.ranks.speak_through(tongue)

    def make_through(self, making: Making) -> None:
        self._making = making

    # libra_supervisor.nodes.follower.Hands

    def children(self) -> tuple[ChildId, ...]:
        return tuple(it.child_id for it in self._held.values() if not it.has_ended)

    async def begin(self, welcome: Welcome) -> None:
        await self._on_begin(welcome)
        if welcome.term != self._term:
            # Whoever leads now knows of none that the one before had held.
            for port in tuple(self._ports):
                self._free(port)
            self._term = welcome.term
        self._session += 1
        self._swept = anyio.Event()

    async def obey(self, command: NodeCommand) -> None:  # noqa: C901, PLR0912, PLR0915 - a table
        match command:
            case wire.KeepOnly(children):
                self._tasks.start_soon(self._keep_only, frozenset(children), self._swept)
            case wire.Start():
                self._tasks.start_soon(self._start, command, self._session)
            case wire.Adopt():
                self._tasks.start_soon(self._adopt, command)
            case wire.Clear():
                self._tasks.start_soon(self._clear, command)
            case wire.End():
                self._tasks.start_soon(self._end, command)
            case wire.Hurry(incarnation):
                if incarnation in self._held:
                    self._held[incarnation].hurry.set()
            case wire.Forget(incarnation):
                self._forget(incarnation)
            case wire.Tail():
                self._tasks.start_soon(self._tail, command)
            case wire.HoldPort():
                self._hold_port(command)
            case wire.FreePort(port):
                self._free(port)
            case wire.LookAtDevices():
                self._tasks.start_soon(self._answer, seen, command, self._devices)
            case wire.ReadWeights():
                self._tasks.start_soon(self._answer, read, command)
            case wire.ToRank(link, data):
                await self.ranks.pass_on(link, data)
            case wire.DropRank(link):
                self.ranks.drop(link)
            case wire.Leave(exit_code, reason):
                self._on_leave(exit_code, reason)
            case (
                rollouts.TakePart()
                | rollouts.Servers()
                | rollouts.GiveBack()
                | rollouts.MakeSamples()
                | rollouts.MakeAgain()
                | rollouts.DropJob()
            ):
                self._make(command)
            case _:
                assert_never(command)

    async def let_go(self, reason: str) -> None:
        """Kill the ranks at once: the leader counts on it that they are gone by now."""
        self._session += 1
        if self._making is not None:
            self._making.let_go(reason)
        bound = [it for it in self._held.values() if it.is_bound]
        if bound:
            _log.warning("ranks_let_go", why=reason, num_agents=len(bound))
        await self._end_all(bound, StopDeadlines(term_grace_s=0, kill_wait_s=_KILL_WAIT_S))
        self.ranks.drop_all()

    async def end_servers(self, reason: str) -> None:
        if self._held:
            _log.warning("servers_ended", why=reason)
        await self._end_all(list(self._held.values()), self._deadlines)
        for port in tuple(self._ports):
            self._free(port)

    # Children

    async def _keep_only(self, kept: frozenset[ChildId], swept: anyio.Event) -> None:
        """End what nobody claims; whatever is started waits for it."""
        try:
            doomed = [it for it in self._held.values() if it.child_id not in kept or it.is_bound]
            await self._end_all(doomed, self._deadlines)
        finally:
            swept.set()

    async def _start(self, command: wire.Start, session: int) -> None:
        await self._swept.wait()
        before = [it for it in self._held.values() if it.child_id == command.child_id]
        await self._end_all(before, self._deadlines)
        if session != self._session:
            self._say(wire.Failed(command.call, _LET_GO))
            return
        try:
            child = await self._spawner.spawn(self._spec(command), command.incarnation)
        except LibraError as error:
            self._say(wire.Failed(command.call, str(error)))
            return
        held = HeldChild(
            child,
            is_bound=command.is_bound,
            gang=command.env.get(GANG_VARIABLE, ""),
            attempt=command.env.get(ATTEMPT_VARIABLE, ""),
        )
        self._held[command.incarnation] = held
        if session != self._session:
            # Its session ended while it was started: nobody knows of it.
            await self._end_all([held], StopDeadlines(term_grace_s=0, kill_wait_s=_KILL_WAIT_S))
            self._say(wire.Failed(command.call, _LET_GO))
            return
        self._say_started(command.call, child)
        self._tasks.start_soon(self._watch, held)

    async def _adopt(self, command: wire.Adopt) -> None:
        await self._swept.wait()
        held = self._held.get(command.incarnation)
        if held is None or held.has_ended or held.child_id != command.child_id:
            self._say(wire.Failed(command.call, "it does not run here"))
            return
        found = held.child.identity
        if (found.pid, found.start_ticks) != (command.pid, command.start_ticks):
            self._say(wire.Failed(command.call, f"it is pid {found.pid} here"))
            return
        self._say_started(command.call, held.child)

    async def _clear(self, command: wire.Clear) -> None:
        await self._swept.wait()
        before = [it for it in self._held.values() if it.child_id == command.child_id]
        await self._end_all(before, self._deadlines)
        ended = await self._spawner.clear(command.child_id, command.kill_wait_s)
        self._say(_tree_gone(command.call, ended))

    async def _watch(self, held: HeldChild) -> None:
        status = await held.child.wait()
        held.has_ended = True
        self._say(
            wire.ProcessEnded(
                held.child.incarnation, status.exit_code, status.signal, status.is_out_of_memory
            )
        )

    async def _end(self, command: wire.End) -> None:
        held = self._held.get(command.incarnation)
        if held is None:
            self._say(wire.Failed(command.call, "it is gone already"))
            return
        deadlines = StopDeadlines(
            term_grace_s=command.term_grace_s,
            kill_wait_s=command.kill_wait_s,
            hurried_grace_s=command.hurried_grace_s,
        )
        ended = await held.child.tree.end(deadlines, hurry=held.hurry)
        self._say(_tree_gone(command.call, ended))

    async def _end_all(self, held: list[HeldChild], deadlines: StopDeadlines) -> None:
        async with anyio.create_task_group() as ending:
            for one in held:
                ending.start_soon(self._end_one, one, deadlines)

    async def _end_one(self, held: HeldChild, deadlines: StopDeadlines) -> None:
        with anyio.CancelScope(shield=True):  # bounded by the deadlines
            ended = await held.child.tree.end(deadlines, hurry=held.hurry)
        if ended.survivors:
            _log.error("child_does_not_end", child=held.child_id, detail=ended.detail)
        self._forget(held.child.incarnation)

    def _forget(self, incarnation: Incarnation) -> None:
        held = self._held.pop(incarnation, None)
        if held is not None:
            held.child.reap()

    async def _tail(self, command: wire.Tail) -> None:
        held = self._held.get(command.incarnation)
        lines = () if held is None else await held.child.last_lines(command.num_lines)
        self._say(wire.Lines(command.call, lines))

    def _spec(self, command: wire.Start) -> ProcessSpec:
        env = {**self._environ, **command.env}
        if command.is_bound:
            env[CONTROL_VARIABLE] = self.control_socket
            if self.lease is not None:
                env[LEASE_VARIABLE] = str(self.lease.for_start())
        if DEVICES_VARIABLE in command.env:
            env[DEVICES_VARIABLE] = self._own_devices(command.env[DEVICES_VARIABLE])
        return ProcessSpec(
            child_id=command.child_id,
            run_id=self._run_id,
            argv=command.argv,
            env=env,
            cwd=command.cwd,
            log_path=command.log_path,
            limits=Limits(cpu_cores=command.cpu_cores),
            is_bound_to_supervisor=command.is_bound,
        )

    def _own_devices(self, slots: str) -> str:
        """The devices here that slots stand for. Raises SiteError for a slot that is not there."""
        numbers = [int(slot) for slot in slots.split(",") if slot]
        return ",".join(devices_of(numbers, self._devices))

    def _make(self, order: RolloutOrder) -> None:
        if self._making is None:
            raise InvariantError("nothing makes trajectories here")
        self._making.obey(order)

    # Ports

    def _hold_port(self, command: wire.HoldPort) -> None:
        try:
            lease = lease_port(command.host, command.port)
        except SiteError as error:
            self._say(wire.Failed(command.call, str(error)))
            return
        self._ports[lease.port] = lease
        self._say(wire.PortHeld(command.call, lease.port))

    def _free(self, port: int) -> None:
        lease = self._ports.pop(port, None)
        if lease is not None:
            lease.close()

    def agent_of(self, hello: RankHello) -> RunningChild:
        """What runs the ranks of an attempt here. Raises PeerError when nothing does."""
        wanted = (hello.gang, str(hello.attempt))
        for held in self._held.values():
            if held.is_bound and (held.gang, held.attempt) == wanted:
                return held.child
        raise PeerError(f"attempt {hello.attempt} of {hello.gang} does not run here")

    # Speaking

    async def _answer(self, answer: Callable[..., Awaitable[NodeEvent]], *what: object) -> None:
        self._say(await answer(*what))

    def _say(self, event: NodeEvent) -> None:
        if self._tongue is not None:
            self._tongue.say(event)

    def _say_started(self, call: int, child: RunningChild) -> None:
        identity = child.identity
        self._say(wire.Started(call, identity.pid, identity.start_ticks, boot_id()))


def _tree_gone(call: int, ended: TreeEnded) -> wire.TreeGone:
    return wire.TreeGone(
        call=call,
        survivors=tuple(row.pid for row in ended.survivors),
        detail=ended.detail,
        num_killed=ended.num_killed,
        ended_in_grace=ended.ended_in_grace,
        took_s=ended.took_s,
    )
