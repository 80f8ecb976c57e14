"""Children on another node: what supervision does with a local process, said over the link.

One `RemoteNode` for each follower turns calls into commands and answers. Everything of a session
ends with it: a lost node's children are gone, and whoever waits for one of its answers is told so.
"""

from collections.abc import Callable
from typing import Final, TypeVar, assert_never

import anyio
import msgspec

from libra import clock
from libra.errors import ChildError, NodeAwayError, PeerError, SiteError
from libra.ids import ChildId, Incarnation, NodeRank
from libra.tracing.log import get_log
from libra.wire import node as wire
from libra.wire.instance import WeightsReceipt
from libra.wire.node import MAX_PIECE_BYTES, DeviceMemory, NodeCommand, NodeEvent, NodeReply
from libra.wire.node_rollouts import RolloutWord
from libra.wire.rank import RankEvent
from libra_supervisor.nodes.leader import LeaderEnd
from libra_supervisor.process.child import ExitStatus
from libra_supervisor.process.identity import ProcessIdentity, ProcessRow
from libra_supervisor.process.spec import ProcessSpec
from libra_supervisor.process.tree import StopDeadlines, TreeEnded

NOT_YET: Final = "nodes may still obey a leader before this one"
_SLACK_S: Final = 60.0
_MEMBER_POLL_S: Final = 0.1

ReplyT = TypeVar("ReplyT", bound=NodeReply)

_log = get_log()


class _Call:
    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.reply: NodeReply | None = None
        self.error = ""


class RemoteNode:
    """One follower, as those who use its processes see it."""

    def __init__(self, node: NodeRank, end: LeaderEnd) -> None:
        self.node = node
        self._end = end
        self._is_member = False
        self._why = "it has not joined yet"
        # A node may still answer calls of a leader before this one: theirs have other numbers.
        self._num_calls = end.term << 32
        self._calls: dict[int, _Call] = {}
        self._children: dict[Incarnation, RemoteChild] = {}
        self._ended_early: dict[Incarnation, ExitStatus] = {}
        self._links: dict[int, RelayedLink] = {}
        self.on_rank: Callable[[wire.RankLinked, RelayedLink], None] | None = None
        """Called for every rank that links on the node."""

        self.on_stop: Callable[[wire.StopAsked], None] | None = None
        """Called when somebody stops the node's supervisor."""

        self.on_rollouts: Callable[[RolloutWord], None] | None = None
        """Called with what the node says of trajectories."""

    async def hindrance(self) -> str | None:
        """Why nothing can be started there now; None when it can."""
        if not self._end.reigns():
            return NOT_YET
        return None if self._is_member else f"node {self.node} is away: {self._why}"

    # What the link says

    def on_joined(self, keep: tuple[ChildId, ...]) -> None:
        """A session has begun. Its first command ends what nobody will adopt."""
        self._drop_all("its session began anew")
        self._is_member = True
        self.say(wire.KeepOnly(keep))

    def on_lost(self, reason: str) -> None:
        self._is_member, self._why = False, reason
        self._drop_all(reason)

    def on_said(self, event: NodeEvent) -> None:  # noqa: C901, PLR0912 - a table
        if isinstance(event, RolloutWord):
            if self.on_rollouts is not None:
                self.on_rollouts(event)
            return
        match event:
            case wire.ProcessEnded():
                self._on_ended(event)
            case wire.RankLinked():
                link = self._links[event.link] = RelayedLink(self, event.link)
                if self.on_rank is not None:
                    self.on_rank(event, link)
            case wire.StopAsked():
                if self.on_stop is not None:
                    self.on_stop(event)
            case wire.FromRank():
                if event.link in self._links:
                    self._links[event.link].on_event(event.event)
            case wire.RankUnlinked():
                link_or_none = self._links.pop(event.link, None)
                if link_or_none is not None:
                    link_or_none.on_end(event.error)
            case (
                wire.Started()
                | wire.Failed()
                | wire.TreeGone()
                | wire.Lines()
                | wire.PortHeld()
                | wire.DevicesSeen()
                | wire.WeightsRead()
            ):
                self._on_reply(event)
            case _:
                assert_never(event)

    # What others ask of it

    def say(self, command: NodeCommand) -> None:
        """Raises NodeAwayError when the node is no member."""
        if not self._is_member:
            raise NodeAwayError(f"node {self.node} is away: {self._why}")
        try:
            self._end.tell(self.node, command)
        except PeerError as error:
            raise NodeAwayError(str(error)) from error

    async def stream(self, command: NodeCommand) -> None:
        """The same for long streams: waits for room."""
        await self._end.tell_when_room(self.node, command)

    async def ask(self, kind: type[ReplyT], make: Callable[[int], NodeCommand]) -> ReplyT:
        """Say it and wait for the answer.

        Raises PeerError when it is a refusal, NodeAwayError when there is none.
        Not bounded by itself: a node that does not answer is lost, and then this ends.
        """
        self._num_calls += 1
        number = self._num_calls
        call = self._calls[number] = _Call()
        try:
            self.say(make(number))
            await call.answered.wait()
        finally:
            del self._calls[number]
        if isinstance(call.reply, kind):
            return call.reply
        if isinstance(call.reply, wire.Failed):
            raise PeerError(f"node {self.node}: {call.reply.reason}")
        raise NodeAwayError(f"node {self.node}: {call.error}")

    async def hold_port(self, host: str, port: int) -> int:
        """Hold a port there, any for 0. Raises PeerError."""
        held = await self.ask(wire.PortHeld, lambda call: wire.HoldPort(call, host, port))
        return held.port

    async def look_at_devices(self, slots: tuple[int, ...]) -> tuple[DeviceMemory, ...]:
        """Memory in use there; lacks devices that more slots stand for than these.

        Raises SiteError when its driver does not say, PeerError when the node does not.
        """
        seen = await self.ask(wire.DevicesSeen, lambda call: wire.LookAtDevices(call, slots))
        if seen.why_blind:
            raise SiteError(f"node {self.node}: {seen.why_blind}")
        return seen.devices

    async def read_weights(self, directory: str, manifest_hash: str) -> WeightsReceipt | None:
        """Have it read a published version in full. Raises PeerError when it does not match."""
        read = await self.ask(
            wire.WeightsRead, lambda call: wire.ReadWeights(call, directory, manifest_hash)
        )
        return read.receipt

    def free_port(self, port: int) -> None:
        if self._is_member:
            self.say(wire.FreePort(port))

    def add_child(self, child: "RemoteChild") -> None:
        self._children[child.incarnation] = child
        early = self._ended_early.pop(child.incarnation, None)
        if early is not None:
            child.on_ended(early)

    def forget(self, incarnation: Incarnation) -> None:
        if self._children.pop(incarnation, None) is not None and self._is_member:
            self.say(wire.Forget(incarnation))

    @property
    def is_member(self) -> bool:
        return self._is_member

    async def until_member(self) -> None:
        """Wait until it has joined. Raises NodeAwayError once its servers wait for nobody more."""
        with anyio.move_on_after(self._end.orphans_end_after_s):
            while not self._is_member:
                await clock.sleep(_MEMBER_POLL_S)
            return
        raise NodeAwayError(f"node {self.node} is away: {self._why}")

    def _on_ended(self, event: wire.ProcessEnded) -> None:
        status = ExitStatus(event.exit_code, event.signal, event.is_out_of_memory)
        child = self._children.get(event.incarnation)
        if child is not None:
            child.on_ended(status)
        else:
            # Whoever had it started has not been woken by the answer yet.
            self._ended_early[event.incarnation] = status

    def _on_reply(self, reply: NodeReply) -> None:
        call = self._calls.get(reply.call)
        if call is not None:  # else whoever asked has gone
            call.reply = reply
            call.answered.set()

    def _drop_all(self, reason: str) -> None:
        for call in self._calls.values():
            call.error = reason
            call.answered.set()
        children, self._children = self._children, {}
        links, self._links = self._links, {}
        self._ended_early.clear()
        for child in children.values():
            child.on_node_lost(f"node {self.node} was lost: {reason}")
        for link in links.values():
            link.on_end(f"node {self.node} was lost: {reason}")


class RemoteTree:
    """`EndableTree` of a child on another node."""

    def __init__(self, node: RemoteNode, incarnation: Incarnation) -> None:
        self._node = node
        self._incarnation = incarnation
        self.lost_with = ""
        """The loss of its node, in words."""

    def add_root(self, identity: ProcessIdentity) -> None:
        """The follower adds the ranks that link there."""

    async def observe(self, *, max_age_s: float = 0.0) -> None:
        """The follower looks by itself."""

    async def end(self, deadlines: StopDeadlines, *, hurry: anyio.Event | None = None) -> TreeEnded:
        """With its node lost it is gone: the node let go of it before it counted as lost."""
        async with anyio.create_task_group() as tasks:
            if hurry is not None:
                tasks.start_soon(self._hurry_when, hurry)
            gone = await self._ended(deadlines)
            tasks.cancel_scope.cancel()
        return gone

    async def _ended(self, deadlines: StopDeadlines) -> TreeEnded:
        def command(call: int) -> NodeCommand:
            return wire.End(
                call=call,
                incarnation=self._incarnation,
                term_grace_s=deadlines.term_grace_s,
                kill_wait_s=deadlines.kill_wait_s,
                hurried_grace_s=deadlines.hurried_grace_s,
            )

        if self.lost_with:
            return self._gone_with_node()
        why = "its node does not answer"
        try:
            # A member answers in time or is lost; this is for a leader that watches no more.
            with anyio.move_on_after(deadlines.term_grace_s + deadlines.kill_wait_s + _SLACK_S):
                return _tree_ended(await self._node.ask(wire.TreeGone, command))
        except NodeAwayError as error:
            self.lost_with = self.lost_with or str(error)
            return self._gone_with_node()
        except PeerError as error:
            why = str(error)
        _log.warning("remote_child_let_go", incarnation=self._incarnation, why=why)
        return _LOST

    def _gone_with_node(self) -> TreeEnded:
        return msgspec.structs.replace(_LOST, lost_with=self.lost_with)

    async def _hurry_when(self, hurry: anyio.Event) -> None:
        await hurry.wait()
        if self._node.is_member and not self.lost_with:
            self._node.say(wire.Hurry(self._incarnation))


class RemoteChild:
    """`RunningChild` on another node."""

    def __init__(
        self,
        node: RemoteNode,
        *,
        child_id: ChildId,
        incarnation: Incarnation,
        identity: ProcessIdentity,
    ) -> None:
        self.child_id = child_id
        self.incarnation = incarnation
        self.identity = identity
        self.tree = RemoteTree(node, incarnation)
        self._node = node
        self._ended = anyio.Event()
        self._status = ExitStatus(None, None)

    async def wait(self) -> ExitStatus:
        await self._ended.wait()
        return self._status

    async def last_lines(self, num_lines: int) -> tuple[str, ...]:
        try:
            lines = await self._node.ask(
                wire.Lines, lambda call: wire.Tail(call, self.incarnation, num_lines)
            )
        except PeerError:
            return ()
        return lines.lines

    def attach_rank(self, rank: int, out_fd: int, err_fd: int) -> None:
        """Never called: a rank's pipes end on its own node, and the follower attaches them."""

    def reap(self) -> None:
        self._node.forget(self.incarnation)

    def on_ended(self, status: ExitStatus) -> None:
        self._status = status
        self._ended.set()

    def on_node_lost(self, why: str) -> None:
        self.tree.lost_with = why
        self.on_ended(ExitStatus(None, None, why=why))


class RemoteSpawner:
    """`Spawner` for the children on one follower."""

    def __init__(self, node: RemoteNode) -> None:
        self._node = node

    async def spawn(self, spec: ProcessSpec, incarnation: Incarnation) -> RemoteChild:
        def command(call: int) -> NodeCommand:
            return wire.Start(
                call=call,
                child_id=spec.child_id,
                incarnation=incarnation,
                argv=spec.argv,
                env=spec.env,
                cwd=spec.cwd,
                log_path=spec.log_path,
                cpu_cores=spec.limits.cpu_cores,
                is_bound=spec.is_bound_to_supervisor,
            )

        try:
            # Shielded as a local start is: what was started has to be known.
            with anyio.CancelScope(shield=True):  # bounded by the loss of the node
                started = await self._node.ask(wire.Started, command)
        except PeerError as error:
            raise ChildError(f"{spec.child_id} does not start: {error}") from error
        return self._child(spec.child_id, incarnation, started)

    async def adopt(
        self, child_id: ChildId, identity: ProcessIdentity, incarnation: Incarnation
    ) -> RemoteChild | None:
        """Waits for the node as long as its servers wait for a leader."""

        def command(call: int) -> NodeCommand:
            return wire.Adopt(call, child_id, incarnation, identity.pid, identity.start_ticks)

        try:
            await self._node.until_member()
            started = await self._node.ask(wire.Started, command)
        except PeerError as error:
            _log.info("child_not_adopted", child=child_id, why=str(error))
            return None
        if started.boot_id != identity.boot_id:
            _log.info("child_not_adopted", child=child_id, why="its machine is another one")
            return None
        return self._child(child_id, incarnation, started)

    async def clear(self, child_id: ChildId, kill_wait_s: float) -> TreeEnded:
        if not self._node.is_member:
            # Its first command ends what it has.
            return _LOST
        try:
            gone = await self._node.ask(
                wire.TreeGone, lambda call: wire.Clear(call, child_id, kill_wait_s)
            )
        except PeerError:
            return _LOST
        return _tree_ended(gone)

    def _child(
        self, child_id: ChildId, incarnation: Incarnation, started: wire.Started
    ) -> RemoteChild:
        identity = ProcessIdentity(started.pid, started.start_ticks, started.boot_id)
        child = RemoteChild(
            self._node, child_id=child_id, incarnation=incarnation, identity=identity
        )
        self._node.add_child(child)
        return child


class RemotePort:
    """A port held on another node, as `instances.port_lease.PortLease` is here."""

    def __init__(self, node: RemoteNode, port: int) -> None:
        self._node = node
        self.port = port

    def close(self) -> None:
        self._node.free_port(self.port)


async def remote_port(node: RemoteNode, host: str, port: int) -> RemotePort:
    """Raises SiteError when it cannot be held there."""
    try:
        return RemotePort(node, await node.hold_port(host, port))
    except PeerError as error:
        raise SiteError(str(error)) from error


class RelayedLink:
    """A rank's control socket on another node: its events, and bytes for it, over the link."""

    def __init__(self, node: RemoteNode, number: int) -> None:
        self._node = node
        self._number = number
        self._send, self._receive = anyio.create_memory_object_stream[bytes](float("inf"))
        self._error = ""
        self._is_over = False

    async def send(self, frame: bytes) -> None:
        """In pieces, so that others find their way between. Raises PeerError when it is gone."""
        for first in range(0, len(frame), MAX_PIECE_BYTES):
            if self._is_over:
                raise PeerError(self._error or "the rank is gone")
            piece = frame[first : first + MAX_PIECE_BYTES]
            await self._node.stream(wire.ToRank(self._number, piece))

    async def receive(self) -> RankEvent | None:
        """The next event; None at a clean end. Raises PeerError when the end is not clean."""
        try:
            body = await self._receive.receive()
        except anyio.EndOfStream:
            if self._error:
                raise PeerError(self._error) from None
            return None
        try:
            return msgspec.msgpack.decode(body, type=RankEvent)
        except msgspec.MsgspecError as error:
            raise PeerError(f"the rank sent something that is no event: {error}") from error

    @property
    def peer(self) -> ProcessIdentity | None:
        """None: it is no process of this machine; the follower knows it."""
        return None

    def take_output(self) -> tuple[int, int] | None:
        return None

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._node.is_member:
                self._node.say(wire.DropRank(self._number))
        self._send.close()
        self._receive.close()

    def on_event(self, event: bytes) -> None:
        if not self._is_over:
            self._send.send_nowait(event)

    def on_end(self, error: str) -> None:
        self._is_over, self._error = True, error
        self._send.close()


_LOST: Final = TreeEnded(
    survivors=(), detail="", num_killed=0, ended_in_grace=False, removed_segments=(), took_s=0.0
)


def _tree_ended(gone: wire.TreeGone) -> TreeEnded:
    return TreeEnded(
        survivors=tuple(_row(pid) for pid in gone.survivors),
        detail=gone.detail,
        num_killed=gone.num_killed,
        ended_in_grace=gone.ended_in_grace,
        removed_segments=(),
        took_s=gone.took_s,
    )


def _row(pid: int) -> ProcessRow:
    """A survivor on another node, of which the pid is all that counts here."""
    return ProcessRow(pid=pid, ppid=0, pgid=0, sid=0, state="", start_ticks=0, name="")
