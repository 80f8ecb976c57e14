"""The ranks of one attempt: who is linked, who is ready, who owes an answer, who was lost."""

from collections.abc import Awaitable, Callable, Mapping

import anyio

from libra import clock
from libra.errors import PeerError
from libra.ids import Rank
from libra.wire.rank import Hello, ModelReady, RankCommand, RankEvent, RankFailed
from libra_supervisor.process.identity import ProcessIdentity
from libra_supervisor.ranks.link import Link, frame_of
from libra_supervisor.ranks.watch import RankWatch

Hear = Callable[[Rank, RankEvent], Awaitable[None]]


class Roster:
    """Made anew for each attempt, so that nothing of an earlier one can be taken for its own."""

    def __init__(
        self, *, attempt: int, world_size: int, heartbeat_timeout_s: float, hear: Hear
    ) -> None:
        self.attempt = attempt
        self.members: dict[Rank, Hello] = {}
        self.failed: RankFailed | None = None
        """The last words of the first rank that said any."""

        self._world_size = world_size
        self._hear = hear
        self._links: dict[Rank, Link] = {}
        self._ready: dict[Rank, ModelReady] = {}
        self._all_ready = anyio.Event()
        self._joined = anyio.Event()
        self._lost = anyio.Event()
        self._lost_reason = ""
        self._was_sent = anyio.Event()
        self._watch = RankWatch(timeout_s=heartbeat_timeout_s)

    async def welcome(self, hello: Hello, link: Link) -> None:
        """Take the rank in and hear it until its end. Raises PeerError to turn it away."""
        rank = Rank(hello.rank)
        is_expected = hello.attempt == self.attempt and hello.world_size == self._world_size
        if not is_expected or rank in self.members:
            raise PeerError(f"rank {rank} of attempt {hello.attempt} does not belong here")
        self._links[rank], self.members[rank] = link, hello
        self._joined.set()
        try:
            while (event := await link.receive()) is not None:
                await self._take(rank, event)
            self._lose(rank, f"rank {rank} closed its control socket")
        except PeerError as error:
            self._lose(rank, f"rank {rank}: {error}")

    async def send_each(self, commands: Mapping[Rank, RankCommand]) -> None:
        """Send each rank its own, side by side. Raises PeerError when one of them is gone."""
        frames = await _encoded(commands)
        missing = sorted(set(commands) - set(self._links))
        if missing:
            raise PeerError(f"rank {missing[0]} is not linked; {self._lost_reason or 'not yet'}")
        for rank, command in commands.items():
            self._watch.on_sent([rank], command, now=clock.now())
        self._was_sent.set()
        failures: list[PeerError] = []

        async def send(rank: Rank, link: Link) -> None:
            try:
                await link.send(frames[rank])
            except PeerError as error:
                failures.append(PeerError(f"rank {rank}: {error}"))

        async with anyio.create_task_group() as tasks:
            for rank in commands:
                tasks.start_soon(send, rank, self._links[rank])
        if failures:
            raise failures[0]

    def outputs(self) -> dict[Rank, tuple[int, int]]:
        """The read ends of stdout and stderr that ranks have sent since the last call."""
        taken = {rank: link.take_output() for rank, link in self._links.items()}
        return {rank: fds for rank, fds in taken.items() if fds is not None}

    def peers(self) -> tuple[ProcessIdentity, ...]:
        """The linked processes, by what the kernel says about their sockets."""
        peers = [link.peer for link in self._links.values()]
        return tuple(peer for peer in peers if peer is not None)

    async def until_ready(self, on_joined: Callable[[], None]) -> tuple[int, int]:
        """(step, parameters of rank 0) when every rank has its model; calls back as ranks join."""
        async with anyio.create_task_group() as tasks:

            async def note_joins() -> None:
                while True:
                    await self._joined.wait()
                    self._joined = anyio.Event()
                    on_joined()

            tasks.start_soon(note_joins)
            await self._all_ready.wait()
            tasks.cancel_scope.cancel()
        on_joined()  # the last may have been ready before its joining was noted
        first = self._ready[Rank(0)]
        return first.step, first.num_parameters

    async def until_lost(self) -> str:
        """The first rank whose link ended, in words."""
        await self._lost.wait()
        return self._lost_reason

    async def until_silent(self) -> str:
        """The ranks that owe an answer and hang, in words."""
        while not (silences := self._watch.silences(now=clock.now())):
            deadline = self._watch.next_deadline()
            if deadline is None:
                self._was_sent = anyio.Event()
                await self._was_sent.wait()
            else:
                await clock.sleep_until(deadline)
        first = silences[0]
        return (
            f"{len(silences)} of {self._world_size} ranks hang: rank {first.rank} "
            f"was last heard {first.silent_s:.0f} s ago in {first.last_phase}"
        )

    async def _take(self, rank: Rank, event: RankEvent) -> None:
        self._watch.on_event(rank, event, now=clock.now())
        if isinstance(event, RankFailed):
            self.failed = self.failed or event
        await self._hear(rank, event)
        if isinstance(event, ModelReady):
            self._ready[rank] = event
            if len(self._ready) == self._world_size:
                self._all_ready.set()

    def _lose(self, rank: Rank, reason: str) -> None:
        del self._links[rank]
        self._lost_reason = self._lost_reason or reason
        self._lost.set()


async def _encoded(commands: Mapping[Rank, RankCommand]) -> dict[Rank, bytes]:
    """The frame for each rank; the same command is encoded once."""
    frame_of_command: dict[int, bytes] = {}
    for command in commands.values():
        if id(command) not in frame_of_command:
            frame_of_command[id(command)] = await frame_of(command)
    return {rank: frame_of_command[id(command)] for rank, command in commands.items()}
