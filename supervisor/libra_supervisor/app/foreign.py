"""A server that somebody else runs, as supervision sees it: found, watched, never signalled.

Its life is from the moment it answers as one of this run's servers until it is gone or another
process answers in its place. To end it means to let go of it; whoever runs it starts the next one.
"""

from collections.abc import Awaitable, Callable
from random import Random
from typing import Final

import anyio

from libra import clock
from libra.errors import ChildError, LibraError
from libra.ids import ChildId, Incarnation
from libra.planner.plan import InstancePlacement
from libra.scheduling.scheduler import Scheduler
from libra.wire.instance import InstanceState
from libra_supervisor.app.engine import Engine, EngineSite
from libra_supervisor.process.child import ExitStatus, RunningChild
from libra_supervisor.process.identity import ProcessIdentity
from libra_supervisor.process.lifecycle import Starter
from libra_supervisor.process.tree import StopDeadlines, TreeEnded

LOOK_PERIOD_S: Final = 1.0
NUM_SILENT_LOOKS: Final = 3
"""In a row, until a server counts as gone: what refuses connections may be about to listen."""

SECOND_CHANCE_S: Final = 30.0
"""After a server was let go of: its operator may have replaced it, or it may have recovered."""

NOBODY: Final = ProcessIdentity(0, 0, "")
"""No process of this machine: nothing can be signalled by it."""


class ForeignTree:
    """Nothing of it is ours to look at or to end."""

    def __init__(self) -> None:
        self.is_let_go = anyio.Event()

    def add_root(self, identity: ProcessIdentity) -> None:
        """Nobody's ranks are told to a server."""

    async def observe(self, *, max_age_s: float = 0.0) -> None:
        """Nothing to see."""

    async def end(self, deadlines: StopDeadlines, *, hurry: anyio.Event | None = None) -> TreeEnded:
        self.is_let_go.set()
        return TreeEnded(
            survivors=(),
            detail="",
            num_killed=0,
            ended_in_grace=False,
            removed_segments=(),
            took_s=0.0,
        )


class ForeignChild:
    """One life of such a server; `libra_supervisor.process.child.RunningChild`."""

    def __init__(
        self,
        child_id: ChildId,
        incarnation: Incarnation,
        ask: Callable[[], Awaitable[InstanceState]],
    ) -> None:
        self.child_id = child_id
        self.incarnation = incarnation
        self.identity = NOBODY
        self.tree = ForeignTree()
        self._ask = ask

    async def wait(self) -> ExitStatus:
        """Until it is gone, another process answers in its place, or it was let go of."""
        num_silent = 0
        while num_silent < NUM_SILENT_LOOKS and not self.tree.is_let_go.is_set():
            with anyio.move_on_after(LOOK_PERIOD_S):
                await self.tree.is_let_go.wait()
            try:
                state = await self._ask()
            except LibraError as error:
                # One that is too busy to answer in time is a matter of health.
                num_silent += not isinstance(error.__cause__, TimeoutError)
                continue
            num_silent = 0
            if state.incarnation != self.incarnation:
                break
        return ExitStatus(None, None)

    async def last_lines(self, num_lines: int) -> tuple[str, ...]:
        """What it prints is with whoever runs it."""
        return ()

    def attach_rank(self, rank: int, out_fd: int, err_fd: int) -> None:
        raise ChildError(f"{self.child_id} has no ranks")

    def reap(self) -> None:
        """Its pid is not ours to release."""


class ForeignEngine(Engine):
    """One server of `heterogeneous_rollout.endpoints`."""

    def __init__(
        self,
        site: EngineSite,
        placement: InstancePlacement,
        scheduler: Scheduler,
        *,
        url: str,
        rng: Random,
    ) -> None:
        super().__init__(site, placement, scheduler, port=0, served_directory=lambda: None, rng=rng)
        self._address = url.rstrip("/")
        self._found: Incarnation | None = None
        self._let_go: tuple[Incarnation, float] | None = None
        """The process that was let go of last, and when."""

    def required_facts(self) -> dict[str, str]:
        """There is nothing to adopt: what runs is found by asking."""
        return {"url": self._address}

    async def hindrance(self) -> str | None:
        """Why the server cannot be used now; waiting for it costs nothing."""
        if not self.is_started:
            await self._connect(self._address)
        try:
            state = await self.client.state()
        except LibraError as error:
            return f"no server of this run answers: {error}"
        if state.run_id != self._site.run_id:
            return (
                f"the server at {self._address} was started for run {state.run_id}, "
                f"this is {self._site.run_id}"
            )
        if state.instance_id != self.placement.instance_id:
            return (
                f"the server at {self._address} was started as {state.instance_id}, "
                f"its place in the list makes it {self.placement.instance_id}"
            )
        if self._let_go is not None:
            incarnation, at = self._let_go
            if state.incarnation == incarnation and clock.now() - at < SECOND_CHANCE_S:
                return f"{incarnation} at {self._address} failed; its operator has to replace it"
        self._found = state.incarnation
        return None

    async def start(self, spawner: Starter, incarnation: Incarnation) -> RunningChild:
        if self._found is None:
            raise ChildError(f"no server of this run answers at {self._address}")
        return ForeignChild(ChildId(self.placement.instance_id), self._found, self.client.state)

    async def drain(self, child: RunningChild) -> None:
        self._let_go = (child.incarnation, clock.now())
        await super().drain(child)
