"""The scheduler behind its two users: the loop that says who serves, and requests to be placed."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from libra import clock
from libra.ids import GroupId, Incarnation, InstanceId, PolicyVersion, RequestId
from libra.rollouts.generation import GenerationRequest
from libra.rollouts.trajectory import Completion
from libra.scheduling.explanation import Explanation
from libra.scheduling.request import RouteRequest
from libra.scheduling.scheduler import Explained, Scheduler
from libra.scheduling.slot import InstanceSpec
from libra.tracing.log import get_log
from libra_supervisor.app.fleet import Fleet
from libra_supervisor.gateway.waiting import Placement, WaitingRoom
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.request_watch import RequestWatch
from libra_supervisor.rollouts.client import Progressed

OWN_CATEGORY = "rollout"

_log = get_log()


def explained_if_debugging() -> Explained | None:
    """What logs every decision with its reasons; None, which costs nothing, unless at debug level.

    Call it after logging was set up.
    """
    return _log_decision if _log.is_enabled_for(logging.DEBUG) else None


def _log_decision(request: RouteRequest, explanation: Explanation) -> None:
    _log.debug(
        "request_explained",
        request_id=request.request_id,
        prompt_id=request.prompt_id,
        min_version=request.min_version,
        choice=explanation.choice,
        reason=explanation.reason,
        load_metric=explanation.load_metric,
        strategy=explanation.strategy,
        expected_tokens=explanation.expected_tokens,
        num_waiting=explanation.num_waiting,
        instances=explanation.instances,
    )


class SchedulerRouting:
    """`libra_supervisor.ports.Routing` over the scheduler."""

    def __init__(self, scheduler: Scheduler, fleet: Fleet, room: WaitingRoom) -> None:
        self._scheduler = scheduler
        self._fleet = fleet
        self._room = room

    def know(
        self,
        instance_id: InstanceId,
        incarnation: Incarnation,
        kv_capacity_tokens: int | None,
        *,
        is_planned: bool,
    ) -> None:
        now = clock.now()
        spec = InstanceSpec(
            instance_id=instance_id, incarnation=incarnation, tp=self._fleet.tp_of(instance_id)
        )
        self._scheduler.restart_instance(spec, now, is_planned=is_planned)
        if kv_capacity_tokens is not None:
            self._scheduler.on_kv_capacity_measured(instance_id, kv_capacity_tokens, now)

    def serve(self, instance_id: InstanceId, version: int) -> None:
        now = clock.now()
        self._scheduler.set_version(instance_id, PolicyVersion(version), now)
        self._scheduler.set_ready(instance_id, True, now)
        self._scheduler.drain_instance(instance_id, False, now)

    def places_of(self, group_ids: Sequence[GroupId]) -> dict[str, str]:
        prefixes = tuple(f"{group_id}/" for group_id in group_ids)
        return {
            request_id: instance_id or "waits for a place"
            for request_id, instance_id in self._room.places().items()
            if request_id.startswith(prefixes)
        }

    def forget(self, instance_id: InstanceId) -> None:
        self._scheduler.remove_instance(instance_id)

    def withdraw(self, instance_id: InstanceId, *, is_draining: bool) -> None:
        now = clock.now()
        if is_draining:
            self._scheduler.drain_instance(instance_id, True, now)
        else:
            self._scheduler.set_ready(instance_id, False, now)


class Servers(Protocol):
    """The engines as requests see them. Of one that is unknown: PeerError."""

    def client_of(self, instance_id: InstanceId) -> InstanceClient: ...

    def watch_of(self, instance_id: InstanceId) -> RequestWatch: ...

    def note_progress(self, instance_id: InstanceId) -> None:
        """A request was served there."""


def _any_version() -> PolicyVersion | None:
    """The loop takes servers out of routing before they hold another version than the others."""
    return None


class EngineRouter:
    """`libra_supervisor.rollouts.client.Router`: our own samples' way to the engines."""

    def __init__(
        self,
        room: WaitingRoom,
        fleet: Servers,
        *,
        wanted: Callable[[], PolicyVersion | None] = _any_version,
    ) -> None:
        """`wanted` is the version that a request is to be answered with at least."""
        self._room = room
        self._fleet = fleet
        self._wanted = wanted

    async def generate(self, request: GenerationRequest, progressed: Progressed) -> Completion:
        """Place the request, ask that engine, give the place back however it ends.

        An engine that refuses it as full costs nothing but a second place. Answers come whole;
        `progressed` is called when the request is placed and each time that the engine, asked for
        what it works on, has it among that.
        """
        wanted = RouteRequest(
            request_id=request.request_id,
            max_new_tokens=request.sampling.max_new_tokens,
            num_prompt_tokens=len(request.prompt_token_ids),
            prompt_id=request.prompt_id,
            category=OWN_CATEGORY,
            min_version=self._wanted(),
            avoided=request.avoided,
        )

        async def ask(placement: Placement) -> Completion:
            instance_id = placement.reservation.instance_id
            progressed(0)
            with self._fleet.watch_of(instance_id).hearing(request.request_id, progressed):
                completion = await self._fleet.client_of(instance_id).complete(
                    request.prompt_token_ids, request.sampling, request_id=request.request_id
                )
            placement.complete(len(completion.token_ids))
            self._fleet.note_progress(instance_id)
            return completion

        return await self._room.serve(wanted, ask)

    def place_of(self, request_id: RequestId) -> InstanceId | None:
        return self._room.place_of(request_id)
