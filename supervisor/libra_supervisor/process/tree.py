"""Ending a child with everything it started.

The ladder: SIGTERM once, to the leader alone (it knows how to stop its own workers; a second or
a group-wide SIGTERM interrupts their clean-up); a grace; then SIGKILL of everything that belongs
to the tree, repeated until two sweeps in a row find nothing.

What belongs to a tree: the leader and the other roots by identity; what was seen in it before;
processes carrying the child's tag; members of the leader's session or process group; everything
in the child's cgroup; and descendants of any of these. setsid, double forks and the death of a
parent each break one of these marks, none breaks all. Never signalled: this process, its
ancestors, and a pid whose start time is not the one that was seen.
"""

import os
import signal
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import anyio
import msgspec

from libra import clock
from libra.ids import ChildId, RunId
from libra_supervisor.process.cgroup import Cgroup
from libra_supervisor.process.identity import ProcessIdentity, ProcessRow
from libra_supervisor.process.kernel import Kernel, Table, Tag, own_line

_FIRST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.25
_SWEEPS_TO_BE_SURE: Final = 2


class StopDeadlines(msgspec.Struct, frozen=True, kw_only=True):
    term_grace_s: float = 20.0
    """From SIGTERM to SIGKILL; 0 sends no SIGTERM."""

    kill_wait_s: float = 10.0
    """From the first SIGKILL until what is left counts as unkillable."""

    hurried_grace_s: float = 2.0
    """What is left of the grace once `hurry` is set."""


class TreeEnded(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a tree."""

    survivors: tuple[ProcessRow, ...]
    """Alive after SIGKILL and kill_wait_s: unkillable. Empty when all went well."""

    detail: str
    """The survivors in words; empty without any."""

    num_killed: int
    ended_in_grace: bool
    """SIGTERM was sent and the leader left by itself (or was gone already)."""

    removed_segments: tuple[str, ...]
    took_s: float
    lost_with: str = ""
    """The loss of its node, in words, where that is what ended it or a part of it."""


class EndableTree(Protocol):
    """What supervision does with a child and its descendants; `Tree` is the real one."""

    def add_root(self, identity: ProcessIdentity) -> None: ...

    async def observe(self, *, max_age_s: float = 0.0) -> None: ...

    async def end(self, deadlines: StopDeadlines, *, hurry: anyio.Event | None = None) -> TreeEnded:
        """End all of it; bounded by the deadlines."""


class Tree:
    """One started process and its descendants, for as long as any of them may live."""

    def __init__(
        self,
        leader: ProcessIdentity,
        *,
        run_id: RunId,
        child_id: ChildId,
        kernel: Kernel,
        cgroup: Cgroup | None = None,
    ) -> None:
        self._leader = leader
        self._tag: Tag = (run_id, child_id)
        self._kernel = kernel
        self._cgroup = cgroup
        self._known: set[tuple[int, int]] = {(leader.pid, leader.start_ticks)}
        self._segments: frozenset[str] = frozenset()
        self._was_asked = False

    def add_root(self, identity: ProcessIdentity) -> None:
        """Count another process as part of the tree: a rank that made its own session."""
        self._known.add((identity.pid, identity.start_ticks))

    async def observe(self, *, max_age_s: float = 0.0) -> None:
        """Remember members and shared memory; a later sudden death would hide both.

        With `max_age_s` trees that are observed about the same time share one scan.
        """
        await self._look(with_segments=True, max_age_s=max_age_s)

    async def end(self, deadlines: StopDeadlines, *, hurry: anyio.Event | None = None) -> TreeEnded:
        """Run the ladder; bounded by term_grace_s + kill_wait_s and the time of one sweep."""
        began_at = clock.now()
        in_grace = False
        if deadlines.term_grace_s > 0:
            # The leader's end hides what belonged to it.
            await self.observe()
            in_grace = await self._ask(deadlines, hurry or anyio.Event())
        survivors, num_killed = await self._kill(deadlines.kill_wait_s)
        # The leader stays: its pid is its owner's to release.
        leader_key = (self._leader.pid, self._leader.start_ticks)
        await self._kernel.reap(self._known - {leader_key})
        if self._cgroup is not None and not survivors:
            self._cgroup.remove()
        return TreeEnded(
            survivors=survivors,
            detail=await self._kernel.describe(survivors) if survivors else "",
            num_killed=num_killed,
            ended_in_grace=in_grace,
            removed_segments=await self._kernel.remove_segments(self._segments),
            took_s=clock.now() - began_at,
        )

    async def _ask(self, deadlines: StopDeadlines, hurry: anyio.Event) -> bool:
        """SIGTERM and wait; True when the leader is gone within the grace.

        Who ends a tree that somebody else is ending sends no second one.
        """
        if not self._was_asked:
            self._was_asked = True
            await self._kernel.signal([self._leader_row()], signal.SIGTERM)
        # A stopped process acts on SIGTERM only once it continues.
        await self._kernel.signal([self._leader_row()], signal.SIGCONT)
        is_gone = False
        with anyio.move_on_after(deadlines.term_grace_s) as grace:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_shorten, grace, hurry, deadlines.hurried_grace_s)
                await self._kernel.exited(self._leader)
                is_gone = True
                tasks.cancel_scope.cancel()
        return is_gone

    async def _kill(self, kill_wait_s: float) -> tuple[tuple[ProcessRow, ...], int]:
        is_first = True

        async def look() -> tuple[ProcessRow, ...]:
            # Segments are read once, while their owners live.
            nonlocal is_first
            if self._cgroup is not None and not is_first:
                await self._kernel.kill_cgroup(self._cgroup)
            rows = await self._look(with_segments=is_first)
            is_first = False
            return rows

        return await kill_until_gone(self._kernel, look, kill_wait_s=kill_wait_s)

    async def _look(self, *, with_segments: bool, max_age_s: float = 0.0) -> tuple[ProcessRow, ...]:
        survey = await self._kernel.survey(
            self._choose, with_segments=with_segments, max_age_s=max_age_s
        )
        self._known |= {(row.pid, row.start_ticks) for row in survey.rows}
        self._segments |= survey.segments
        return survey.rows

    def _choose(self, table: Table, tag_of: Callable[[int], Tag | None]) -> list[ProcessRow]:
        in_cgroup = frozenset(self._cgroup.pids()) if self._cgroup is not None else frozenset()
        return members(
            table,
            tag_of,
            leader=self._leader,
            tag=self._tag,
            known=frozenset(self._known),
            in_cgroup=in_cgroup,
        )

    def _leader_row(self) -> ProcessRow:
        leader = self._leader
        return ProcessRow(
            leader.pid, 0, leader.pid, leader.pid, "R", leader.start_ticks, self._tag[1]
        )


def members(
    table: Table,
    tag_of: Callable[[int], Tag | None],
    *,
    leader: ProcessIdentity,
    tag: Tag,
    known: frozenset[tuple[int, int]],
    in_cgroup: frozenset[int],
) -> list[ProcessRow]:
    """Living members of the tree, parents before their children as far as the table shows."""
    protected = own_line(table)
    leader_row = table.get(leader.pid)
    # The leader stays a zombie until the tree is gone, so its pid and its session number
    # cannot be another's; when not in the table, a session of that number may be a stranger's.
    has_session = leader_row is not None and leader_row.start_ticks == leader.start_ticks

    def in_session(row: ProcessRow) -> bool:
        # Session 0 is what the kernel shows for one outside this pid namespace.
        return leader.pid > 0 and leader.pid in (row.sid, row.pgid)

    def is_root(row: ProcessRow) -> bool:
        return (
            (row.pid, row.start_ticks) in known
            or row.pid in in_cgroup
            or (in_session(row) and (has_session or row.ppid == os.getpid()))
            or tag_of(row.pid) == tag
        )

    children: dict[int, list[ProcessRow]] = {}
    for row in table.values():
        children.setdefault(row.ppid, []).append(row)
    found: dict[int, ProcessRow] = {}
    pending = [row for row in table.values() if row.pid not in protected and is_root(row)]
    while pending:
        row = pending.pop()
        if row.pid in found or row.pid in protected:
            continue
        found[row.pid] = row
        pending += children.get(row.pid, [])
    return [row for row in found.values() if not row.is_dead]


async def kill_until_gone(
    kernel: Kernel, look: Callable[[], Awaitable[tuple[ProcessRow, ...]]], *, kill_wait_s: float
) -> tuple[tuple[ProcessRow, ...], int]:
    """SIGKILL what `look` finds until it finds nothing twice; (survivors, number killed).

    Bounded by `kill_wait_s` and the time of one look.
    """
    give_up_at = clock.now() + kill_wait_s
    killed: set[tuple[int, int]] = set()
    num_empty, pause_s = 0, _FIRST_PAUSE_S
    while True:
        rows = await look()
        num_empty = 0 if rows else num_empty + 1
        if num_empty == _SWEEPS_TO_BE_SURE:
            return (), len(killed)
        if rows and clock.now() >= give_up_at:
            return rows, len(killed)
        await kernel.signal(rows, signal.SIGKILL)
        fresh = {(row.pid, row.start_ticks) for row in rows} - killed
        killed |= fresh
        # New processes mean that something forks: no pause until a look finds only known ones.
        if not fresh:
            await clock.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)


async def leftovers_ended(
    *, run_id: RunId, child_id: ChildId, kernel: Kernel, kill_wait_s: float
) -> TreeEnded:
    """End processes that an earlier life of this child left behind, found by tag alone."""
    # Pid 0 is no process: the tree has no leader, only its tag.
    nobody = ProcessIdentity(0, 0, "")
    tree = Tree(nobody, run_id=run_id, child_id=child_id, kernel=kernel)
    return await tree.end(StopDeadlines(term_grace_s=0, kill_wait_s=kill_wait_s))


async def _shorten(scope: anyio.CancelScope, hurry: anyio.Event, hurried_grace_s: float) -> None:
    await hurry.wait()
    scope.deadline = min(scope.deadline, clock.now() + hurried_grace_s)
