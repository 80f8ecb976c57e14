"""The words of supervision: states, deadlines, outcomes, and what a kind of child plugs in."""

from enum import Enum
from typing import Protocol, TypeAlias

import anyio
import msgspec

from libra.config.supervision import SupervisionConfig
from libra.errors import InvariantError
from libra.ids import ChildId, Incarnation
from libra_supervisor.process.child import ExitStatus, RunningChild
from libra_supervisor.process.identity import ProcessIdentity
from libra_supervisor.process.spec import ProcessSpec
from libra_supervisor.process.tree import StopDeadlines


class ChildState(Enum):
    DOWN = "down"
    WAITING = "waiting"
    """A start is put off: see the detail."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    BACKING_OFF = "backing off"
    GAVE_UP = "gave up"
    UNKILLABLE = "unkillable"


class ChildStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for `status`; `since` is on the event loop's clock."""

    child_id: ChildId
    state: ChildState
    since: float
    pid: int | None = None
    incarnation: Incarnation | None = None
    detail: str = ""
    num_failures: int = 0
    last_error: str = ""


class Adoptee(msgspec.Struct, frozen=True, kw_only=True):
    """A process that an earlier supervisor started, as it was written down."""

    identity: ProcessIdentity
    incarnation: Incarnation
    was_ready: bool = True
    """False: it may still be loading, and has as long as one that was just started."""

    facts: dict[str, str] = {}


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    start_timeout_s: float = 900.0
    adopt_timeout_s: float = 120.0
    """For a process that was ready before its supervisor died: until it answers again."""

    drain_timeout_s: float = 60.0
    stop: StopDeadlines = msgspec.field(default_factory=StopDeadlines)


def deadlines_from(config: SupervisionConfig) -> Deadlines:
    return Deadlines(
        start_timeout_s=config.start_timeout_s,
        adopt_timeout_s=min(config.start_timeout_s, config.liveness_stall_s),
        drain_timeout_s=config.drain_timeout_s,
        stop=StopDeadlines(term_grace_s=config.term_grace_s, kill_wait_s=config.kill_wait_s),
    )


class Exited(msgspec.Struct, frozen=True):
    """The process ended by itself."""

    status: ExitStatus


class Stuck(msgspec.Struct, frozen=True):
    """The process runs but does not do its work."""

    reason: str


class Asked(msgspec.Struct, frozen=True):
    """A stop or restart command."""


Over: TypeAlias = Exited | Stuck | Asked
"""Why one life is over."""


class Verdict(msgspec.Struct, frozen=True):
    """What a failure means, in the words of those who know this kind of child."""

    cause: str
    is_final: bool = False
    """No restart can help: the configuration is wrong, the learning diverged."""

    is_excused: bool = False
    """It was lost with its node: no fault of its own, which costs nothing of the budget."""


class End(msgspec.Struct, frozen=True):
    """How one life ended, after its tree was ended."""

    verdict: Verdict
    last_lines: tuple[str, ...]
    is_gone: bool
    """False: something of it outlived SIGKILL."""


class Starter(Protocol):
    """The part of `libra_supervisor.process.spawn.Spawner` that starts processes."""

    async def spawn(self, spec: ProcessSpec, incarnation: Incarnation) -> RunningChild:
        """Start it. Raises ChildError with the reason when the program cannot be started."""
        ...


class ChildHooks:
    """What differs from one kind of child to another. Override what the kind needs."""

    async def spec(self, incarnation: Incarnation) -> ProcessSpec:
        """Say what to start. Raises ChildError when there cannot be one now (no free port)."""
        raise InvariantError(f"{type(self).__name__} does not say what to start as {incarnation}")

    async def start(self, spawner: Starter, incarnation: Incarnation) -> RunningChild:
        """Start it, or find what somebody else started. Raises ChildError when there is none."""
        return await spawner.spawn(await self.spec(incarnation), incarnation)

    async def hindrance(self) -> str | None:
        """Why a start has to wait (device memory in use); None when it can go ahead."""
        return None

    def facts(self) -> dict[str, str]:
        """What a later supervisor needs to take over what was started last."""
        return {}

    async def take_over(self, facts: dict[str, str]) -> None:
        """Make ready to watch a process that an earlier supervisor started with these facts."""

    async def until_ready(self, child: RunningChild) -> None:
        """Return when the child can work; raise ChildError when it never will.

        An adopted one proves here that it is the right one. Bounded by the start timeout, cancelled
        at the child's exit.
        """

    async def until_stuck(self, child: RunningChild) -> str:
        """Watch a ready child; return why it has to be replaced. Cancelled at its exit."""
        await anyio.sleep_forever()
        raise InvariantError(f"{child.child_id} was watched past the end of time")

    async def drain(self, child: RunningChild) -> None:
        """Before an asked-for stop: take away its work and wait for what is in flight."""

    async def dump(self, child: RunningChild) -> None:
        """Before a stuck child is ended: have it say where it hangs."""

    async def judge(self, child: RunningChild, cause: str, last_lines: tuple[str, ...]) -> Verdict:
        """After an end that nobody asked for: the cause for the operator, and whether to go on."""
        return Verdict(cause)
