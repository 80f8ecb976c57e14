"""Processes of other runs on this machine: those of dead runs hold memory, devices and ports."""

from pathlib import Path

import anyio.to_thread

from libra.errors import DataError
from libra.ids import RunId
from libra_supervisor.doctor.findings import Finding
from libra_supervisor.journal import StateFile, read_run_id
from libra_supervisor.process.kernel import Kernel
from libra_supervisor.process.sweep import Leftover, list_leftovers
from libra_supervisor.run_directory import RunDirectory, holder_of

SHOWN = 6


async def leftover_findings(kernel: Kernel) -> list[Finding]:
    """One finding per run that has processes here; not ok when its supervisor is gone."""
    by_run: dict[RunId, list[Leftover]] = {}
    for leftover in await list_leftovers(kernel):
        by_run.setdefault(leftover.run_id, []).append(leftover)
    if not by_run:
        return [Finding(check="leftovers", ok=True, detail="no process of another run")]
    return [
        await anyio.to_thread.run_sync(_finding, run_id, found) for run_id, found in by_run.items()
    ]


def _finding(run_id: RunId, found: list[Leftover]) -> Finding:
    directory = _directory_of(run_id, found)
    holder = None if directory is None else holder_of(directory)
    processes = ", ".join(f"{it.child_id} (pid {it.pid}, {it.name})" for it in found[:SHOWN])
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    check, what = f"leftovers of run {run_id}", f"{processes}{more}"
    if holder is not None:
        return Finding(check=check, ok=True, detail=f"{what}; its {holder} runs")
    if directory is None:
        pids = " ".join(str(it.pid) for it in found)
        return Finding(
            check=check,
            ok=False,
            detail=f"{what}; no supervisor and no run directory of it is found",
            advice=f"they hold memory, devices and ports; look at them, then: kill -9 {pids}",
        )
    return Finding(
        check=check,
        ok=False,
        detail=f"{what}; its supervisor is gone, {directory.root} is its directory",
        advice="go on with the run, which adopts or ends them (the same command with --run-dir "
        f"{directory.root} --resume), or end them: "
        f"python3 -m libra_supervisor.process.sweep {directory.state}",
    )


def _directory_of(run_id: RunId, found: list[Leftover]) -> RunDirectory | None:
    """Where the run lives: its servers and ranks work there."""
    for leftover in found:
        try:
            place = Path(f"/proc/{leftover.pid}/cwd").readlink()
        except OSError:
            continue
        directory = RunDirectory(place)
        if run_id in (read_run_id(directory.run_id), _run_id_in_state(directory)):
            return directory
    return None


def _run_id_in_state(directory: RunDirectory) -> RunId | None:
    try:
        state = StateFile(directory.state).load()
    except (DataError, OSError):
        return None
    return None if state is None else state.run_id
