"""Until nothing is in flight at an instance that is to leave."""

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import anyio
from anyio.abc import TaskGroup

from libra import clock
from libra.ids import InstanceId
from libra_supervisor.events import InstanceDrained
from libra_supervisor.gateway.waiting import WaitingRoom

POLL_S: Final = 0.05


class Traffic(Protocol):
    """What the run's schedulers have on servers; the scheduler itself where there is one."""

    def num_in_flight(self, instance_id: InstanceId) -> int:
        """Requests there now, or such as may still be placed there."""


class DrainWatch:
    """Posts InstanceDrained for every drain that was begun and not ended."""

    def __init__(
        self,
        traffic: Traffic,
        room: WaitingRoom,
        post: Callable[[InstanceDrained], Awaitable[None]],
    ) -> None:
        self._traffic = traffic
        self._room = room
        self._post = post
        self._scope_of: dict[InstanceId, anyio.CancelScope] = {}

    def begin(self, instance_id: InstanceId, *, tasks: TaskGroup, gives_back: bool) -> None:
        """Nothing new is placed there any more. `gives_back`: what is there is placed anew."""
        if gives_back:
            self._room.give_back(instance_id)
        self.end(instance_id)
        self._scope_of[instance_id] = scope = anyio.CancelScope()
        tasks.start_soon(self._watch, instance_id, scope)

    def end(self, instance_id: InstanceId) -> None:
        if (scope := self._scope_of.pop(instance_id, None)) is not None:
            scope.cancel()

    async def _watch(self, instance_id: InstanceId, scope: anyio.CancelScope) -> None:
        with scope:
            while self._traffic.num_in_flight(instance_id):
                await clock.sleep(POLL_S)
            await self._post(InstanceDrained(instance_id))
