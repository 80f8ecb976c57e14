"""Another node, as those who use its processes see it: calls become commands and answers.

Everything of a session ends with it: a lost node's children are gone, and whoever waits for one of
its answers is told so.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol, TypeVar, assert_never

import anyio

from libra import clock
from libra.errors import NodeAwayError, PeerError, SiteError
from libra.ids import ChildId, Incarnation, NodeRank
from libra.wire import node as wire
from libra.wire.instance import WeightsReceipt
from libra.wire.node import DeviceMemory, NodeCommand, NodeEvent, NodeReply
from libra.wire.node_rollouts import RolloutWord
from libra_supervisor.nodes.leader import LeaderEnd
from libra_supervisor.nodes.relayed_link import RelayedLink
from libra_supervisor.process.child import ExitStatus

NOT_YET: Final = "nodes may still obey a leader before this one"
_MEMBER_POLL_S: Final = 0.1

ReplyT = TypeVar("ReplyT", bound=NodeReply)


class ChildThere(Protocol):
    """Who is told of the end of a process on the node."""

    @property
    def incarnation(self) -> Incarnation: ...

    def on_ended(self, status: ExitStatus) -> None: ...

    def on_node_lost(self, why: str) -> None: ...


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
        self._children: dict[Incarnation, ChildThere] = {}
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
        if not self._is_member:
            return f"node {self.node} is away: {self._why}"
        return self._end.why_untold(self.node)

    # What the link says

    def on_joined(self, keep: tuple[ChildId, ...]) -> None:
        """A session has begun. Its first command ends what nobody will adopt."""
        self._drop_all("its session began anew")
        self._is_member = True
        self.say_if_there(wire.KeepOnly(keep))

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
                link = self._links[event.link] = self._linked(event.link)
                if self.on_rank is not None:
                    self.on_rank(event, link)
            case wire.StopAsked():
                if self.on_stop is not None:
                    self.on_stop(event)
            case wire.Unfit(reason):
                self._end.expel(self.node, reason)
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

    def say_if_there(self, command: NodeCommand) -> None:
        """Say what concerns nothing beyond the node's session: with that it is settled.

        A session may be over long before its node counts as lost.
        """
        with suppress(NodeAwayError):
            self.say(command)

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
        self.say_if_there(wire.FreePort(port))

    def add_child(self, child: ChildThere) -> None:
        self._children[child.incarnation] = child
        early = self._ended_early.pop(child.incarnation, None)
        if early is not None:
            child.on_ended(early)

    def forget(self, incarnation: Incarnation) -> None:
        if self._children.pop(incarnation, None) is not None:
            self.say_if_there(wire.Forget(incarnation))

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

    def _linked(self, number: int) -> RelayedLink:
        return RelayedLink(number, tell=self.say_if_there, stream=self.stream)

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
