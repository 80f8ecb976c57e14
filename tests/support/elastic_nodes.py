"""A `NodeWorld` whose plan is changed by decisions too, with hybrid replicas on any node.

Replicas join and leave some time after they are told to; they end with the core and with a node.
"""

import msgspec

from libra.config.planning import PlannerConfig
from libra.config.run import RunConfig
from libra.errors import InfeasiblePlanError
from libra.ids import InstanceId, NodeRank, ReplicaId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, Slot
from libra.planner.replan_order import ordered_plan
from libra.planner.replan_seating import Room
from libra.pools.change_policy import policy_of
from libra.pools.ground import core_slots, hybrid_slots, server_slots
from libra.wire.api import PlanOrder
from libra_supervisor import events
from libra_supervisor.loop import commands
from libra_supervisor.loop.plan_desk import PlanDesk
from node_world import HOME, TIMEOUT_S, NodeWorld

PER_NODE = 4
OPTIONS = {
    "runtime_dynamic_reconfiguration_enabled": True,
    "runtime_reconfigure_training": True,
    "runtime_cluster_swap_enabled": True,
    "runtime_reconfigure_timeout_s": TIMEOUT_S,
}


class ElasticNodeWorld(NodeWorld):
    """Three nodes of `PER_NODE` slots."""

    def __init__(
        self, *, home: Plan = HOME, planner: dict[str, object] | None = None, **options
    ) -> None:
        self.joins = True
        """Replicas become members; else they wait for ever."""

        self.replicas: dict[ReplicaId, HybridPlacement] = {}
        self.ending: dict[InstanceId, InstancePlacement] = {}
        """Servers that hold their slots until it is said that they have ended."""

        self.planner = msgspec.convert({**OPTIONS, **(planner or {})}, PlannerConfig)
        super().__init__(home=home, **options)

    def desk(self, home: Plan, config: RunConfig) -> PlanDesk:
        elsewhere = (PER_NODE,) * len(self.followers)
        policy = policy_of(self.planner, num_slots=PER_NODE, num_slots_elsewhere=elsewhere)
        return PlanDesk(
            home,
            policy,
            config=config,
            hybrids=self,
            presence=self.presence,
        )

    # What an operator does

    def order(self, decision_id: int = 1, **named: object) -> Plan | None:
        """Want the plan in force with what is named; None when it does not fit."""
        plans = self.control.plans
        lost = plans.unusable
        room = Room(num_gpus=len(set(plans.policy.slots) - lost), gpus_per_node=PER_NODE, lost=lost)
        try:
            wanted = ordered_plan(plans.plan, PlanOrder(**named), room)
        except InfeasiblePlanError:
            return None
        self.want(wanted, decision_id)
        return wanted

    def want(self, wanted: Plan, decision_id: int = 1) -> None:
        self.post(events.ReconfigurationWanted(decision_id, wanted, "an order"))

    # libra_supervisor.loop.plan_desk.HybridPort

    def attach(self, placement: HybridPlacement) -> tuple[commands.Command, ...]:
        assert placement.replica_id not in self.replicas
        self.replicas[placement.replica_id] = placement
        self._check_slots()
        if not self.nodes_of(placement) <= self.there:
            pass  # its start waits for the node
        elif self.joins and not self.gang_waits:
            self.pending.append(events.HybridJoined(placement.replica_id))
        return ()

    def warm(self, placement: HybridPlacement) -> tuple[commands.Command, ...]:
        raise AssertionError(f"{placement.replica_id}: nothing is prewarmed in this world")

    @property
    def present(self) -> tuple[HybridPlacement, ...]:
        return tuple(self.replicas.values())

    def detach(self, replica_id: ReplicaId) -> tuple[commands.Command, ...]:
        if replica_id in self.replicas:
            self._end_replica(replica_id, events.HybridLeft(replica_id))
        return ()

    def _end_replica(self, name: ReplicaId, said: events.HybridLeft | events.HybridLost) -> None:
        """Its slots are free when that is said."""
        self.pending = [e for e in self.pending if getattr(e, "replica_id", None) != name]
        self.pending.append(said)

    def nodes_of(self, placement: HybridPlacement) -> set[NodeRank]:
        return {node for node, _ in hybrid_slots(placement)}

    # What happens to replicas with everything else

    def lose(self, node, why="its lease has ended", *, is_said_first=False):
        super().lose(node, why, is_said_first=is_said_first)
        for name, placement in tuple(self.replicas.items()):
            if node in self.nodes_of(placement):
                self._lose_replica(name, f"node {node} was lost")

    def lose_gang(self):
        super().lose_gang()
        for name in tuple(self.replicas):
            self._lose_replica(name, "the core was lost")

    def _reshape(self, train):
        for name in self.replicas:
            assert self.is_ending(name), "a replica outlives its core"
        super()._reshape(train)

    def is_ending(self, name: ReplicaId) -> bool:
        ends = events.HybridLeft | events.HybridLost
        return any(isinstance(it, ends) and it.replica_id == name for it in self.pending)

    def _lose_replica(self, name: ReplicaId, why: str) -> None:
        if not self.is_ending(name):
            self._end_replica(name, events.HybridLost(name, why))

    def post(self, event: events.Event) -> None:
        if isinstance(event, events.HybridLeft | events.HybridLost):
            self.replicas.pop(event.replica_id, None)
        if isinstance(event, events.InstanceRetired):
            self.ending.pop(event.instance_id, None)
        super().post(event)

    def _carry_out(self, command: commands.Command) -> None:
        if isinstance(command, commands.RetireInstance) and command.instance_id in self.placed:
            self.ending[command.instance_id] = self.placed[command.instance_id]
        super()._carry_out(command)

    def _check_slots(self) -> None:
        used: list[Slot] = [*core_slots(self.train)]
        servers = [*self.placed.values(), *self.ending.values()]
        used += [slot for it in servers for slot in server_slots(it)]
        used += [slot for it in self.replicas.values() for slot in hybrid_slots(it)]
        assert len(used) == len(set(used)), "a slot has two owners"
