"""What a later supervisor will know of this one: state.json and the journal."""

import os
from typing import Never

import anyio
import anyio.to_thread

from libra import clock
from libra.ids import ChildId, RunId
from libra_supervisor.events import (
    ChildExited,
    ChildStarted,
    Event,
    InstanceAnswered,
    RankSaid,
    SampleFinished,
    SampleGaveUp,
    SampleProgressed,
    SampleStarted,
    Ticked,
)
from libra_supervisor.journal import ChildRecord, Journal, StateFile, SupervisorState
from libra_supervisor.process.identity import boot_id
from libra_supervisor.run_directory import RunDirectory

_UNRECORDED = (Ticked, SampleStarted, SampleProgressed, SampleFinished, SampleGaveUp, RankSaid)
"""Too many to be an audit, and recorded elsewhere: trajectories, metrics, reloads."""


class RunMemory:
    """Follows the events. `run` is the task that writes; what happens meanwhile is written once."""

    def __init__(self, directory: RunDirectory, run_id: RunId) -> None:
        self._file = StateFile(directory.state)
        self._journal = Journal(directory.journal)
        self._run_id = run_id
        self._children: dict[ChildId, ChildRecord] = {}
        self._changed = anyio.Event()

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
                    boot_id=boot_id(),
                )
            case InstanceAnswered():
                self._add_url(event)
            case ChildExited():
                self._children.pop(event.child_id, None)
            case _:
                return
        self._changed.set()

    async def run(self) -> Never:
        """Write after each change until cancelled."""
        while True:
            await anyio.to_thread.run_sync(self.save)
            await self._changed.wait()
            self._changed = anyio.Event()

    def save(self) -> None:
        """Write the state as it is now; blocks on fsync."""
        self._file.save(
            SupervisorState(
                run_id=self._run_id,
                written_at_ns=clock.wall_ns(),
                supervisor_pid=os.getpid(),
                children=tuple(self._children.values()),
            )
        )

    def close(self) -> None:
        self._journal.close()

    def _add_url(self, event: InstanceAnswered) -> None:
        child_id = ChildId(event.instance_id)
        record = self._children.get(child_id)
        if record is not None and record.incarnation == event.incarnation:
            self._children[child_id] = ChildRecord(
                child_id=child_id,
                incarnation=record.incarnation,
                pid=record.pid,
                start_ticks=record.start_ticks,
                boot_id=record.boot_id,
                facts={"url": event.base_url},
            )


def recorded_run_id(directory: RunDirectory) -> RunId | None:
    """The identity of the run that this directory holds; None for a new one."""
    state = StateFile(directory.state).load()
    return None if state is None else state.run_id
