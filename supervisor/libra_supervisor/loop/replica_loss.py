"""What becomes of the devices of replicas that were lost outside of a change of the plan. Pure.

The plan in force goes on without them. A server that slept on those devices is woken up, since they
are nobody's now: a change of the plan by itself. Where there is none, or it cannot come back, the
devices are idle until the plan is changed again, and that is said.
"""

import msgspec

from libra.planner.lending import serves_nothing
from libra.planner.matching import slots_of
from libra.planner.plan import InstancePlacement, Plan, slots_in_words
from libra.pools.change_policy import Refusal, judged
from libra.pools.ground import is_lent, server_slots
from libra.pools.hybrid import HybridState
from libra.pools.reconfiguration import Order, Reconfiguration
from libra_supervisor.loop import plan_life
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.run_state import RunState


def follow_losses(state: RunState, at: Moment) -> tuple[Command, ...]:
    plans = state.plans
    if not plans.losses or _waits_for_more(state):
        return ()
    losses, plans.losses = plans.losses, ()
    if plans.change is not None or state.cycle.stop_reason is not None:
        return ()  # what is under way knows of it, or nothing is worth it any more
    order = Order(
        decision_id=0,
        reason="; ".join(f"{it.replica_id} was lost: {it.why}" for it in losses),
        old=plans.plan,
        wanted=_with_sleepers(state),
        cause="replica_lost",
    )
    why_not = _why_no_change(state, order.wanted)
    if why_not:
        return _written_down(state, order, why_not, at)
    policy = plans.policy
    change = Reconfiguration(
        order,
        plans.ground_in_force(state.pool),
        policy.rules(order.wanted),
        timeout_s=policy.timeout_s,
        now=at.now,
    )
    fields: dict[str, object] = {"cause": order.cause, "why": order.reason}
    return plan_life.begin(state, change, fields, at)


def _waits_for_more(state: RunState) -> bool:
    """Whether others are on their way out too, or the core, with which all of them end."""
    if state.cycle.phase is Phase.STARTING:
        return state.cycle.stop_reason is None
    if state.hybrids is None:
        return False
    leaving = state.hybrids.pool.ids_in(HybridState.LEAVING)
    return any(it.replica_id in leaving for it in state.plans.plan.hybrids)


def _with_sleepers(state: RunState) -> Plan:
    plans = state.plans
    taken = {*slots_of(plans.plan), *plans.unusable}
    free: list[InstancePlacement] = []
    for placement in plans.asleep:
        if not server_slots(placement) & taken:
            taken |= server_slots(placement)
            free.append(placement)
    return msgspec.structs.replace(plans.plan, instances=(*plans.plan.instances, *free))


def _why_no_change(state: RunState, wanted: Plan) -> str:
    plans = state.plans
    if serves_nothing(plans.plan):
        return "nothing serves: all servers come back together"
    if plans.home is not None:
        return "nodes are away"
    if all(is_lent(it, plans.plan) for it in plans.asleep):
        return "no server sleeps there"
    if why := plan_life.why_not_now(state):
        return why
    found = judged(plans.policy, plans.ground_in_force(state.pool), plans.plan, wanted)
    return found.reason if isinstance(found, Refusal) else ""


def _written_down(state: RunState, order: Order, why_not: str, at: Moment) -> tuple[Command, ...]:
    idle = slots_in_words(sorted(state.plans.idle))
    reason = f"{order.reason}; slots {idle} are idle until the plan is changed: {why_not}"
    record = plan_life.record_of(state, order, "failed", reason if idle else order.reason, at)
    return plan_life.told(state, record)
