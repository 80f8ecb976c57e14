"""What ending a tree asks of Linux, behind one port so that tests can be an unkind kernel."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import anyio
import msgspec
from anyio import to_thread

from libra import clock
from libra_supervisor.process.cgroup import Cgroup
from libra_supervisor.process.identity import (
    ProcessIdentity,
    ProcessRow,
    boot_id,
    parse_stat,
    read_row,
)
from libra_supervisor.process.shared_memory import any_segments, mapped_segments, unlink_unused
from libra_supervisor.process.spec import CHILD_TAG, RUN_TAG

Tag: TypeAlias = tuple[str, str]
"""(run id, child id) as found in a process's environment."""

Table: TypeAlias = Mapping[int, ProcessRow]
Choose: TypeAlias = Callable[[Table, Callable[[int], Tag | None]], list[ProcessRow]]
"""Picks rows of the table; the second argument reads a process's tag."""


STACK_DUMP_SIGNAL: Final = signal.SIGABRT
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_YOUNG_S: Final = 10.0
_OLD_ZOMBIE_S: Final = 60.0


class Survey(msgspec.Struct, frozen=True):
    """The processes that were chosen, at one moment, and the /dev/shm names they have mapped."""

    rows: tuple[ProcessRow, ...]
    segments: frozenset[str]


class Kernel(Protocol):
    async def survey(
        self, choose: Choose, *, with_segments: bool, max_age_s: float = 0.0
    ) -> Survey:
        """Look at all processes and keep those chosen, by a table of `max_age_s` at most."""
        ...

    async def signal(self, rows: Iterable[ProcessRow], signum: int) -> None: ...
    async def exited(self, identity: ProcessIdentity) -> None: ...
    async def kill_cgroup(self, cgroup: Cgroup) -> None: ...
    async def remove_segments(self, names: frozenset[str]) -> tuple[str, ...]: ...
    async def describe(self, rows: Iterable[ProcessRow]) -> str: ...
    async def reap(self, keys: Iterable[tuple[int, int]]) -> None:
        """Let go of dead processes, by pid and start, that were left to this one to wait for."""
        ...


class Linux:
    """The real one. Scans run in a worker thread: a host may have thousands of processes."""

    def __init__(self) -> None:
        self._tags = TagReader()
        self._table: Table = {}
        self._read_at = float("-inf")
        self._reading = anyio.Lock()
        self._zombie_since: dict[tuple[int, int], float] = {}

    async def survey(
        self, choose: Choose, *, with_segments: bool, max_age_s: float = 0.0
    ) -> Survey:
        async with self._reading:
            if clock.now() - self._read_at > max_age_s or max_age_s == 0.0:
                self._table = await to_thread.run_sync(read_table)
                self._read_at = clock.now()
                self._tags.forget_all_but(self._table)
                self._reap_old_zombies()
            return await to_thread.run_sync(self._chosen, choose, with_segments)

    def _chosen(self, choose: Choose, with_segments: bool) -> Survey:
        rows = choose(self._table, self._tags.tag_of(self._table))
        segments: set[str] = set()
        if with_segments and any_segments():
            for row in rows:
                segments |= mapped_segments(row.pid)
        return Survey(tuple(rows), frozenset(segments))

    def _reap_old_zombies(self) -> None:
        """Orphans of our children are ours to wait for, also those that end by themselves.

        Whoever starts a process waits for it soon; what nobody waited for in a minute is an orphan.
        """
        now = clock.now()
        mine = os.getpid()
        zombies = {
            (row.pid, row.start_ticks)
            for row in self._table.values()
            if row.ppid == mine and row.is_dead
        }
        self._zombie_since = {key: self._zombie_since.get(key, now) for key in zombies}
        for key, since in self._zombie_since.items():
            if now - since > _OLD_ZOMBIE_S:
                _reap(*key)

    async def reap(self, keys: Iterable[tuple[int, int]]) -> None:
        for pid, start_ticks in keys:
            _reap(pid, start_ticks)

    async def signal(self, rows: Iterable[ProcessRow], signum: int) -> None:
        for row in rows:
            signal_process(row.pid, row.start_ticks, signum)

    async def exited(self, identity: ProcessIdentity) -> None:
        """Return when the process has ended (a zombie has), or was never there."""
        try:
            pidfd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            return
        try:
            row = read_row(identity.pid)
            if row is not None and row.start_ticks == identity.start_ticks:
                await anyio.wait_readable(pidfd)
        finally:
            os.close(pidfd)

    async def kill_cgroup(self, cgroup: Cgroup) -> None:
        cgroup.kill()

    async def remove_segments(self, names: frozenset[str]) -> tuple[str, ...]:
        return await to_thread.run_sync(unlink_unused, names)

    async def describe(self, rows: Iterable[ProcessRow]) -> str:
        return "; ".join(_describe(row) for row in rows)


def signal_process(pid: int, start_ticks: int, signum: int) -> bool:
    """Signal the process that started at `start_ticks`; False when the pid is now a stranger's.

    The file descriptor is opened first and the start time compared after, so there is no moment
    in which the pid could change hands unseen.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        row = read_row(pid)
        if row is None or row.start_ticks != start_ticks:
            return False
        signal.pidfd_send_signal(pidfd, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)
    return True


def _reap(pid: int, start_ticks: int) -> None:
    row = read_row(pid)
    is_mine = row is not None and row.ppid == os.getpid() and row.start_ticks == start_ticks
    if is_mine and row is not None and row.is_dead:
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def request_stack_dump(identities: Iterable[ProcessIdentity | None]) -> None:
    """End Python processes with their stacks on stderr.

    PYTHONFAULTHANDLER has to be set in their environment. The handler is C code: it runs even
    where the interpreter is stuck in a collective or a lock.
    """
    for identity in identities:
        if identity is not None:
            signal_process(identity.pid, identity.start_ticks, STACK_DUMP_SIGNAL)


def read_table() -> dict[int, ProcessRow]:
    """Every process of the machine that this process can see."""
    table: dict[int, ProcessRow] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - see _row_from
        if name.isdigit() and (row := _row_from(name)) is not None:
            table[row.pid] = row
    return table


def _row_from(name: str) -> ProcessRow | None:
    # Plain os calls: this runs once per process of the host, and pathlib triples the time.
    try:
        fd = os.open(f"/proc/{name}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        return parse_stat(os.read(fd, 4096))
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def read_tag(pid: int) -> Tag | None:
    """Return the process's tag; None when it has none or its environment cannot be read."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    run_id = child_id = None
    for entry in environ.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == RUN_TAG.encode():
            run_id = os.fsdecode(value)
        elif name == CHILD_TAG.encode():
            child_id = os.fsdecode(value)
    return None if run_id is None or child_id is None else (run_id, child_id)


class TagReader:
    """Reads processes' tags once each; a scan of the machine costs a third then."""

    def __init__(self) -> None:
        self._tag_of: dict[tuple[int, int], Tag | None] = {}

    def forget_all_but(self, table: Table) -> None:
        living = {(row.pid, row.start_ticks) for row in table.values()}
        self._tag_of = {key: tag for key, tag in self._tag_of.items() if key in living}

    def tag_of(self, table: Table) -> Callable[[int], Tag | None]:
        """A lookup for the processes of `table`."""
        young = now_ticks() - _YOUNG_S * _TICKS_PER_S

        def lookup(pid: int) -> Tag | None:
            row = table[pid]
            key = (row.pid, row.start_ticks)
            if key in self._tag_of:
                return self._tag_of[key]
            tag = read_tag(pid)
            # Between fork and exec a child still shows its parent's environment: a young process
            # without a tag is looked at again.
            if tag is not None or row.start_ticks < young:
                self._tag_of[key] = tag
            return tag

        return lookup


def now_ticks() -> float:
    """Clock ticks since boot, to compare with a process's start."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S


def own_line(table: Table) -> frozenset[int]:
    """Return this process and its ancestors: never to be signalled."""
    line = {1}
    pid = os.getpid()
    while pid in table and pid not in line:
        line.add(pid)
        pid = table[pid].ppid
    return frozenset(line | {os.getpid(), os.getppid()})


def identity_in(row: ProcessRow) -> ProcessIdentity:
    return ProcessIdentity(row.pid, row.start_ticks, boot_id())


def _describe(row: ProcessRow) -> str:
    try:
        waits_in = Path(f"/proc/{row.pid}/wchan").read_text(encoding="ascii").strip("\0\n0")
    except OSError:
        waits_in = ""
    where = f", waits in {waits_in}" if waits_in else ""
    return f"pid {row.pid} ({row.name}) in state {row.state}{where}"
