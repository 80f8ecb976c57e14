"""Ranks on a follower: what they say goes to the leader, and what that says to them."""

from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
import msgspec

from libra import clock
from libra.errors import PeerError
from libra.wire import node as wire
from libra.wire.node import NodeEvent
from libra.wire.rank import Hello as RankHello
from libra_supervisor.process.child import RunningChild
from libra_supervisor.ranks.link import RankLink


class Tongue:
    """How a follower's parts speak to the leader."""

    def __init__(
        self,
        say: Callable[[NodeEvent], None],
        say_when_room: Callable[[NodeEvent], Awaitable[None]],
    ) -> None:
        self.say = say
        self.say_when_room = say_when_room


class RankRelay:
    """The control sockets of the ranks here, each a numbered link."""

    def __init__(self, agent_of: Callable[[RankHello], RunningChild]) -> None:
        """`agent_of` finds what runs the ranks of an attempt; raises PeerError for another one."""
        self._agent_of = agent_of
        self._tongue: Tongue | None = None
        self._links: dict[int, RankLink] = {}
        self._pieces: dict[int, anyio.abc.ObjectSendStream[bytes]] = {}
        self._num_links = 0

    def speak_through(self, tongue: Tongue) -> None:
        self._tongue = tongue

    async def pass_on(self, link: int, data: bytes) -> None:
        """The next bytes for a rank; dropped when it is gone."""
        if link in self._pieces:
            await self._pieces[link].send(data)

    def drop(self, link: int) -> None:
        if link in self._links:
            self._links[link].close()

    def drop_all(self) -> None:
        for link in tuple(self._links.values()):
            link.close()

    async def welcome(self, hello: RankHello, link: RankLink) -> None:
        """Serve one rank until its end. Raises PeerError to turn it away."""
        agent = self._agent_of(hello)
        if link.peer is not None:
            # Ranks make their own sessions; with its identity the tree ends it for sure.
            agent.tree.add_root(link.peer)
        self._num_links += 1
        number = self._num_links
        send, receive = anyio.create_memory_object_stream[bytes](float("inf"))
        self._links[number], self._pieces[number] = link, send
        self._say(wire.RankLinked(number, hello))
        error = ""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write, link, receive, tasks.cancel_scope)
                tasks.start_soon(self._attach_output, agent, hello.rank, link)
                error = await self._read(number, link)
                tasks.cancel_scope.cancel()
        finally:
            send.close()
            receive.close()
            del self._links[number], self._pieces[number]
            self._say(wire.RankUnlinked(number, error))

    async def _attach_output(self, agent: RunningChild, rank: int, link: RankLink) -> None:
        while (fds := link.take_output()) is None:
            await clock.sleep(0.05)
        agent.attach_rank(rank, *fds)

    async def _read(self, number: int, link: RankLink) -> str:
        """Pass on what the rank says until its end; the reason when it is not a clean one."""
        try:
            while (event := await link.receive()) is not None:
                body = msgspec.msgpack.encode(event)
                if self._tongue is not None:
                    await self._tongue.say_when_room(wire.FromRank(number, body))
        except PeerError as error:
            return str(error)
        return ""

    async def _write(
        self,
        link: RankLink,
        pieces: anyio.abc.ObjectReceiveStream[bytes],
        scope: anyio.CancelScope,
    ) -> None:
        try:
            async for piece in pieces:
                await link.send(piece)
        except PeerError:
            scope.cancel()

    def _say(self, event: NodeEvent) -> None:
        if self._tongue is not None:
            self._tongue.say(event)
