"""After a crash of the control plane: which servers go on, and the end of everything else.

A server is taken over when all of this holds: state.json has it; that very process runs (pid, start
time, boot id) and carries the run's and the child's tag; the plan still has its place; it was
started with what would be started today; its output still reaches a log. Then it has to answer with
its incarnation (`app.engine.Engine.until_ready`). What falls short is ended before anything starts.
"""

import shutil
from collections.abc import Container, Mapping

import anyio.to_thread

from libra.ids import ChildId, RunId
from libra.storage.atomic import sweep_unfinished
from libra.tracing.log import get_log
from libra_supervisor.journal import ChildRecord, StateFile
from libra_supervisor.process.identity import ProcessIdentity, is_running
from libra_supervisor.process.kernel import Kernel, read_tag
from libra_supervisor.process.lifecycle import Adoptee
from libra_supervisor.process.logs import LogRelay
from libra_supervisor.process.sweep import end_run
from libra_supervisor.run_directory import RunDirectory

_log = get_log()


async def take_over(
    directory: RunDirectory,
    run_id: RunId,
    *,
    startable: Mapping[ChildId, Mapping[str, str]],
    elsewhere: Container[ChildId],
    logs: LogRelay,
    kernel: Kernel,
) -> dict[ChildId, ChildRecord]:
    """Choose the processes to adopt and end whatever else an earlier supervisor left here.

    `startable` has for every server of the plan the facts that an adopted one must share. Of those
    `elsewhere` only what they were started with is known here: their node proves the rest.
    """
    state = await anyio.to_thread.run_sync(StateFile(directory.state).load)
    kept: dict[ChildId, ChildRecord] = {}
    for record in () if state is None else state.children:
        wanted = startable.get(record.child_id)
        if wanted is None:
            continue
        if record.child_id in elsewhere:
            hindrance = why_started_otherwise(record, wanted)
        else:
            has_log = record.child_id in logs.children
            hindrance = why_not(record, run_id, wanted, has_log=has_log)
        if hindrance is None:
            kept[record.child_id] = record
            _log.info("child_kept", child=record.child_id, pid=record.pid)
        else:
            _log.info("child_not_kept", child=record.child_id, pid=record.pid, why=hindrance)
    here = {child_id: it for child_id, it in kept.items() if child_id not in elsewhere}
    identities = {child_id: identity_of(record) for child_id, record in here.items()}
    # What stays would hold memory, devices and ports that new children need.
    for row in await end_run(run_id, kernel, kept=identities):
        _log.warning("leftover_does_not_end", pid=row.pid, name=row.name)
    logs.keep_only(frozenset(here))
    await anyio.to_thread.run_sync(_sweep, directory)
    return kept


def _sweep(directory: RunDirectory) -> None:
    """Remove half-written and half-removed versions and checkpoints; their writers have ended.

    So have servers that waited for their devices, and what would have told them to go on.
    """
    shutil.rmtree(directory.prewarm, ignore_errors=True)
    for parent in (directory.weights, directory.checkpoints):
        for path in sweep_unfinished(parent):
            if path.exists():
                _log.warning("leftover_not_removed", path=str(path))
            else:
                _log.info("leftover_removed", path=str(path))


def why_not(
    record: ChildRecord, run_id: RunId, wanted: Mapping[str, str], *, has_log: bool
) -> str | None:
    """Why the process cannot be taken over; None when it can be."""
    if not is_running(identity_of(record)):
        return "it does not run any more"
    if read_tag(record.pid) != (run_id, record.child_id):
        return f"pid {record.pid} does not carry its tag"
    if (changed := why_started_otherwise(record, wanted)) is not None:
        return changed
    if not has_log:
        return "its output reaches no log: the log relay is gone too"
    return None


def why_started_otherwise(record: ChildRecord, wanted: Mapping[str, str]) -> str | None:
    """What it was started with that would be different today; None when nothing would be."""
    changed = sorted(name for name, value in wanted.items() if record.facts.get(name) != value)
    return f"it was started with another {', '.join(changed)}" if changed else None


def identity_of(record: ChildRecord) -> ProcessIdentity:
    return ProcessIdentity(record.pid, record.start_ticks, record.boot_id)


def adoptee_of(record: ChildRecord) -> Adoptee:
    return Adoptee(
        identity=identity_of(record),
        incarnation=record.incarnation,
        was_ready=record.is_ready,
        facts=record.facts,
    )
