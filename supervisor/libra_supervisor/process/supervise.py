"""One child's whole life as one task: start, ready, watch, stop, restart, give up.

    supervision = Supervision(child_id, hooks, spawner=..., budget=..., deadlines=..., ...)
    tasks.start_soon(supervision.run)
    ...
    supervision.stop()  # a second call shortens the deadlines
    await supervision.until_down()

An exit that nobody asked for is a failure, exit code 0 included. After every exit the whole tree
is ended before anything else starts, so two lives of one child never overlap.
"""

from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, TypeAlias

import anyio

from libra import clock
from libra.errors import ChildError, NodeAwayError, came_from
from libra.ids import ChildId, Incarnation
from libra.tracing.log import get_log
from libra_supervisor.events import (
    ChildEvent,
    ChildExited,
    ChildGaveUp,
    ChildReady,
    ChildRestartScheduled,
    ChildStarted,
    ChildSuspected,
    ChildUnkillable,
    ChildWaiting,
)
from libra_supervisor.process.child import ExitStatus, RunningChild
from libra_supervisor.process.lifecycle import (
    Adoptee,
    Asked,
    ChildHooks,
    ChildState,
    ChildStatus,
    Deadlines,
    End,
    Exited,
    Over,
    Stuck,
    Verdict,
)
from libra_supervisor.process.restart import GiveUp, RestartAfter, RestartBudget
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.process.tree import StopDeadlines

NUM_LAST_LINES: Final = 50
_GATE_PERIOD_S: Final = 1.0
_OBSERVE_FIRST_S: Final = 2.0
_OBSERVE_PERIOD_S: Final = 30.0
_OBSERVE_MAX_AGE_S: Final = 5.0
_DUMP_WAIT_S: Final = 5.0

_log = get_log()

Post: TypeAlias = Callable[[ChildEvent], Awaitable[None]]


class Supervision:
    """Supervises `child_id` while `run` runs. Commands only set flags; `run` acts on them."""

    def __init__(  # noqa: PLR0913 - the parts of one life, each replaceable in tests
        self,
        child_id: ChildId,
        hooks: ChildHooks,
        *,
        spawner: Spawner,
        budget: RestartBudget,
        deadlines: Deadlines,
        post: Post,
        rng: Random,
    ) -> None:
        self._child_id = child_id
        self._hooks = hooks
        self._spawner = spawner
        self._budget = budget
        self._deadlines = deadlines
        self._post = post
        self._rng = rng
        self._is_stop_wanted = False
        self._asked = anyio.Event()
        self._hurry = anyio.Event()
        self._down = anyio.Event()
        self._status = ChildStatus(child_id=child_id, state=ChildState.DOWN, since=0.0)
        self._child: RunningChild | None = None

    # Commands

    def stop(self) -> None:
        """Drain, SIGTERM, grace, SIGKILL; `run` returns after it. Called again: hurry."""
        if self._is_stop_wanted:
            self._hurry.set()
        self._is_stop_wanted = True
        self._asked.set()

    def restart(self) -> None:
        """Replace the process on purpose; costs nothing of the budget. Ends a back-off early."""
        self._asked.set()

    def note_progress(self) -> None:
        """Note that the child did something useful: served a request, trained a new step."""
        self._budget.on_progress(now=clock.now())

    def status(self) -> ChildStatus:
        return self._status

    @property
    def child(self) -> RunningChild | None:
        return self._child

    async def until_down(self) -> None:
        """Until `run` has returned: stopped, given up or unkillable (see `status().state`)."""
        await self._down.wait()

    # The life

    async def run(self, adopt: Adoptee | None = None) -> None:
        """Supervise until a stop, a spent budget or an unkillable process.

        `adopt` is a process of an earlier supervisor; when it does not run any more, a new one
        is started after its leftovers are ended. Cancelled, it ends the tree in a hurry.
        """
        try:
            child = await self._adopt(adopt) if adopt is not None else None
            if child is None:
                adopt = None
                await self._clear()
            while child is not None or not self._is_stop_wanted:
                if not await self._one_life(child, adopt):
                    return
                child = adopt = None
            self._enter(ChildState.DOWN)
        finally:
            self._down.set()

    async def _one_life(self, adopted: RunningChild | None, adoptee: Adoptee | None) -> bool:
        """Start (unless adopted), watch, end; False when there must be no next life."""
        try:
            child = adopted or await self._start()
        except ChildError as error:
            is_excused = came_from(error, NodeAwayError)
            return await self._after_failure(Verdict(str(error), is_excused=is_excused), ())
        if child is None:
            return True
        self._child = child
        try:
            over = await self._watched(child, adoptee)
            return await self._finish(child, over)
        finally:
            self._child = None

    async def _watched(self, child: RunningChild, adoptee: Adoptee | None) -> Over:
        """Report the start, wait for the end of this life, make ready for it.

        Cancelled or failing on the way, it ends the tree at once.
        """
        try:
            await self._started(child, is_adopted=adoptee is not None)
            over = await self._until_over(child, adoptee)
            await self._before_end(child, over)
        except BaseException:
            with anyio.CancelScope(shield=True):  # bounded by the deadlines of _end
                self._hurry.set()
                await self._end(child, self._deadlines.stop, Asked())
            raise
        return over

    async def _adopt(self, adoptee: Adoptee) -> RunningChild | None:
        """None when it does not run any more, or a command came while it was looked for."""
        self._enter(ChildState.WAITING, detail="for the process of an earlier supervisor")
        found: list[RunningChild | None] = []
        async with anyio.create_task_group() as tasks:

            async def look() -> None:
                identity, incarnation = adoptee.identity, adoptee.incarnation
                found.append(await self._spawner.adopt(self._child_id, identity, incarnation))
                tasks.cancel_scope.cancel()

            tasks.start_soon(look)
            await self._asked.wait()
            tasks.cancel_scope.cancel()
        child = found[0] if found else None
        if child is not None:
            await self._hooks.take_over(adoptee.facts)
        return child

    async def _clear(self) -> None:
        """End what an earlier life left behind: it holds devices, ports and memory."""
        ended = await self._spawner.clear(self._child_id, self._deadlines.stop.kill_wait_s)
        if ended.survivors:
            pids = tuple(row.pid for row in ended.survivors)
            nobody = Incarnation("")
            await self._post(
                ChildUnkillable(self._child_id, nobody, pids, ended.detail, clock.now())
            )

    async def _start(self) -> RunningChild | None:
        """Return a started process, or None when a command came first."""
        if not await self._pass_gate():
            return None
        self._consume_restart()
        self._enter(ChildState.STARTING)
        incarnation = Incarnation(f"{self._child_id}-{self._rng.getrandbits(48):012x}")
        return await self._hooks.start(self._spawner, incarnation)

    async def _started(self, child: RunningChild, *, is_adopted: bool) -> None:
        self._enter(ChildState.STARTING, pid=child.identity.pid, incarnation=child.incarnation)
        await self._post(
            ChildStarted(
                child_id=self._child_id,
                pid=child.identity.pid,
                start_ticks=child.identity.start_ticks,
                incarnation=child.incarnation,
                at=clock.now(),
                is_adopted=is_adopted,
                facts=self._hooks.facts(),
                boot_id=child.identity.boot_id,
            )
        )

    async def _pass_gate(self) -> bool:
        said: str | None = None
        while (hindrance := await self._hooks.hindrance()) is not None:
            if said is None:
                # Once: the figures in it change, and `status` has the newest.
                _log.warning("start_waits", child=self._child_id, why=hindrance)
            if hindrance != said:
                said = hindrance
                self._enter(ChildState.WAITING, detail=hindrance)
                await self._post(ChildWaiting(self._child_id, hindrance, clock.now()))
            with anyio.move_on_after(_GATE_PERIOD_S):
                await self._asked.wait()
            if self._is_stop_wanted:
                return False
            self._consume_restart()
        return True

    # Watching

    async def _until_over(self, child: RunningChild, adoptee: Adoptee | None) -> Over:
        """Wait until it exited, is stuck, or somebody asked."""
        outcomes: list[Over] = []
        async with anyio.create_task_group() as tasks:

            async def report(wait: Callable[[], Awaitable[Over]]) -> None:
                outcomes.append(await wait())
                tasks.cancel_scope.cancel()

            tasks.start_soon(report, lambda: self._exited(child))
            tasks.start_soon(report, lambda: self._stuck(child, adoptee))
            tasks.start_soon(report, self._was_asked)
            tasks.start_soon(self._observe, child)
        return outcomes[0]

    async def _exited(self, child: RunningChild) -> Over:
        return Exited(await child.wait())

    async def _was_asked(self) -> Over:
        await self._asked.wait()
        return Asked()

    async def _stuck(self, child: RunningChild, adoptee: Adoptee | None) -> Over:
        if (reason := await self._miss_start(child, adoptee)) is not None:
            return Stuck(reason)
        return Stuck(await self._hooks.until_stuck(child))

    async def _miss_start(self, child: RunningChild, adoptee: Adoptee | None) -> str | None:
        began_at = clock.now()
        timeout_s = self._deadlines.start_timeout_s
        if adoptee is not None and adoptee.was_ready:
            timeout_s = self._deadlines.adopt_timeout_s
        try:
            with anyio.fail_after(timeout_s):
                await self._hooks.until_ready(child)
        except TimeoutError:
            return f"not ready within {timeout_s:g} s"
        except ChildError as error:
            return str(error)
        self._enter(ChildState.READY, pid=child.identity.pid, incarnation=child.incarnation)
        start_s = 0.0 if adoptee is not None else clock.now() - began_at
        await self._post(ChildReady(self._child_id, child.incarnation, start_s, clock.now()))
        return None

    async def _observe(self, child: RunningChild) -> None:
        """Look at the tree now and then: what a sudden death hides is known from before."""
        period_s = _OBSERVE_FIRST_S
        while True:
            await clock.sleep(period_s)
            await child.tree.observe(max_age_s=_OBSERVE_MAX_AGE_S)
            period_s = min(_OBSERVE_PERIOD_S, period_s * 2)

    # Ending

    async def _before_end(self, child: RunningChild, over: Over) -> None:
        self._enter(ChildState.STOPPING, pid=child.identity.pid, incarnation=child.incarnation)
        match over:
            case Exited():
                return
            case Stuck(reason):
                await self._post(
                    ChildSuspected(self._child_id, child.incarnation, reason, clock.now())
                )
                with anyio.move_on_after(_DUMP_WAIT_S):
                    await self._hooks.dump(child)
            case Asked():
                await self._drain(child)

    async def _finish(self, child: RunningChild, over: Over) -> bool:
        deadlines = self._deadlines.stop
        if isinstance(over, Exited):
            deadlines = StopDeadlines(term_grace_s=0, kill_wait_s=deadlines.kill_wait_s)
        with anyio.CancelScope(shield=True):  # bounded by the deadlines
            end = await self._end(child, deadlines, over)
        if not end.is_gone:
            self._enter(ChildState.UNKILLABLE, detail=end.verdict.cause)
            return False
        if isinstance(over, Asked):
            return True
        return await self._after_failure(end.verdict, end.last_lines)

    async def _drain(self, child: RunningChild) -> None:
        """Bounded by drain_timeout_s, the second stop command and the child's own exit."""
        with anyio.move_on_after(self._deadlines.drain_timeout_s):
            async with anyio.create_task_group() as tasks:

                async def cancel_after(wait: Callable[[], Awaitable[object]]) -> None:
                    await wait()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(cancel_after, lambda: self._hooks.drain(child))
                tasks.start_soon(cancel_after, child.wait)
                tasks.start_soon(cancel_after, self._hurry.wait)

    async def _end(self, child: RunningChild, deadlines: StopDeadlines, over: Over) -> End:
        """End the tree, let go of the process, report."""
        ended = await child.tree.end(deadlines, hurry=self._hurry)
        status = ExitStatus(None, None)
        if not any(row.pid == child.identity.pid for row in ended.survivors):
            status = await child.wait()
        lines = await child.last_lines(NUM_LAST_LINES)
        child.reap()
        verdict = await self._verdict(child, over, status, lines)
        if ended.lost_with:
            why = ended.lost_with
            cause = verdict.cause if why in verdict.cause else f"{why}; {verdict.cause}"
            verdict = Verdict(cause, is_final=verdict.is_final, is_excused=True)
        if ended.survivors:
            verdict = Verdict(f"processes do not end: {ended.detail}")
            pids = tuple(row.pid for row in ended.survivors)
            await self._post(
                ChildUnkillable(self._child_id, child.incarnation, pids, ended.detail, clock.now())
            )
        await self._post(
            ChildExited(
                child_id=self._child_id,
                incarnation=child.incarnation,
                exit_code=status.exit_code,
                signal=status.signal,
                asked_for=isinstance(over, Asked),
                reason=verdict.cause,
                last_lines=lines,
                at=clock.now(),
            )
        )
        return End(verdict, lines, is_gone=not ended.survivors)

    async def _verdict(
        self, child: RunningChild, over: Over, status: ExitStatus, lines: tuple[str, ...]
    ) -> Verdict:
        cause = f"{over.reason} ({status})" if isinstance(over, Stuck) else str(status)
        if isinstance(over, Asked):
            return Verdict(cause)
        return await self._hooks.judge(child, cause, lines)

    async def _after_failure(self, verdict: Verdict, lines: tuple[str, ...]) -> bool:
        """Ask the budget and wait; False when it is spent or no restart can help."""
        if self._is_stop_wanted:
            return True
        now, cause = clock.now(), verdict.cause
        if verdict.is_excused and not verdict.is_final and not self._budget.allows_none:
            self._enter(ChildState.BACKING_OFF, detail=cause, is_excused=True)
            await self._post(ChildRestartScheduled(self._child_id, 0.0, 0, now))
            return True
        decision = self._budget.on_failure(cause, now=now, rng=self._rng)
        if verdict.is_final:
            decision = GiveUp("a restart cannot help", cause, self._budget.num_failures)
        match decision:
            case RestartAfter(delay_s, num_recent):
                self._enter(ChildState.BACKING_OFF, detail=cause, has_failed=True)
                await self._post(ChildRestartScheduled(self._child_id, delay_s, num_recent, now))
                with anyio.move_on_after(delay_s):
                    await self._asked.wait()
                return True
            case GiveUp(reason, first_cause, num_failures):
                self._enter(ChildState.GAVE_UP, detail=f"{reason}: {cause}", has_failed=True)
                await self._post(
                    ChildGaveUp(self._child_id, reason, first_cause, num_failures, lines, now)
                )
                return False

    def _consume_restart(self) -> None:
        """Take a restart asked for while nothing ran as fulfilled by the start that follows."""
        if self._asked.is_set() and not self._is_stop_wanted:
            self._asked = anyio.Event()

    def _enter(
        self,
        state: ChildState,
        *,
        pid: int | None = None,
        incarnation: Incarnation | None = None,
        detail: str = "",
        has_failed: bool = False,
        is_excused: bool = False,
    ) -> None:
        last = self._status
        self._status = ChildStatus(
            child_id=self._child_id,
            state=state,
            since=clock.now(),
            pid=pid,
            incarnation=incarnation,
            detail=detail,
            num_failures=last.num_failures + has_failed,
            last_error=detail if has_failed or is_excused else last.last_error,
        )
