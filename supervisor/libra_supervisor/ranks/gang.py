"""All ranks or none: start torchrun, link every rank, and end all of them when one is lost.

gang = Gang(site, spawner=..., config=..., choose=..., post=..., rng=...)
tasks.start_soon(gang.run)
await gang.broadcast(command)      # or send(rank, ...), or send_each({rank: ...})
gang.stop()
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

import anyio
import msgspec

from libra import clock
from libra.config.supervision import SupervisionConfig
from libra.errors import ChildError, PeerError, ungrouped
from libra.ids import Incarnation, Rank
from libra.wire.rank import Hello, RankCommand, RankEvent, Shutdown, StepTrained
from libra_supervisor.events import (
    ChildEvent,
    ChildGaveUp,
    ChildRestartScheduled,
    GangGaveUp,
    GangLost,
    GangReady,
    RankSaid,
)
from libra_supervisor.process.child import RunningChild, num_oom_kills
from libra_supervisor.process.kernel import request_stack_dump
from libra_supervisor.process.lifecycle import (
    ChildHooks,
    ChildStatus,
    Deadlines,
    Verdict,
    deadlines_from,
)
from libra_supervisor.process.restart import RestartBudget, RestartPolicy, policy_from
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.process.spec import ProcessSpec
from libra_supervisor.process.supervise import Supervision
from libra_supervisor.process.tree import StopDeadlines
from libra_supervisor.ranks.failure import explained
from libra_supervisor.ranks.link import Link, accept_ranks, rank_socket
from libra_supervisor.ranks.roster import Roster
from libra_supervisor.ranks.torchrun import (
    Attempt,
    GangSite,
    attempt_spec,
    first_error,
)

_TORCHRUN_NOTICES_S: Final = 5.0
_DUMP_S: Final = 2.5
_LONGEST_GRACE_S: Final = 5.0
_TORCHRUN_LEAVES_S: Final = 1.0
_FINAL_EXIT_CODES: Final = (2, 5, 6)
_CHILD_FAILED: Final = 4
_NUM_SHOWN_LINES: Final = 20

GangEvent: TypeAlias = ChildEvent | GangReady | RankSaid | GangLost | GangGaveUp
Choose: TypeAlias = Callable[[int], Awaitable[Path | None]]
"""The complete checkpoint that an attempt starts from; None: from the base model."""

Hindrance: TypeAlias = Callable[[], Awaitable[str | None]]
"""Why a start has to wait, in words; None when it can go ahead."""


class Gang:
    """The ranks of one run. `run` is its task; the other methods may be called any time."""

    def __init__(  # noqa: PLR0913 - what the gang asks of others
        self,
        site: GangSite,
        *,
        spawner: Spawner,
        config: SupervisionConfig,
        choose: Choose,
        post: Callable[[GangEvent], Awaitable[None]],
        rng: Random,
        hindrance: Hindrance | None = None,
    ) -> None:
        """`hindrance` says why an attempt has to wait: memory in use on its devices."""
        self._site = site
        self._socket_directory = site.socket_directory or site.directory.root
        self._post = post
        self._newest_step = 0
        self._hooks = _GangHooks(site, config, choose, self._hear, hindrance)
        self._supervision = Supervision(
            site.child_id,
            self._hooks,
            spawner=spawner,
            budget=RestartBudget(_restarts(site, config)),
            deadlines=gang_deadlines(config),
            post=self._pass_on,
            rng=rng,
        )

    async def run(self) -> None:
        """Serve and supervise the ranks until a stop or a spent budget.

        Raises what `post` or `choose` raise, with the gang ended.
        """
        with ungrouped(), rank_socket(self._socket_directory) as (path, listener):
            self._hooks.control_socket = path
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(
                    lambda: accept_ranks(
                        listener, run_id=self._site.run_id, welcome=self._hooks.welcome
                    )
                )
                await self._supervision.run()
                tasks.cancel_scope.cancel()

    def stop(self) -> None:
        """Tell every rank to leave, then end the gang; called again, in a hurry."""
        self._supervision.stop()

    def restart(self) -> None:
        """Start another attempt on purpose; costs nothing of the budget."""
        self._supervision.restart()

    def reshape(self, site: GangSite, hindrance: Hindrance | None) -> None:
        """Start another attempt on purpose, in the place and layout that `site` says."""
        self._site = site
        self._hooks.settle(site, hindrance)
        self._supervision.restart()

    def status(self) -> ChildStatus:
        return self._supervision.status()

    @property
    def attempt(self) -> int:
        return self._hooks.roster.attempt

    @property
    def members(self) -> Mapping[Rank, Hello]:
        """The ranks of this attempt that said Hello, and their places in the parallel grid."""
        return self._hooks.roster.members

    async def welcome(self, hello: Hello, link: Link) -> None:
        """Take in a rank that linked on another node, and hear it until its end.

        Raises PeerError to turn it away.
        """
        await self._hooks.welcome(hello, link)

    async def send(self, rank: Rank, command: RankCommand) -> None:
        """Send to one rank; waits while it does not read. Raises PeerError when it is gone."""
        await self.send_each({rank: command})

    async def broadcast(self, command: RankCommand) -> None:
        """Send the same to every rank. Raises PeerError when one of them is gone."""
        await self.send_each(dict.fromkeys(self.members, command))

    async def send_each(self, commands: Mapping[Rank, RankCommand]) -> None:
        """Send each rank its own, side by side. Raises PeerError when one of them is gone."""
        await self._hooks.roster.send_each(commands)

    async def until_down(self) -> None:
        await self._supervision.until_down()

    async def _hear(self, event: GangEvent) -> None:
        # A step trained once more, after a restart, is no progress.
        if (
            isinstance(event, RankSaid)
            and isinstance(event.event, StepTrained)
            and event.event.step > self._newest_step
        ):
            self._newest_step = event.event.step
            self._supervision.note_progress()
        await self._post(event)

    async def _pass_on(self, event: ChildEvent) -> None:
        await self._post(event)
        if isinstance(event, ChildRestartScheduled):
            await self._post(GangLost(self.attempt, self._supervision.status().last_error))
        elif isinstance(event, ChildGaveUp):
            # One that is never restarted has no budget; what it printed is in its log.
            first_line = event.first_cause.partition("\n")[0]
            reason = _in_words(event) if self._site.is_restarted else first_line
            await self._post(GangGaveUp(self._hooks.exit_code, reason))


def _in_words(event: ChildGaveUp) -> str:
    reason = (
        f"the trainer failed {event.num_failures} times and was given up "
        f"({event.reason}); first cause: {event.first_cause}"
    )
    return "\n".join((reason, *event.last_lines[-_NUM_SHOWN_LINES:]))


def _restarts(site: GangSite, config: SupervisionConfig) -> RestartPolicy:
    # A step is minutes of work of all ranks: it is progress whenever it comes.
    policy = msgspec.structs.replace(policy_from(config), stable_s=0.0)
    return policy if site.is_restarted else msgspec.structs.replace(policy, max_in_window=0)


def gang_deadlines(config: SupervisionConfig) -> Deadlines:
    """As configured, with a short grace.

    Ranks leave on Shutdown, not on SIGTERM, and when one is lost the others only wait for it.
    """
    whole = deadlines_from(config)
    grace_s = min(whole.stop.term_grace_s, _LONGEST_GRACE_S)
    stop = StopDeadlines(term_grace_s=grace_s, kill_wait_s=whole.stop.kill_wait_s)
    return Deadlines(
        start_timeout_s=whole.start_timeout_s, drain_timeout_s=whole.drain_timeout_s, stop=stop
    )


class _GangHooks(ChildHooks):
    """What supervision asks of a gang: its spec, when it is ready, whether it hangs."""

    def __init__(
        self,
        site: GangSite,
        config: SupervisionConfig,
        choose: Choose,
        post: Callable[[GangEvent], Awaitable[None]],
        hindrance: Hindrance | None,
    ) -> None:
        self._hindrance = hindrance
        self.control_socket = ""
        self.exit_code = _CHILD_FAILED
        self._site = site
        self._heartbeat_timeout_s = config.rank_heartbeat_timeout_s
        self._shutdown_grace_s = gang_deadlines(config).stop.term_grace_s - _TORCHRUN_LEAVES_S
        self._choose = choose
        self._post = post
        self._oom_kills_before = 0
        self._hangs = False
        self.roster = self._new_roster(0)

    def settle(self, site: GangSite, hindrance: Hindrance | None) -> None:
        """The next attempt starts there."""
        self._site, self._hindrance = site, hindrance

    async def welcome(self, hello: Hello, link: Link) -> None:
        await self.roster.welcome(hello, link)

    async def hindrance(self) -> str | None:
        return None if self._hindrance is None else await self._hindrance()

    async def spec(self, incarnation: Incarnation) -> ProcessSpec:
        self.roster = self._new_roster(self.roster.attempt + 1)
        self.exit_code = _CHILD_FAILED
        self._hangs = False
        self._oom_kills_before = num_oom_kills()
        attempt = Attempt(
            number=self.roster.attempt,
            incarnation=incarnation,
            control_socket=self.control_socket,
            restore=await self._choose(self.roster.attempt),
            shutdown_grace_s=self._shutdown_grace_s,
        )
        return attempt_spec(self._site, attempt)

    async def until_ready(self, child: RunningChild) -> None:
        roster = self.roster

        def take_in() -> None:
            # Ranks make their own sessions; with their identities the tree ends them for sure.
            for peer in roster.peers():
                child.tree.add_root(peer)
            for rank, (out_fd, err_fd) in roster.outputs().items():
                child.attach_rank(rank, out_fd, err_fd)

        lost: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def note_loss() -> None:
                lost.append(await self._until_lost())
                tasks.cancel_scope.cancel()

            tasks.start_soon(note_loss)
            step, num_parameters = await roster.until_ready(take_in)
            tasks.cancel_scope.cancel()
        if lost:
            raise ChildError(lost[0])
        await self._post(GangReady(roster.attempt, step, num_parameters))

    async def until_stuck(self, child: RunningChild) -> str:
        reasons: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def report(wait: Callable[[], Awaitable[str]]) -> None:
                reasons.append(await wait())
                tasks.cancel_scope.cancel()

            tasks.start_soon(report, self._until_lost)
            tasks.start_soon(report, self._until_silent)
        return reasons[0]

    async def drain(self, child: RunningChild) -> None:
        if not self.roster.members:
            # Nobody could hear a Shutdown yet, and nothing is lost.
            return
        try:
            await self.roster.send_each(
                dict.fromkeys(self.roster.members, Shutdown("the run is stopping"))
            )
        except PeerError:
            return
        # They leave when what they do is done; supervision ends this wait with their exit.
        await anyio.sleep_forever()

    async def dump(self, child: RunningChild) -> None:
        request_stack_dump(self.roster.peers())
        await clock.sleep(_DUMP_S)

    async def judge(self, child: RunningChild, cause: str, last_lines: tuple[str, ...]) -> Verdict:
        if self._hangs:
            # What torchrun reports after this is our own doing.
            return Verdict(cause)
        failed = self.roster.failed
        self.exit_code = failed.exit_code if failed is not None else _CHILD_FAILED
        cause = explained(
            cause,
            last_lines,
            failed=failed,
            error=first_error(self._site.directory, child.incarnation),
            has_oom_kill=num_oom_kills() > self._oom_kills_before,
        )
        return Verdict(cause, is_final=self.exit_code in _FINAL_EXIT_CODES)

    def _new_roster(self, attempt: int) -> Roster:
        async def hear(_rank: Rank, event: RankEvent) -> None:
            await self._post(RankSaid(attempt, event))

        return Roster(
            attempt=attempt,
            world_size=self._site.placement.world_size,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            hear=hear,
        )

    async def _until_silent(self) -> str:
        reason = await self.roster.until_silent()
        self._hangs = True
        return reason

    async def _until_lost(self) -> str:
        reason = await self.roster.until_lost()
        # torchrun sees the death of a rank within a tenth of a second and says more about it.
        await clock.sleep(_TORCHRUN_NOTICES_S)
        return reason
