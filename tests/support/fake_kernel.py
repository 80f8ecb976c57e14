"""A process table in memory that can be as unkind as no real kernel is on demand."""

import os
import signal

import anyio

from libra_supervisor.process.identity import ProcessRow
from libra_supervisor.process.kernel import Survey


class FakeKernel:
    """Processes by pid; SIGTERM and SIGKILL end them unless they are deaf or stuck."""

    def __init__(self):
        self.rows, self.tags, self.signals = {}, {}, []
        self.ignores_term, self.unkillable = set(), set()
        self.respawns = {}
        self.segments, self.removed = {}, ()
        self.survey_s = 0.0
        self._ended = {}

    def add(self, pid, *, ppid=None, sid=None, start_ticks=100, tag=None, state="S"):
        sid = pid if sid is None else sid
        ppid = os.getpid() if ppid is None else ppid
        self.rows[pid] = ProcessRow(pid, ppid, sid, sid, state, start_ticks, f"p{pid}")
        if tag is not None:
            self.tags[pid] = tag
        self._ended[pid] = anyio.Event()

    def end(self, pid):
        self.rows.pop(pid, None)
        self._ended[pid].set()
        for child, row in list(self.rows.items()):
            if row.ppid == pid:
                self.rows[child] = ProcessRow(
                    child, 1, row.pgid, row.sid, row.state, row.start_ticks, row.name
                )

    async def survey(self, choose, *, with_segments, max_age_s=0.0):
        await anyio.sleep(self.survey_s)
        rows = choose(self.rows, self.tags.get)
        names = {name for row in rows for name in self.segments.get(row.pid, ())}
        return Survey(tuple(rows), frozenset(names))

    async def signal(self, rows, signum):
        for row in rows:
            self.signals.append((row.pid, signal.Signals(signum).name))
            if row.pid not in self.rows or self.rows[row.pid].start_ticks != row.start_ticks:
                continue
            if signum == signal.SIGTERM and row.pid not in self.ignores_term:
                self.end(row.pid)
            elif signum == signal.SIGKILL and row.pid not in self.unkillable:
                self.end(row.pid)
                if self.respawns.get(row.pid):
                    self.add(self.respawns.pop(row.pid), tag=self.tags.get(row.pid))

    async def exited(self, identity):
        row = self.rows.get(identity.pid)
        if row is not None and row.start_ticks == identity.start_ticks:
            await self._ended[identity.pid].wait()

    async def kill_cgroup(self, cgroup):
        for pid in cgroup.pids():
            self.signals.append((pid, "cgroup"))

    async def remove_segments(self, names):
        self.removed = tuple(sorted(names))
        return self.removed

    async def reap(self, keys):
        self.reaped = sorted(pid for pid, _ in keys)

    async def describe(self, rows):
        return "; ".join(f"pid {row.pid} in state {row.state}" for row in rows)
