"""The leader's end of all links: serves connections, tells followers, passes on what they say.

end = LeaderEnd(charter, post=..., rng=...)
tasks.start_soon(end.run)            # time: who is silent, who is lost
await end.serve(connection)          # by the listener, for every connection
end.tell(node, command)
"""

from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, Never, TypeAlias

import anyio
import msgspec

from libra import clock
from libra.errors import PeerError, ungrouped
from libra.ids import NodeRank
from libra.tracing.log import get_log
from libra.wire.decoding import decoded
from libra.wire.node import NodeCommand, NodeEvent, Refused
from libra_supervisor.nodes.connection import Connection, received_envelope, received_hello
from libra_supervisor.nodes.member_record import MemberRecord
from libra_supervisor.nodes.members import Charter, Members, NodeNews
from libra_supervisor.nodes.outgoing import Outgoing
from libra_supervisor.nodes.postbox import Postbox

HELLO_WAIT_S: Final = 10.0
MOST_UNHEARD: Final = 64
"""Events of all followers that wait for the listener before nothing more is read."""

WINDOW_BYTES: Final = 16 << 20
"""What a byte stream may have under way to one node before it waits for acknowledgements."""

_REPLACED: Final = "another leader took over from this one"
_ROOM_POLL_S: Final = 0.02
_IDLE_S: Final = 1.0

_log = get_log()


class NodeSaid(msgspec.Struct, frozen=True):
    """An event of a follower, in the order in which it was said."""

    node: NodeRank
    event: NodeEvent


ClusterEvent: TypeAlias = NodeSaid | NodeNews
Post: TypeAlias = Callable[[ClusterEvent], Awaitable[None]]


class LeaderEnd:
    """`Members` with its I/O."""

    def __init__(
        self,
        charter: Charter,
        *,
        post: Post,
        rng: Random,
        is_replaced: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """Call it inside the event loop: it reads the clock. `rng` names the sessions.

        `is_replaced` says whether another leader took a later term: then nobody is let in.
        """
        self._charter = charter
        self._is_replaced = is_replaced
        self._awake_at = clock.now()
        self._post = post
        self._postbox: Postbox[ClusterEvent] = Postbox(self._passed_on)
        self._rng = rng
        self._members = Members(charter, now=clock.now())
        self._num_connections = 0
        self._outgoing: dict[int, Outgoing] = {}
        self._scopes: dict[int, anyio.CancelScope] = {}

    @property
    def records(self) -> tuple[MemberRecord, ...]:
        return self._members.records

    @property
    def term(self) -> int:
        return self._charter.term

    @property
    def orphans_end_after_s(self) -> float:
        """When servers of a leader before this one have ended for certain, whoever had them."""
        lease = self._charter.lease
        return lease.lost_after_s + lease.orphan_grace_s

    def why_untold(self, node: NodeRank) -> str | None:
        """Why the node can be told nothing now; None when it can."""
        return self._members[node].why_untold

    def has_let_go(self, node: NodeRank) -> bool:
        return self._members.has_let_go(node, now=clock.now())

    def reigns(self) -> bool:
        return self._members.reigns(now=clock.now())

    def tell(self, node: NodeRank, command: NodeCommand) -> None:
        """Say it now or after the next reconnect. Raises PeerError when the node is no member."""
        body = msgspec.msgpack.encode(command)
        try:
            connection, envelope = self._members.put(node, body, now=clock.now())
        except PeerError:
            self._take_in(self._members.take_news())
            raise
        if connection is not None:
            self._outgoing[connection].add(envelope)

    async def tell_when_room(self, node: NodeRank, command: NodeCommand) -> None:
        """The same for long streams: waits while much is under way to that node.

        A stream belongs to the session in which it began: PeerError when that is over.
        """
        record = self._members[node]
        session = record.session
        while session.kept_bytes > WINDOW_BYTES:
            await clock.sleep(_ROOM_POLL_S)
            if not record.session_id or record.session is not session:
                raise PeerError(f"node {node} was lost while much was under way to it")
        self.tell(node, command)

    def expel(self, node: NodeRank, reason: str) -> None:
        """End the node's session; it is lost when its lease has run out for certain."""
        self._take_in(self._members.expel(node, reason, now=clock.now()))

    async def run(self) -> None:
        """Notice silence, and pass on what followers say. Runs until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._postbox.run)
            await self._watch()

    async def _watch(self) -> Never:
        while True:
            deadline = self._members.next_deadline()
            latest = clock.now() + _IDLE_S
            await clock.sleep_until(latest if deadline is None else min(deadline, latest))
            if await self._slept_through_its_reign():
                await clock.sleep(_IDLE_S)
                continue
            self._awake_at = clock.now()
            self._take_in(self._members.on_time(now=clock.now()))

    async def serve(self, connection: Connection) -> None:
        """One connection from its Hello to its end, while `run` is alive.

        What is wrong on it ends it and is logged.
        """
        self._num_connections += 1
        number = self._num_connections
        try:
            outgoing = await self._admitted(number, connection)
            if outgoing is not None:
                with ungrouped():
                    await self._exchange(number, connection, outgoing)
        except PeerError as error:
            _log.info("node_connection_ended", connection=number, why=str(error))
        finally:
            self._forget(number)
            self._members.on_disconnected(number)
            # Of what raised.
            self._take_in(self._members.take_news())

    async def _admitted(self, number: int, connection: Connection) -> Outgoing | None:
        """Answer the Hello; None when it was refused."""
        try:
            with anyio.fail_after(HELLO_WAIT_S):
                hello = await received_hello(connection)
        except TimeoutError:
            raise PeerError(f"no Hello within {HELLO_WAIT_S:g} s") from None
        if await self._has_successor():
            replaced = Refused(reason=_REPLACED, is_final=False)
            await connection.send(msgspec.msgpack.encode(replaced))
            return None
        now = clock.now()
        session = f"{self._charter.term}-{self._rng.getrandbits(64):016x}"
        answer = self._members.on_hello(hello, connection=number, fresh_session=session, now=now)
        if isinstance(answer, Refused):
            _log.warning("node_refused", node=hello.node, host=hello.host, why=answer.reason)
            await connection.send(msgspec.msgpack.encode(answer))
            return None
        if answer.replaced is not None:
            self._forget(answer.replaced)
        outgoing = Outgoing(connection, lambda: self._members.beat(number))
        outgoing.add(*answer.resend)
        # Before anything waits: from here on the node may be told something.
        self._outgoing[number] = outgoing
        self._take_in(answer.news)
        await self._postbox.until_passed_on()
        await connection.send(msgspec.msgpack.encode(answer.welcome))
        return outgoing

    async def _exchange(self, number: int, connection: Connection, outgoing: Outgoing) -> None:
        with anyio.CancelScope() as scope:
            self._scopes[number] = scope
            if number not in self._outgoing:
                return
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(outgoing.run_within, tasks.cancel_scope)
                await self._receive(number, connection, outgoing)
                tasks.cancel_scope.cancel()

    async def _receive(self, number: int, connection: Connection, outgoing: Outgoing) -> None:
        while (envelope := await received_envelope(connection)) is not None:
            if await self._slept_through_its_reign():
                raise PeerError(_REPLACED)
            body, news = self._members.on_envelope(number, envelope, now=clock.now())
            outgoing.owe()
            self._take_in(news)
            if body is not None:
                node = self._members.node_of(number)
                self._postbox.put(NodeSaid(node, self._decoded(node, body)))
            if self._postbox.depth > MOST_UNHEARD:
                # Who says more than can be heard waits.
                await self._postbox.until_passed_on()

    async def _slept_through_its_reign(self) -> bool:
        """Whether this process stood still, and another leads since.

        What came in meanwhile must renew no lease then, since the other counts on its end.
        """
        slept_s = clock.now() - self._awake_at
        limit_s = self._charter.lease.suspect_after_s + _IDLE_S
        return slept_s > limit_s and await self._has_successor()

    async def _has_successor(self) -> bool:
        return self._is_replaced is not None and await self._is_replaced()

    def _decoded(self, node: NodeRank, body: bytes) -> NodeEvent:
        try:
            event: NodeEvent = decoded(body, NodeEvent)
        except PeerError as error:
            reason = f"it said something that is no event: {error}"
            self.expel(node, reason)
            raise PeerError(f"node {node}: {reason}") from error
        return event

    def _take_in(self, news: tuple[NodeNews, ...]) -> None:
        for number in tuple(self._outgoing):
            if not self._members.is_open(number):
                self._forget(number)
        self._postbox.put(*news)

    async def _passed_on(self, event: ClusterEvent) -> None:
        try:
            await self._post(event)
        except PeerError as error:
            if not isinstance(event, NodeSaid):
                raise
            self.expel(event.node, f"what it said makes no sense: {error}")

    def _forget(self, number: int) -> None:
        self._outgoing.pop(number, None)
        scope = self._scopes.pop(number, None)
        if scope is not None:
            scope.cancel()
