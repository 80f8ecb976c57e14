"""Which filter, if any, removes an instance from the candidates. The order is the contract."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libra.ids import PolicyVersion
    from libra.scheduling.request import Filter
    from libra.scheduling.slot import Slot


def first_block(
    slot: "Slot", *, floor: "PolicyVersion", needs_kv_capacity: bool, now: float
) -> "Filter | None":
    """Name the first filter that removes `slot`, in pipeline order; None for a candidate."""
    serving = _serving_block(slot, floor)
    if serving is not None:
        return serving
    if needs_kv_capacity and slot.kv_capacity_tokens is None:
        return "kv_capacity_unknown"
    return _admission_block(slot, now) or ("queue_cap" if slot.is_at_cap() else None)


def _serving_block(slot: "Slot", floor: "PolicyVersion") -> "Filter | None":
    if not slot.is_ready:
        return "not_ready"
    if slot.is_draining:
        return "draining"
    return "stale_version" if slot.policy_version < floor else None


def _admission_block(slot: "Slot", now: float) -> "Filter | None":
    breaker = slot.breaker
    state = breaker.state(now)
    if state == "open":
        return "breaker_open"
    if state == "half_open" and breaker.is_trial_taken(now):
        return "breaker_trial"
    if breaker.is_saturated(now):
        return "saturated"
    return "occupancy" if slot.feedback.is_blocked(now) else None
