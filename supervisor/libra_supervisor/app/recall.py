"""What a later supervisor will know of this one: state.json and the journal."""

import os
from collections.abc import Callable, Mapping
from typing import Final, Never

import anyio
import anyio.to_thread
import msgspec

from libra import clock
from libra.errors import DataError, InvariantError
from libra.ids import ChildId, InstanceId, RunId
from libra.storage.atomic import write_record
from libra_supervisor.events import (
    ChildExited,
    ChildReady,
    ChildStarted,
    DrainRequested,
    Event,
    RankSaid,
    SampleFinished,
    SampleGaveUp,
    SampleProgressed,
    SampleStarted,
    Ticked,
)
from libra_supervisor.journal import (
    ChildRecord,
    Journal,
    StateFile,
    SupervisorState,
    read_run_id,
)
from libra_supervisor.loop.plan_memory import PlanMemory
from libra_supervisor.process.identity import boot_id, identity_of
from libra_supervisor.run_directory import RunDirectory

_UNRECORDED = (Ticked, SampleStarted, SampleProgressed, SampleFinished, SampleGaveUp, RankSaid)
"""Too many to be an audit, and recorded elsewhere: trajectories, metrics, reloads."""


PLAN_FACT: Final = "plan"
"""Under which name state.json has a PlanMemory."""

DRAINED_FACT: Final = "drained"
"""Under which name it has the servers that an operator took out of routing."""


class RunMemory:
    """Follows the events. `run` is the task that writes; what happens meanwhile is written once."""

    def __init__(self, directory: RunDirectory, run_id: RunId) -> None:
        self._file = StateFile(directory.state)
        self._journal = Journal(directory.journal)
        self._run_id = run_id
        me = identity_of(os.getpid())
        if me is None:
            raise InvariantError("this process is not in /proc")
        self._me = me
        self._children: dict[ChildId, ChildRecord] = {}
        self._plan: PlanMemory | None = None
        self._drained: tuple[InstanceId, ...] = ()
        self.look_at_drained: Callable[[], tuple[InstanceId, ...]] | None = None
        """Which servers an operator has out of routing; asked in the event loop."""

        self._changed = anyio.Event()

    def remember(self, children: Mapping[ChildId, ChildRecord]) -> None:
        """Go on with what an earlier supervisor wrote down, so that the next one finds it too."""
        self._children.update(children)
        self._changed.set()

    def remember_plan(self, memory: PlanMemory) -> None:
        self._plan = memory
        self._changed.set()

    def note(self, event: Event) -> None:
        """Take in an event before it is handled."""
        if not isinstance(event, _UNRECORDED):
            self._journal.append_struct(event)
        match event:
            case ChildStarted():
                self._children[event.child_id] = ChildRecord(
                    child_id=event.child_id,
                    incarnation=event.incarnation,
                    pid=event.pid,
                    start_ticks=event.start_ticks,
                    boot_id=event.boot_id or boot_id(),
                    facts=event.facts,
                )
            case ChildReady():
                self._note_ready(event)
            case ChildExited():
                self._children.pop(event.child_id, None)
            case DrainRequested():
                pass
            case _:
                return
        self._changed.set()

    async def run(self) -> Never:
        """Write after each change until cancelled."""
        while True:
            self._note_drained()
            await anyio.to_thread.run_sync(self._save)
            await self._changed.wait()
            self._changed = anyio.Event()

    def save(self) -> None:
        """Write the state as it is now; blocks on fsync."""
        self._note_drained()
        self._save()

    def _note_drained(self) -> None:
        if self.look_at_drained is not None:
            self._drained = self.look_at_drained()

    def _save(self) -> None:
        self._file.save(
            SupervisorState(
                run_id=self._run_id,
                written_at_ns=clock.wall_ns(),
                supervisor_pid=self._me.pid,
                supervisor_start_ticks=self._me.start_ticks,
                supervisor_boot_id=self._me.boot_id,
                children=tuple(self._children.values()),
                facts=self._facts(),
            )
        )

    def close(self) -> None:
        self._journal.close()

    def _facts(self) -> dict[str, object]:
        plan = {} if self._plan is None else {PLAN_FACT: msgspec.to_builtins(self._plan)}
        return plan | ({DRAINED_FACT: self._drained} if self._drained else {})

    def _note_ready(self, event: ChildReady) -> None:
        record = self._children.get(event.child_id)
        if record is not None and record.incarnation == event.incarnation:
            self._children[event.child_id] = msgspec.structs.replace(record, is_ready=True)


def remembered_plan(directory: RunDirectory) -> PlanMemory | None:
    """The plan as the supervisor before knew it; None when it has never been changed.

    Raises DataError when state.json cannot be read.
    """
    state = StateFile(directory.state).load()
    if state is None or PLAN_FACT not in state.facts:
        return None
    try:
        return msgspec.convert(state.facts[PLAN_FACT], PlanMemory)
    except msgspec.ValidationError as error:
        raise DataError(
            f"{directory.state}: its plan is not one of this program: {error}"
        ) from error


def remembered_drains(directory: RunDirectory) -> tuple[InstanceId, ...]:
    """The servers that an operator took out of routing and has not put back.

    Raises DataError when state.json cannot be read.
    """
    state = StateFile(directory.state).load()
    try:
        found = () if state is None else state.facts.get(DRAINED_FACT, ())
        return msgspec.convert(found, tuple[InstanceId, ...])
    except msgspec.ValidationError as error:
        raise DataError(f"{directory.state}: {DRAINED_FACT} are no names: {error}") from error


def recorded_run_id(directory: RunDirectory) -> RunId | None:
    """The identity of the run that this directory holds; None for a new one.

    It is kept apart from state.json too: without it nobody would find, and end, the servers of a
    run whose state.json was damaged and moved away.
    """
    state = StateFile(directory.state).load()
    return read_run_id(directory.run_id) if state is None else state.run_id


def record_run_id(directory: RunDirectory, run_id: RunId) -> None:
    """Write it down for later supervisors. Raises SiteError when the disk refuses."""
    write_record(directory.run_id, f"{run_id}\n".encode())
