"""Whatever of a run still lives when nothing of it should: found by tag, listed or ended.

`end_run` is for a run whose supervisor is this process or is known to be gone. `list_leftovers`
only looks: processes of other runs may be another supervisor's, or wait to be adopted.

    python -m libra_supervisor.process.sweep STATE_JSON     after the supervisor's death, in a job
    python -m libra_supervisor.process.sweep RUN_ID PID     the same on a node that follows
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import anyio
import msgspec

from libra.errors import DataError
from libra.ids import ChildId, RunId
from libra_supervisor.journal import StateFile, read_run_id
from libra_supervisor.process.identity import ProcessIdentity, ProcessRow, is_running
from libra_supervisor.process.kernel import Kernel, Linux, Table, Tag, own_line
from libra_supervisor.process.logs import RELAY_ID
from libra_supervisor.process.tree import kill_until_gone

END_WAIT_S: Final = 10.0
EMPTY: Final[Mapping[ChildId, ProcessIdentity]] = {}


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """A process that some supervisor of Libra started and that is not below this one."""

    run_id: RunId
    child_id: ChildId
    pid: int
    name: str


async def list_leftovers(kernel: Kernel) -> tuple[Leftover, ...]:
    """Processes with a Libra tag on this machine that do not descend from this process."""
    found: list[Leftover] = []

    def choose(table: Table, tag_of: Callable[[int], Tag | None]) -> list[ProcessRow]:
        line = own_line(table)
        for row in table.values():
            tag = None if row.is_dead else tag_of(row.pid)
            if tag is not None and not _is_below(row, table, {os.getpid()}) and row.pid not in line:
                run_id, child_id = RunId(tag[0]), ChildId(tag[1])
                found.append(Leftover(run_id=run_id, child_id=child_id, pid=row.pid, name=row.name))
        return []

    await kernel.survey(choose, with_segments=False)
    return tuple(sorted(found, key=lambda leftover: (leftover.run_id, leftover.pid)))


async def end_run(
    run_id: RunId,
    kernel: Kernel,
    *,
    kept: Mapping[ChildId, ProcessIdentity] = EMPTY,
    kill_wait_s: float = END_WAIT_S,
) -> tuple[ProcessRow, ...]:
    """SIGKILL every process of the run but the log relay and the children in `kept`.

    A kept child is spared with all that carries its tag, for as long as its process runs. Returns
    what outlived it after `kill_wait_s`; empty when all went well.
    """

    def choose(table: Table, tag_of: Callable[[int], Tag | None]) -> list[ProcessRow]:
        line = own_line(table)
        spared = {RELAY_ID, *(child for child, it in kept.items() if _is_in(table, it))}
        found: list[ProcessRow] = []
        for row in table.values():
            tag = None if row.is_dead or row.pid in line else tag_of(row.pid)
            if tag is not None and tag[0] == run_id and tag[1] not in spared:
                found.append(row)
        return found

    async def look() -> tuple[ProcessRow, ...]:
        return (await kernel.survey(choose, with_segments=False)).rows

    survivors, _ = await kill_until_gone(kernel, look, kill_wait_s=kill_wait_s)
    return survivors


def _is_in(table: Table, identity: ProcessIdentity) -> bool:
    row = table.get(identity.pid)
    return row is not None and not row.is_dead and row.start_ticks == identity.start_ticks


def _is_below(row: ProcessRow, table: Table, roots: frozenset[int] | set[int]) -> bool:
    seen: set[int] = set()
    while row.pid not in seen:
        if row.ppid in roots:
            return True
        seen.add(row.pid)
        if (parent := table.get(row.ppid)) is None:
            return False
        row = parent
    return False


def main(state_file: Path) -> int:
    """End what is left of the run of a dead supervisor, the log relay by the end of its inputs."""
    try:
        state = StateFile(state_file).load()
    except DataError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if state is None:
        return 0
    supervisor = ProcessIdentity(
        state.supervisor_pid, state.supervisor_start_ticks, state.supervisor_boot_id
    )
    if is_running(supervisor):
        sys.stderr.write(f"libra-supervisor {supervisor.pid} still runs: nothing is swept\n")
        return 1
    return _end(state.run_id)


def main_of_follower(run_id_file: Path, pid: int) -> int:
    """End what is left here of the run of a follower whose process `pid` is gone.

    A follower writes no state: the leader holds it. 0 when nobody began the run.
    """
    if Path(f"/proc/{pid}").exists():
        sys.stderr.write(f"libra-supervisor {pid} still runs: nothing is swept\n")
        return 1
    run_id = read_run_id(run_id_file)
    return 0 if run_id is None else _end(run_id)


def _end(run_id: RunId) -> int:
    survivors = anyio.run(end_run, run_id, Linux())
    for row in survivors:
        sys.stderr.write(f"pid {row.pid} ({row.name}) does not end\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    if len(sys.argv) > 2:  # noqa: PLR2004 - the second way to call it
        sys.exit(main_of_follower(Path(sys.argv[1]), int(sys.argv[2])))
    sys.exit(main(Path(sys.argv[1])))
