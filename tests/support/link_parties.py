"""The two ends of the nodes' links as plain models around them, each on a clock of its own rate."""

from collections import deque
from dataclasses import dataclass, field

from libra.errors import LibraError, PeerError
from libra.wire.node import PROTOCOL, Hello, Refused, Welcome
from libra_supervisor.nodes.allegiance import Allegiance, Opened, SessionOver
from libra_supervisor.nodes.lease import LeaseTerms, Standing
from libra_supervisor.nodes.member_record import NodeState
from libra_supervisor.nodes.members import Admitted, Charter, Members, NodeJoined
from libra_supervisor.nodes.session import KeepLimits

LEASE_S = 10.0
GRACE_S = 30.0
TERMS = LeaseTerms(lease_s=LEASE_S, orphan_grace_s=GRACE_S)
KEEP = KeepLimits(num_messages=6, num_bytes=10_000)


@dataclass
class Clock:
    rate: float
    offset: float

    def at(self, true: float) -> float:
        return true * self.rate + self.offset


@dataclass
class Wire:
    """One connection: what is under way in each direction, and which ends are still open."""

    leader: "Leader"
    follower: "Follower"
    number: int
    up: deque = field(default_factory=deque)
    down: deque = field(default_factory=deque)
    leader_open: bool = True
    follower_open: bool = True


class Leader:
    def __init__(self, world, term):
        self.world, self.term = world, term
        self.clock = Clock(world.rate(), 1000.0 * term)
        self.is_dead = self.is_paused = False
        self.wires: dict[int, Wire] = {}
        self.put_in: dict[str, list[bytes]] = {}
        self.told: dict[str, list[bytes]] = {}
        self.acked: dict[str, set[bytes]] = {}
        self.attempt_of: dict[int, int] = {}
        self.server_of: dict[int, int] = {}
        """By node, what it takes for running there."""

        charter = Charter(
            run_id="r", run_directory="/r", term=term, leader=f"L{term}", version="1",
            config_digest="d", num_nodes=world.num_nodes, lease=TERMS, keep=KEEP,
        )  # fmt: skip
        self.members = Members(charter, now=self.now)

    @property
    def now(self):
        return self.clock.at(self.world.true)

    @property
    def runs(self):
        return not self.is_dead and not self.is_paused

    def put(self, node, body):
        session = self.members[node].session_id
        try:
            connection, envelope = self.members.put(node, body, now=self.now)
        except PeerError:
            return False
        self.put_in.setdefault(session, []).append(body)
        if connection is not None:
            self.wires[connection].down.append(envelope)
        return True

    @property
    def has_successor(self):
        return self.world.term > self.term

    def on_message(self, wire, message):
        if isinstance(message, Hello):
            session = f"s{self.term}-{wire.number}"
            reply = self.members.on_hello(
                message, connection=wire.number, fresh_session=session, now=self.now
            )
            if isinstance(reply, Refused):
                wire.down.append(reply)
                return
            assert isinstance(reply, Admitted)
            wire.down.append(reply.welcome)
            wire.down.extend(reply.resend)
            if reply.replaced is not None and reply.replaced in self.wires:
                self.wires[reply.replaced].leader_open = False
            self.note(reply.news)
            return
        session = next(r.session_id for r in self.members.records if r.node == wire.follower.node)
        try:
            body, news = self.members.on_envelope(wire.number, message, now=self.now)
        except PeerError:
            self.drop(wire)
            return
        self.note(news)
        if body is not None:
            self.told.setdefault(session, []).append(body)
            self.hear(wire.follower.node, body)

    def hear(self, node, body):
        word, _, number = body.partition(b" ")
        if word == b"ended":
            self.attempt_of.pop(node, None)
        elif word == b"trained" and self.attempt_of.get(node) == int(number):
            self.world.on_committed(self)

    def note(self, news):
        for it in news:
            is_new = isinstance(it, NodeJoined)
            if is_new or self.members.state_of(it.node) is NodeState.LOST:
                self.attempt_of.pop(it.node, None)
                self.server_of.pop(it.node, None)
            if is_new:
                self.adopt(it.node)

    def adopt(self, node):
        """The first session of a node under this leader: what runs there may go on."""
        is_first = self.members[node].num_sessions == 1
        known = self.world.written_down.get(node) if is_first else None
        if self.put(node, b"keep %d" % (known or 0)) and known is not None:
            self.server_of[node] = known

    def serve(self, node):
        number = self.world.next_server()
        if self.put(node, b"serve %d" % number):
            self.server_of[node] = number
            self.world.written_down[node] = number

    def drop(self, wire):
        wire.leader_open = False
        self.wires.pop(wire.number, None)
        self.members.on_disconnected(wire.number)


class Follower:
    def __init__(self, world, node, *, pid=1, term=0, machine=0):
        self.world, self.node, self.pid = world, node, pid
        self.machine = machine
        self.clock = Clock(world.rate(), 77.0 * (node + 1) + 5000.0 * pid)
        self.wire: Wire | None = None
        self.is_dead = False
        self.attempt: int | None = None
        self.servers: list[int] = []
        """Of its one slot."""

        self.has_swept = False
        about = Hello(
            protocol=PROTOCOL, version="1", config_digest="d", run_id="", node=node,
            host="h", boot_id=f"b{node}-{machine}", pid=pid, start_ticks=pid, dial=0,
            term=term,
        )  # fmt: skip
        self.side = Allegiance(about, TERMS, KEEP, now=self.now)
        self.done: dict[str, list[bytes]] = {}
        self.said: dict[str, list[bytes]] = {}

    @property
    def now(self):
        return self.clock.at(self.world.true)

    def settle(self):
        """What the follower's own alarm does: the session and the ranks end with the lease."""
        standing = self.side.standing(now=self.now)
        if self.side.has_lapsed(now=self.now):
            self.end_session("the lease has ended")
        assert self.attempt is None or standing is Standing.HELD
        if standing is Standing.OVER:
            self.servers.clear()

    def say(self, body):
        if not self.side.session_id:
            return
        session = self.side.session_id
        try:
            envelope = self.side.put(body, now=self.now)
        except LibraError as error:
            self.end_session(str(error))
            return
        self.said.setdefault(session, []).append(body)
        if self.wire is not None:
            self.wire.up.append(envelope)

    def end_session(self, why):
        self.side.end_session(why, now=self.now)
        self.attempt = None
        self.hang_up()

    def hang_up(self):
        if self.wire is not None:
            self.wire.follower_open = False
            self.wire = None

    def on_message(self, message):
        if isinstance(message, Welcome | Refused):
            wire = self.wire
            result = self.side.on_reply(message, now=self.now)
            if isinstance(result, Opened):
                self.has_swept = self.has_swept and not result.is_new
                wire.up.extend(self.side.to_send())
                return
            if isinstance(result, SessionOver):
                self.attempt = None
            self.hang_up()
            return
        try:
            self.side.on_envelope(message, now=self.now)
        except PeerError as error:
            self.end_session(str(error))

    def work(self):
        while (body := self.side.take(now=self.now)) is not None:
            session = self.side.session_id
            self.done.setdefault(session, []).append(body)
            self.world.on_obeyed(self, session)
            word, _, number = body.partition(b" ")
            if word == b"keep":
                self.servers = [it for it in self.servers if it == int(number)]
                self.has_swept = True
                continue
            assert self.has_swept, "something came before what says who may stay"
            if word == b"serve":
                # What has the name is ended before.
                self.servers = [int(number)]
            elif word == b"start":
                assert self.attempt is None, "two gangs on one node"
                self.attempt = int(number)
            elif word == b"end" and self.attempt is not None:
                self.attempt = None
                self.say(b"ended")
