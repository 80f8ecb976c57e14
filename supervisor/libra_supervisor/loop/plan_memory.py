"""What a supervisor tells the one after it about the plan. Pure."""

import msgspec

from libra.ids import SlotId
from libra.planner.plan import Plan
from libra.pools.reconfiguration import Order


class PlanMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Of `state.json`. Absent before the first change of the plan."""

    plan: Plan
    """In force, or while something is under way what holds devices: what to start with."""

    next_number: int
    """The first that no id of an instance or a replica has had."""

    order: Order | None = None
    """What is under way."""

    lost_slots: tuple[SlotId, ...] = ()
    """Held by processes that did not end."""
