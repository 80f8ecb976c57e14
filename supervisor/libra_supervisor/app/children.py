"""Everything that runs in processes of its own for a whole run, begun and ended together."""

from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from libra.ids import ChildId
from libra_supervisor.app.fleet import Fleet
from libra_supervisor.app.replicas import Replicas
from libra_supervisor.process.lifecycle import Adoptee
from libra_supervisor.ranks.gang import Gang


class Children(NamedTuple):
    fleet: Fleet
    gang: Gang
    replicas: Replicas

    def start(self, tasks: TaskGroup, adopt: dict[ChildId, Adoptee]) -> None:
        """Start servers and core; replicas are started when a plan has some."""
        self.fleet.start(tasks, adopt)
        self.replicas.begin(tasks)
        tasks.start_soon(self.gang.run)

    def stop(self) -> None:
        """End them; called again, in a hurry."""
        self.gang.stop()
        self.replicas.stop_all()
        self.fleet.stop()

    async def until_down(self) -> None:
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(self.gang.until_down)
            waiting.start_soon(self.replicas.until_down)
            waiting.start_soon(self.fleet.until_down)
