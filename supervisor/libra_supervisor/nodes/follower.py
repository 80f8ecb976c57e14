"""The follower's end of its link: dials, beats, obeys, and lets go when it has to.

end = FollowerEnd(allegiance, hands, dial=..., rng=...)
end.say(event)
await end.run()          # until a leader refuses us for good
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from random import Random
from typing import Final, Protocol, TypeAlias

import anyio
import msgspec

from libra import clock
from libra.errors import ConfigError, OverloadedError, PeerError, SiteError, ungrouped
from libra.ids import ChildId
from libra.tracing.log import get_log
from libra.wire.decoding import decoded
from libra.wire.node import NodeCommand, NodeEvent, Unfit, Welcome
from libra_supervisor.nodes.allegiance import LAPSED, Allegiance, Opened, SessionOver, TurnedAway
from libra_supervisor.nodes.connection import Connection, received_envelope, received_reply
from libra_supervisor.nodes.lease import Standing
from libra_supervisor.nodes.outgoing import Outgoing

REPLY_WAIT_S: Final = 10.0
WINDOW_BYTES: Final = 16 << 20
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_ROOM_POLL_S: Final = 0.02

Dial: TypeAlias = Callable[[], AbstractAsyncContextManager[Connection]]
"""Opens a connection to the leader; entering it raises PeerError when nobody answers."""

_log = get_log()


class Hands(Protocol):
    """What a follower does. `obey` is called for one command after the other."""

    def children(self) -> tuple[ChildId, ...]:
        """What runs here."""

    async def begin(self, welcome: Welcome) -> None:
        """A new session: what is done from here on is done under that leader.

        Raises SiteError when this node cannot do its part of the run.
        """

    async def obey(self, command: NodeCommand) -> None:
        """Begin what is asked for. Long work goes on beside: `let_go` waits for this."""

    async def let_go(self, reason: str) -> None:
        """End the ranks, take no work; returns when they are gone. Legal at any time."""

    async def end_servers(self, reason: str) -> None:
        """No leader came back in time: end the servers as well."""


class FollowerEnd:
    """`Allegiance` with its I/O."""

    def __init__(self, allegiance: Allegiance, hands: Hands, *, dial: Dial, rng: Random) -> None:
        self._allegiance = allegiance
        self._hands = hands
        self._dial = dial
        self._rng = rng
        self._outgoing: Outgoing | None = None
        self._heard_at = clock.now()
        self._changed = anyio.Event()
        self._is_let_go = True
        self._connection: anyio.CancelScope | None = None
        self._num_answers = 0
        self._acting = anyio.Lock()

    def say(self, event: NodeEvent) -> None:
        """Have the leader told, now or after the next reconnect; dropped without a session."""
        self._end_if_lapsed()
        if not self._allegiance.session_id:
            return
        try:
            envelope = self._allegiance.put(msgspec.msgpack.encode(event), now=clock.now())
        except OverloadedError as error:
            self._end_session(str(error))
            return
        if self._outgoing is not None:
            self._outgoing.add(envelope)

    async def say_when_room(self, event: NodeEvent) -> None:
        """The same for long streams: waits while much is under way."""
        while self._allegiance.kept_bytes > WINDOW_BYTES:
            await clock.sleep(_ROOM_POLL_S)
        self.say(event)

    async def run(self) -> None:
        """Belong to the leader for as long as the process runs.

        Raises ConfigError when it refuses us for good, SiteError when this node cannot do its part.
        """
        with ungrouped():
            await self._run()

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_lease)
            tasks.start_soon(self._obey)
            pause_s = _FIRST_PAUSE_S
            while True:
                if await self._has_answer():
                    pause_s = _FIRST_PAUSE_S
                await clock.sleep(pause_s * self._rng.uniform(0.5, 1.5))
                pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)

    async def _has_answer(self) -> bool:
        """Connect once, until the end of it; whether a leader dealt with us."""
        num_answers = self._num_answers
        self._end_if_lapsed()
        if not self._allegiance.session_id:
            # The Hello that follows promises it.
            await self._let_go("the session is over")
        try:
            async with self._dial() as connection:
                if await self._is_taken_in(connection):
                    with ungrouped():
                        await self._exchange(connection)
        except PeerError as error:
            _log.info("leader_connection_ended", why=str(error))
        return self._num_answers > num_answers

    async def _is_taken_in(self, connection: Connection) -> bool:
        hello = self._allegiance.hello(self._hands.children())
        await connection.send(msgspec.msgpack.encode(hello))
        try:
            with anyio.fail_after(REPLY_WAIT_S):
                reply = await received_reply(connection)
        except TimeoutError:
            raise PeerError(f"the leader did not answer within {REPLY_WAIT_S:g} s") from None
        match self._allegiance.on_reply(reply, now=clock.now()):
            case Opened(welcome, is_new):
                await self._take_up(connection, welcome, is_new=is_new)
                return True
            case SessionOver(reason):
                self._num_answers += 1
                await self._let_go(reason)
                return False
            case TurnedAway(reason, is_final):
                if is_final:
                    await self._let_go(reason)
                    raise ConfigError(f"the leader does not take this node: {reason}")
                _log.info("turned_away", why=reason)
                return False

    async def _take_up(
        self,
        connection: Connection,
        welcome: Welcome,
        *,
        is_new: bool,
    ) -> None:
        self._num_answers += 1
        _log.info("joined", term=welcome.term, session=welcome.session, is_new=is_new)
        if is_new:
            async with self._acting:
                try:
                    await self._hands.begin(welcome)
                except SiteError as error:
                    await self._take_leave(connection, str(error))
                    raise
        self._heard_at = clock.now()
        self._outgoing = Outgoing(connection, lambda: self._allegiance.beat(now=clock.now()))
        # What was said since the leader's answer waits too.
        self._outgoing.add(*self._allegiance.to_send())
        self._outgoing.owe()

    async def _take_leave(self, connection: Connection, reason: str) -> None:
        """Have the leader know why; it ends the session then."""
        envelope = self._allegiance.put(msgspec.msgpack.encode(Unfit(reason)), now=clock.now())
        with anyio.move_on_after(REPLY_WAIT_S), suppress(PeerError):
            await connection.send(msgspec.msgpack.encode(envelope))
            while await connection.receive() is not None:
                pass

    async def _exchange(self, connection: Connection) -> None:
        outgoing = self._outgoing
        if outgoing is None:
            return
        try:
            with anyio.CancelScope() as self._connection:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(outgoing.run_within, tasks.cancel_scope)
                    tasks.start_soon(self._beat, outgoing, tasks.cancel_scope)
                    await self._receive(connection, outgoing)
                    tasks.cancel_scope.cancel()
        finally:
            self._outgoing = self._connection = None

    async def _beat(self, outgoing: Outgoing, scope: anyio.CancelScope) -> None:
        """Sign of life after sign of life; a leader that does not answer is dialled anew."""
        terms = self._allegiance.lease.terms
        while clock.now() - self._heard_at < terms.suspect_after_s:
            await clock.sleep(terms.beat_period_s)
            outgoing.owe()
        _log.info("leader_silent", silent_s=clock.now() - self._heard_at)
        scope.cancel()

    async def _receive(self, connection: Connection, outgoing: Outgoing) -> None:
        while (envelope := await received_envelope(connection)) is not None:
            self._heard_at = clock.now()
            try:
                self._allegiance.on_envelope(envelope, now=clock.now())
            except PeerError as error:
                self._end_session(str(error))
                return
            if envelope.number:
                outgoing.owe()
            self._changed.set()

    async def _obey(self) -> None:
        """Carry out commands in order while the lease is held."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            async with self._acting:
                while (body := self._allegiance.take(now=clock.now())) is not None:
                    try:
                        command: NodeCommand = decoded(body, NodeCommand)
                    except PeerError as error:
                        self._end_session(f"the leader said what is no command: {error}")
                        break
                    self._is_let_go = False
                    await self._hands.obey(command)

    async def _watch_lease(self) -> None:
        """What the clock alone decides: let go at the lease's end, give up after the grace."""
        while True:
            self._end_if_lapsed()
            lease = self._allegiance.lease
            now = clock.now()
            match self._allegiance.standing(now=now):
                case Standing.HELD:
                    wait_until = lease.until
                case Standing.LET_GO:
                    await self._let_go(LAPSED)
                    wait_until = min(lease.orphaned_at, now + lease.terms.beat_period_s)
                case Standing.OVER:
                    await self._let_go(LAPSED)
                    await self._hands.end_servers("no leader came back in time")
                    wait_until = now + lease.terms.beat_period_s
            await clock.sleep_until(wait_until)

    async def _let_go(self, reason: str) -> None:
        async with self._acting:
            if not self._is_let_go:
                self._is_let_go = True
                await self._hands.let_go(reason)

    def _end_if_lapsed(self) -> None:
        """Its end came without the leader knowing: what ended since is not told as a failure."""
        if self._allegiance.has_lapsed(now=clock.now()):
            self._end_session(LAPSED)

    def _end_session(self, reason: str) -> None:
        """Everything of it is let go of before the next Hello."""
        _log.warning("session_over", why=reason)
        self._allegiance.end_session(reason, now=clock.now())
        self._outgoing = None
        if self._connection is not None:
            self._connection.cancel()
