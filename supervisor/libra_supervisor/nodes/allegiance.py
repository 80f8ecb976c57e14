"""The follower's side: which leader it obeys, and what it may do at this moment. Pure.

Work is taken only while the lease is held. When the session is over (its lease has ended, the
leader said so, or another one leads) everything that was done in it is let go of before the next
Hello, which the caller does; see `Standing`.
"""

from collections import deque
from typing import Final

import msgspec

from libra.errors import PeerError
from libra.ids import ChildId
from libra.wire.node import Envelope, Hello, Refused, Welcome
from libra_supervisor.nodes.lease import Lease, LeaseTerms, Standing
from libra_supervisor.nodes.session import KeepLimits, Session

LAPSED: Final = "the lease has ended"


class Opened(msgspec.Struct, frozen=True):
    """The leader took us in."""

    welcome: Welcome
    is_new: bool
    """A new session; False: the one from before goes on."""


class SessionOver(msgspec.Struct, frozen=True):
    """Let go of everything of it, then say Hello again."""

    reason: str


class TurnedAway(msgspec.Struct, frozen=True):
    """Not now; `is_final`: never."""

    reason: str
    is_final: bool


class Allegiance:
    """One follower process. `now` is its own clock."""

    def __init__(self, about: Hello, terms: LeaseTerms, keep: KeepLimits, *, now: float) -> None:
        """`about` says who we are; what it says of a session is filled in by `hello`.

        `about.term` is the highest term that was ever obeyed on this node. `terms` hold until a
        leader says others.
        """
        self._about = about
        self._keep = keep
        self._term, self._leader = about.term, ""
        self._run_id = about.run_id
        self._num_dials = 0
        self._session_id = ""
        self._session = Session(keep)
        self._lease = Lease(terms, now=now)
        self._waiting: deque[bytes] = deque()

    @property
    def term(self) -> int:
        """The highest that was obeyed."""
        return self._term

    @property
    def leader(self) -> str:
        """Who leads in that term; empty when this process has obeyed nobody yet."""
        return self._leader

    @property
    def session_id(self) -> str:
        """Empty: none is open."""
        return self._session_id

    @property
    def kept_bytes(self) -> int:
        return self._session.kept_bytes

    @property
    def lease(self) -> Lease:
        return self._lease

    def hello(self, children: tuple[ChildId, ...]) -> Hello:
        """For the connection that is being opened."""
        self._num_dials += 1
        return msgspec.structs.replace(
            self._about,
            run_id=self._run_id,
            term=self._term,
            session=self._session_id,
            received=self._session.received,
            dial=self._num_dials,
            children=children,
        )

    def on_reply(
        self, reply: Welcome | Refused, *, now: float
    ) -> Opened | SessionOver | TurnedAway:
        """Take the leader's answer to the newest `hello`."""
        if isinstance(reply, Refused):
            if self._session_id and not reply.is_final:
                return self.end_session(reply.reason, now=now)
            return TurnedAway(reply.reason, reply.is_final)
        stale = self._why_not_obeyed(reply)
        if stale is not None:
            return TurnedAway(stale, is_final=False)
        if reply.session == self._session_id:
            return self._resumed(reply, now)
        if self._session_id:
            return self.end_session("the leader does not know the session", now=now)
        return self._opened(reply, now)

    def on_envelope(self, envelope: Envelope, *, now: float) -> None:
        """Take one message of the open session; `take` gives out its body.

        Raises PeerError when it makes no sense, or comes after the lease: then the session is over.
        """
        if self.has_lapsed(now=now):
            raise PeerError(LAPSED)
        self._session.on_ack(envelope.ack)
        self._lease.on_heard(envelope.beat)
        if envelope.number and self._session.on_number(envelope.number):
            self._waiting.append(envelope.body)

    def take(self, *, now: float) -> bytes | None:
        """The next command, in order; None when there is none or it may not be obeyed now."""
        if not self._waiting or self.standing(now=now) is not Standing.HELD:
            return None
        return self._waiting.popleft()

    def put(self, body: bytes, *, now: float) -> Envelope:
        """Number a message. Raises OverloadedError: then the session is over."""
        return self._session.put(body, beat=self._lease.beat(now=now))

    def to_send(self) -> tuple[Envelope, ...]:
        """What the open session still owes the leader: a connection begins with it."""
        return self._session.unacknowledged(beat=0)

    def beat(self, *, now: float) -> Envelope:
        return self._session.bare(beat=self._lease.beat(now=now))

    def standing(self, *, now: float) -> Standing:
        """By the clock alone, whoever is connected."""
        return self._lease.standing(now=now)

    def has_lapsed(self, *, now: float) -> bool:
        """Whether the open session's lease has ended: it is never renewed, the session is over."""
        return bool(self._session_id) and self._lease.has_lapsed(now=now)

    def end_session(self, reason: str, *, now: float) -> SessionOver:
        """Nothing of it counts any more, neither what waits to be done nor what waits to go."""
        self._session_id = ""
        self._session = Session(self._keep)
        self._waiting.clear()
        self._lease.end(now=now)
        return SessionOver(reason)

    def _why_not_obeyed(self, welcome: Welcome) -> str | None:
        if welcome.term < self._term:
            return f"a leader of term {welcome.term} is there, {self._term} was obeyed already"
        if welcome.term == self._term and self._leader not in ("", welcome.leader):
            return f"another leader of the same term {welcome.term} is there"
        return None

    def _resumed(self, welcome: Welcome, now: float) -> Opened | SessionOver:
        if self.has_lapsed(now=now):
            return self.end_session(LAPSED, now=now)
        try:
            self._session.resume(welcome.received, beat=0)
        except PeerError as error:
            return self.end_session(str(error), now=now)
        return Opened(welcome, is_new=False)

    def _opened(self, welcome: Welcome, now: float) -> Opened:
        self._term, self._leader = welcome.term, welcome.leader
        self._run_id = welcome.run_id
        self._session_id = welcome.session
        self._session = Session(self._keep)
        terms = LeaseTerms(lease_s=welcome.lease_s, orphan_grace_s=welcome.orphan_grace_s)
        self._lease = Lease(terms, now=now)
        return Opened(welcome, is_new=True)
