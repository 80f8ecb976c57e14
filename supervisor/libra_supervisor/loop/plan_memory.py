"""What a supervisor tells the one after it about the plan. Pure."""

import msgspec

from libra.ids import InstanceId, SlotId
from libra.planner.plan import Plan, Slot
from libra.planner.without_nodes import is_same
from libra.pools.reconfiguration import Order


class PlanMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Of `state.json`. Absent before the first change of the plan."""

    plan: Plan
    """In force, or while something is under way what holds devices: what to start with."""

    next_number: int
    """The first that no id of an instance or a replica has had."""

    decision_id: int = 0
    """Of the newest change."""

    order: Order | None = None
    """What is under way."""

    lost_slots: tuple[SlotId, ...] = ()
    """Held by processes that did not end."""

    lost_elsewhere: tuple[Slot, ...] = ()
    """The same of other nodes."""

    lent_from: Plan | None = None
    """Before the last server was lent; None while something serves under `plan`."""

    home: Plan | None = None
    """With every node there, of a run that went on without some; a supervisor that comes after
    starts with it again, and with nothing else of this."""

    @property
    def in_force(self) -> Plan:
        """The plan before what is under way."""
        return self.plan if self.order is None else self.order.old

    def whole(self) -> "PlanMemory":
        """As if every node were there: what a supervisor that comes after counts on."""
        home, order = self.home, self.order
        if home is None:
            return self
        is_moved = order is not None and order.cause != "decision"
        if not is_moved and is_same(self.in_force, home):
            return self
        return msgspec.structs.replace(self, plan=home, order=None)

    def to_start_with(self, *, min_rollout_gpus: int) -> Plan:
        """What a supervisor that comes after starts, without replicas: they ended with this one.

        Where too little was left when this one ended, that is the plan before the change, or before
        the last server was lent.
        """
        if self.plan.num_rollout_gpus >= min_rollout_gpus:
            return msgspec.structs.replace(self.plan, hybrids=())
        if self.lent_from is None:
            return msgspec.structs.replace(self.in_force, hybrids=())
        # Its servers ended, and their names with them.
        named = tuple(
            msgspec.structs.replace(it, instance_id=InstanceId(f"vllm-{number}"))
            for number, it in enumerate(self.lent_from.instances, self.next_number)
        )
        return msgspec.structs.replace(self.lent_from, instances=named, hybrids=())
