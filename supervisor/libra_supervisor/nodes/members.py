"""The leader's side: who is a member, who is suspected, who is lost. Pure.

One record for each follower. A follower is lost when the lease that it may hold has ended for
certain, by the leader's own clock; until then nothing that it holds is given to anybody else. A
session that is over is never taken up again: its follower comes back with a new one.
"""

from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec

from libra.errors import InvariantError, OverloadedError, PeerError
from libra.ids import NodeRank, RunId
from libra.wire.node import PROTOCOL, Envelope, Hello, Refused, Welcome
from libra_supervisor.nodes.lease import LeaseTerms
from libra_supervisor.nodes.member_record import NOBODY, MemberRecord, NodeState
from libra_supervisor.nodes.session import KeepLimits, Session

_MOST_NAMED: Final = 3


class NodeJoined(msgspec.Struct, frozen=True):
    """A new session; whatever belonged to an earlier one is gone."""

    node: NodeRank
    hello: Hello
    is_return: bool


class NodeSuspected(msgspec.Struct, frozen=True):
    node: NodeRank
    reason: str


class NodeRecovered(msgspec.Struct, frozen=True):
    """A suspected member spoke again; its session goes on."""

    node: NodeRank


class NodeLost(msgspec.Struct, frozen=True):
    node: NodeRank
    reason: str


NodeNews: TypeAlias = NodeJoined | NodeSuspected | NodeRecovered | NodeLost


class Admitted(msgspec.Struct, frozen=True):
    """Answer of a Hello that fits."""

    welcome: Welcome
    resend: tuple[Envelope, ...]
    news: tuple[NodeNews, ...]
    replaced: int | None
    """The connection that the follower had before; close it."""


class Charter(msgspec.Struct, frozen=True, kw_only=True):
    """What every member has to share."""

    run_id: RunId
    run_directory: str
    term: int
    leader: str
    version: str
    config_digest: str
    option_digests: Mapping[str, str] = {}
    num_nodes: int
    lease: LeaseTerms
    keep: KeepLimits = msgspec.field(default_factory=KeepLimits)


class Members:
    """All followers of one leader; node 0 is the leader itself and has no record.

    `now` is the leader's clock. Connections are numbered by the caller from 1.
    """

    def __init__(self, charter: Charter, *, now: float) -> None:
        self._charter = charter
        self._began_at = now
        self._records = {
            NodeRank(rank): MemberRecord(
                node=NodeRank(rank), since=now, heard_at=now, session=Session(charter.keep)
            )
            for rank in range(1, charter.num_nodes)
        }
        self._record_of: dict[int, MemberRecord] = {}
        self._untold: list[NodeNews] = []

    @property
    def records(self) -> tuple[MemberRecord, ...]:
        return tuple(self._records.values())

    def __getitem__(self, node: NodeRank) -> MemberRecord:
        return self._records[node]

    def state_of(self, node: NodeRank) -> NodeState:
        return self._records[node].state

    def has_let_go(self, node: NodeRank, *, now: float) -> bool:
        """Whether nothing that the node was given, by us or by a leader before, can still act."""
        return self.reigns(now=now) and not self._records[node].may_act

    def reigns(self, *, now: float) -> bool:
        """Whether every lease that a leader before us may have given has ended.

        Whoever says Hello proves it for its own machine only; another one may have held the rank.
        """
        ruled_s = now - self._began_at
        return self._charter.term == 1 or ruled_s >= self._charter.lease.lost_after_s

    # What comes in

    def on_hello(
        self, hello: Hello, *, connection: int, fresh_session: str, now: float
    ) -> Admitted | Refused:
        """Admit a follower on a new connection, or say why not."""
        refused = self._why_not(hello)
        if refused is not None:
            if hello.node in self._records:
                self._records[hello.node].why_refused = refused.reason
            return refused
        record = self._records[hello.node]
        if _is_outrun(hello, record.hello):
            return Refused(reason="a later Hello has come in already", is_final=False)
        if hello.session:
            return self._resume(record, hello, connection, now)
        if record.may_act and not _is_same_machine(record.hello, hello):
            other = record.hello.host if record.hello is not None else ""
            return Refused(
                reason=f"node {hello.node} is {other}, which may still act; come back later",
                is_final=False,
            )
        return self._begin(record, hello, connection, fresh_session, now)

    def on_envelope(
        self, connection: int, envelope: Envelope, *, now: float
    ) -> tuple[bytes | None, tuple[NodeNews, ...]]:
        """Take one message: (its body when it has a new one, what follows for the node).

        Raises PeerError when the connection counts no more or the message makes no sense: then
        the connection has to be closed.
        """
        record = self._record_of.get(connection)
        if record is None:
            raise PeerError("the session of this connection is over")
        try:
            record.session.on_ack(envelope.ack)
            is_new = envelope.number > 0 and record.session.on_number(envelope.number)
        except PeerError as error:
            self._break_off(record, str(error), now)
            raise
        self._hear(record, envelope.beat, now)
        return (envelope.body if is_new else None), self.take_news()

    def on_disconnected(self, connection: int) -> None:
        """The connection has ended; the session waits for another one."""
        record = self._record_of.pop(connection, None)
        if record is not None:
            record.connection = NOBODY

    # What goes out

    def is_open(self, connection: int) -> bool:
        """Whether messages of this connection still count."""
        return connection in self._record_of

    def node_of(self, connection: int) -> NodeRank:
        """Whose open connection it is."""
        return self._record_of[connection].node

    def put(self, node: NodeRank, body: bytes, *, now: float) -> tuple[int | None, Envelope]:
        """Number a message: (the connection to send it on, if there is one now; the message).

        Raises PeerError when the node is no member, or has become none because it does not take
        what it is sent.
        """
        record = self._records[node]
        if (why := record.why_untold) is not None:
            raise PeerError(why)
        try:
            envelope = record.session.put(body, beat=record.heard)
        except OverloadedError as error:
            self._break_off(record, str(error), now)
            raise PeerError(f"node {node}: {error}") from error
        return (record.connection or None), envelope

    def beat(self, connection: int) -> Envelope:
        """A sign of life for the follower on this connection. Raises PeerError as `on_envelope`."""
        record = self._record_of.get(connection)
        if record is None:
            raise PeerError("the session of this connection is over")
        return record.session.bare(beat=record.heard)

    def expel(self, node: NodeRank, reason: str, *, now: float) -> tuple[NodeNews, ...]:
        """End the node's session; it counts as lost when its lease has ended for certain."""
        record = self._records[node]
        if record.may_act:
            self._break_off(record, reason, now)
        return self.take_news()

    def take_news(self) -> tuple[NodeNews, ...]:
        """What follows from a call that raised; every other one returns it, with its own."""
        taken, self._untold = tuple(self._untold), []
        return taken

    # Time

    def on_time(self, *, now: float) -> tuple[NodeNews, ...]:
        """What the silence of members means by now."""
        lease = self._charter.lease
        for record in self._records.values():
            silent_s = now - record.heard_at
            if record.state is NodeState.MEMBER and silent_s >= lease.suspect_after_s:
                self._suspect(record, "it is silent", now)
            if record.state is NodeState.SUSPECTED and silent_s >= lease.lost_after_s:
                self._lose(record, record.why_silent, now)
        return self.take_news()

    def next_deadline(self) -> float | None:
        """When `on_time` may have news; None: not before something else happens."""
        lease = self._charter.lease
        wait_s = {
            NodeState.MEMBER: lease.suspect_after_s,
            NodeState.SUSPECTED: lease.lost_after_s,
        }
        return min(
            (it.heard_at + wait_s[it.state] for it in self._records.values() if it.state in wait_s),
            default=None,
        )

    # Parts

    def _why_not(self, hello: Hello) -> Refused | None:
        charter = self._charter
        wrong = {
            f"protocol {hello.protocol}, here {PROTOCOL}": hello.protocol != PROTOCOL,
            f"Libra {hello.version}, here {charter.version}": hello.version != charter.version,
            f"it belongs to run {hello.run_id}, this is {charter.run_id}": hello.run_id
            not in ("", charter.run_id),
            f"there is no node {hello.node} among {charter.num_nodes}": hello.node
            not in self._records,
            _differing(hello.option_digests, charter.option_digests): hello.config_digest
            != charter.config_digest,
        }
        found = [reason for reason, is_wrong in wrong.items() if is_wrong]
        if found:
            return Refused(reason="; ".join(found), is_final=True)
        if hello.term > charter.term:
            # It is we who are out of date; the leader that it obeyed may be reachable again.
            why = f"it has obeyed term {hello.term}, this is {charter.term}"
            return Refused(reason=why, is_final=False)
        return None

    def _resume(
        self, record: MemberRecord, hello: Hello, connection: int, now: float
    ) -> Admitted | Refused:
        if hello.session != record.session_id:
            return Refused(reason="that session is over", is_final=False)
        try:
            resend = record.session.resume(hello.received, beat=record.heard)
        except PeerError as error:
            self._break_off(record, str(error), now)
            return Refused(reason=f"that session is over: {error}", is_final=False)
        record.hello = hello
        return self._connected(record, connection, resend)

    def _begin(
        self, record: MemberRecord, hello: Hello, connection: int, session: str, now: float
    ) -> Admitted:
        """A new session. The one before it, if it was still open, has ended on the other side."""
        if not session or session == record.session_id:
            raise InvariantError("a new session needs a name of its own")
        if record.may_act:
            is_same = record.hello is not None and _process_in(record.hello) == _process_in(hello)
            self._lose(record, "its lease had ended" if is_same else "it has begun anew", now)
        is_return = record.num_sessions > 0
        self._detach(record)
        record.hello, record.session_id = hello, session
        record.session = Session(self._charter.keep)
        record.heard, record.heard_at, record.why_silent = 0, now, ""
        record.num_sessions += 1
        self._move(record, NodeState.MEMBER, now)
        self._untold.append(NodeJoined(hello.node, hello, is_return))
        return self._connected(record, connection, ())

    def _connected(
        self, record: MemberRecord, connection: int, resend: tuple[Envelope, ...]
    ) -> Admitted:
        replaced = self._detach(record)
        record.connection, record.why_refused = connection, ""
        self._record_of[connection] = record
        charter = self._charter
        welcome = Welcome(
            run_id=charter.run_id,
            run_directory=charter.run_directory,
            term=charter.term,
            leader=charter.leader,
            session=record.session_id,
            received=record.session.received,
            lease_s=charter.lease.lease_s,
            orphan_grace_s=charter.lease.orphan_grace_s,
        )
        return Admitted(welcome, resend, self.take_news(), replaced)

    def _hear(self, record: MemberRecord, beat: int, now: float) -> None:
        if beat <= record.heard:
            return
        # From here on a message may confirm this beat, so the lease may begin by now.
        record.heard, record.heard_at = beat, now
        if record.state is NodeState.SUSPECTED:
            record.why_silent = ""
            self._move(record, NodeState.MEMBER, now)
            self._untold.append(NodeRecovered(record.node))

    def _suspect(self, record: MemberRecord, reason: str, now: float) -> None:
        record.why_silent = reason
        if record.state is NodeState.MEMBER:
            self._untold.append(NodeSuspected(record.node, reason))
        self._move(record, NodeState.SUSPECTED, now)

    def _break_off(self, record: MemberRecord, reason: str, now: float) -> None:
        """Confirm nothing more: the lease runs out, and then the node is lost."""
        self._detach(record)
        record.session_id = ""
        self._suspect(record, reason, now)

    def _lose(self, record: MemberRecord, reason: str, now: float) -> None:
        self._detach(record)
        record.session_id, record.why_silent = "", reason
        self._move(record, NodeState.LOST, now)
        self._untold.append(NodeLost(record.node, reason))

    def _detach(self, record: MemberRecord) -> int | None:
        connection, record.connection = record.connection, NOBODY
        self._record_of.pop(connection, None)
        return connection or None

    def _move(self, record: MemberRecord, state: NodeState, now: float) -> None:
        if record.state is not state:
            record.state, record.since = state, now


def _differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """In which options two configurations differ, in words; values are secrets, maybe."""
    names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    left = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    said = f" ({', '.join(names[:_MOST_NAMED])}{left})" if names else ""
    return f"its configuration is another one{said}"


def _process_in(hello: Hello) -> tuple[str, int, int]:
    return hello.boot_id, hello.pid, hello.start_ticks


def _is_outrun(hello: Hello, newest: Hello | None) -> bool:
    """Whether a Hello was sent before one that is known: it was under way for longer."""
    if newest is None or hello.boot_id != newest.boot_id:
        return False
    return (hello.start_ticks, hello.dial) <= (newest.start_ticks, newest.dial)


def _is_same_machine(before: Hello | None, hello: Hello) -> bool:
    """Whether an open session can only be of a process that has ended.

    One process of a machine speaks for a node, which it proves to its peers there with a lock.
    Names prove nothing: images give many machines the same one.
    """
    return before is None or hello.boot_id == before.boot_id
