"""The gangs of hybrid replicas: each is started once, and gone when it is lost or told to leave."""

import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from libra.errors import ungrouped
from libra.ids import ReplicaId
from libra.planner.plan import HybridPlacement
from libra.storage.atomic import discard_directory
from libra.wire.rank import RankCommand, RankWarm, TrainStep
from libra_supervisor import events
from libra_supervisor.app.rank_mail import RankMail
from libra_supervisor.ports import Shards
from libra_supervisor.process.lifecycle import ChildStatus
from libra_supervisor.ranks.gang import Gang, GangEvent
from libra_supervisor.run_directory import RunDirectory

_ONLY_ATTEMPT = 1

Hear: TypeAlias = Callable[[GangEvent], Awaitable[None]]
Make: TypeAlias = Callable[[HybridPlacement, Hear, bool], Gang]
"""A gang on the placement's slots that is never restarted, and tells what happens to it.

Without devices (False) its ranks wait for TakeDevice."""


def make_replica_folder(directory: RunDirectory) -> None:
    """For sockets and snapshots; what an earlier supervisor left of replicas is thrown away."""
    if directory.hybrid.exists():
        discard_directory(directory.hybrid)
    directory.hybrid.mkdir(mode=0o700)


class Replicas:
    """`libra_supervisor.ports.Replicas` over gangs in `tasks`."""

    def __init__(
        self, make: Make, folder: Path, post: Callable[[events.Event], Awaitable[None]]
    ) -> None:
        """`folder` gets a directory for the sockets of each, under its name."""
        self._make = make
        self._folder = folder
        self._post = post
        self._running: dict[ReplicaId, _Replica] = {}
        self._begun: list[TaskGroup] = []

    def begin(self, tasks: TaskGroup) -> None:
        """Gangs are started in `tasks` from now on."""
        self._begun = [tasks]

    def start(self, placement: HybridPlacement, *, has_devices: bool) -> None:
        replica = _Replica(placement, self._make, self._post, has_devices=has_devices)
        self._running[placement.replica_id] = replica
        (tasks,) = self._begun
        tasks.start_soon(self._run, replica)

    def stop(self, replica_id: ReplicaId, *, in_a_hurry: bool) -> None:
        if (replica := self._running.get(replica_id)) is not None:
            replica.gang.stop()
            if in_a_hurry:
                replica.gang.stop()

    def stop_all(self) -> None:
        """Also in a hurry, when it is called again."""
        for replica in self._running.values():
            replica.gang.stop()

    async def until_down(self) -> None:
        for replica in tuple(self._running.values()):
            await replica.gang.until_down()

    def statuses(self) -> dict[ReplicaId, ChildStatus]:
        """Of those that are not gone."""
        return {name: replica.gang.status() for name, replica in self._running.items()}

    def tell(self, replica_id: ReplicaId, command: RankCommand) -> None:
        if (replica := self._running.get(replica_id)) is not None:
            replica.mail.tell_all(_ONLY_ATTEMPT, command)

    def train(self, replica_id: ReplicaId, command: TrainStep, shards: Shards) -> None:
        if (replica := self._running.get(replica_id)) is not None:
            replica.mail.train(_ONLY_ATTEMPT, command, shards)

    async def _run(self, replica: "_Replica") -> None:
        name = replica.replica_id
        sockets = self._folder / name
        try:
            sockets.mkdir(mode=0o700, parents=True, exist_ok=True)
            await replica.run()
        except OSError as error:
            # A full disk, no process or no descriptor to spare: what a run can do without it.
            replica.reason = f"it could not be started: {error}"
        await anyio.to_thread.run_sync(partial(shutil.rmtree, sockets, ignore_errors=True))
        del self._running[name]
        await self._post(events.ReplicaDown(name, replica.reason, replica.is_clean))


class _Replica:
    """One gang, its mail, and why it ended."""

    def __init__(
        self,
        placement: HybridPlacement,
        make: Make,
        post: Callable[[events.Event], Awaitable[None]],
        *,
        has_devices: bool,
    ) -> None:
        self._num_cold = len(placement.slots)
        self.replica_id = placement.replica_id
        self.reason = "it was told to leave"
        self.is_clean = True
        """None of its processes is left."""

        self._post = post
        self.gang = make(placement, self._hear, has_devices)
        self.mail = RankMail(self.gang)

    async def run(self) -> None:
        """Until all its processes are gone."""
        with ungrouped():
            await self._run()

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.mail.run)
            await self.gang.run()
            tasks.cancel_scope.cancel()

    async def _hear(self, event: GangEvent) -> None:
        match event:
            case events.GangReady():
                await self._post(events.ReplicaReady(self.replica_id))
            case events.RankSaid(event=RankWarm()):
                self._num_cold -= 1
                if not self._num_cold:
                    await self._post(events.HybridWarmed(self.replica_id))
            case events.RankSaid(event=said):
                await self._post(events.ReplicaSaid(self.replica_id, said))
            case events.GangGaveUp(reason=reason) if self.is_clean:
                self.reason = reason
            case events.ChildUnkillable(detail=detail):
                self.is_clean = False
                self.reason = f"processes of it do not end: {detail}"
            case _:
                pass  # the life of a child, which is told when it is over
