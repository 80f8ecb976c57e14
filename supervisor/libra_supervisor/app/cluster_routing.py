"""Routing of a run over several nodes: what the loop says of servers, the other nodes hear too."""

from collections.abc import Sequence

from libra.ids import GroupId, Incarnation, InstanceId, PolicyVersion
from libra_supervisor.app.fleet import Fleet
from libra_supervisor.app.spread_rollouts import SpreadRollouts
from libra_supervisor.ports import Routing


class ClusterRouting:
    """`libra_supervisor.ports.Routing` that has the other nodes know of servers, too."""

    def __init__(self, own: Routing, fleet: Fleet, rollouts: SpreadRollouts) -> None:
        self._own = own
        self._fleet = fleet
        self._rollouts = rollouts

    def know(
        self,
        instance_id: InstanceId,
        incarnation: Incarnation,
        kv_capacity_tokens: int | None,
        *,
        is_planned: bool,
    ) -> None:
        self._own.know(instance_id, incarnation, kv_capacity_tokens, is_planned=is_planned)
        url = self._fleet.url_or_none(instance_id)
        if url is None:
            return  # its process has ended since it answered
        self._rollouts.roster.know(
            instance_id,
            incarnation,
            url=url,
            tp=self._fleet.tp_of(instance_id),
            kv_capacity_tokens=kv_capacity_tokens,
            is_planned=is_planned,
        )
        self._rollouts.note_roster()

    def serve(self, instance_id: InstanceId, version: int) -> None:
        self._own.serve(instance_id, version)
        self._rollouts.roster.serve(instance_id, PolicyVersion(version))
        self._rollouts.note_roster()

    def places_of(self, group_ids: Sequence[GroupId]) -> dict[str, str]:
        nodes = {group_id: self._rollouts.node_of(group_id) for group_id in group_ids}
        there = {str(it): f"is made on node {node}" for it, node in nodes.items() if node}
        return {**self._own.places_of(group_ids), **there}

    def forget(self, instance_id: InstanceId) -> None:
        self._own.forget(instance_id)
        self._rollouts.roster.forget(instance_id)
        self._rollouts.note_roster()

    def withdraw(self, instance_id: InstanceId, *, is_draining: bool) -> None:
        self._own.withdraw(instance_id, is_draining=is_draining)
        self._rollouts.roster.withdraw(instance_id, is_draining=is_draining)
        self._rollouts.note_roster()
