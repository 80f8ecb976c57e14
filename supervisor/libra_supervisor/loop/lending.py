"""What brings the last server back once hybrid replicas have borrowed it. Pure.

While nothing serves, training goes on with what rollouts have made so far. The way back begins as
soon as the run needs a server again: when the batch that is being trained is the last one, when
something is to be evaluated, when no replica is left, or when the trainer was lost. On the way
there the same turns the change round.
"""

from typing import Final

from libra.planner.lending import serves_nothing
from libra.pools.change_policy import Refusal, judged
from libra.pools.ground import Stage
from libra.pools.reconfiguration import Order, Reconfiguration
from libra_supervisor.loop import commands, plan_life
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.run_state import RunState
from libra_supervisor.loop.server_need import need_of_server

_CHILD_FAILED: Final = 4


def follow_lending(state: RunState, at: Moment) -> tuple[Command, ...]:
    """Give rollout its devices back when the run needs a server and none is left."""
    if not _is_lent(state):
        return ()
    why = need_of_server(state, at)
    if not why:
        return ()
    if state.plans.change is not None:
        return plan_life.on_starved(state, why, at)
    return _give_back(state, why, at)


def _is_lent(state: RunState) -> bool:
    """Whether nothing serves, nor will under the plan that is in force or on its way."""
    plans = state.plans
    if not state.pool.is_lent_out or plans.interrupted is not None:
        return False
    if plans.change is None:
        return serves_nothing(plans.plan)
    # What is still in flight may make a batch yet.
    is_draining = bool(plans.change.ground.ids_in(Stage.DRAINING))
    return serves_nothing(plans.change.order.wanted) and not is_draining


def _give_back(state: RunState, why: str, at: Moment) -> tuple[Command, ...]:
    plans = state.plans
    wanted = plans.given_back()
    if wanted is None:
        return ()
    ground = plans.ground_in_force(state.pool)
    found = judged(plans.policy, ground, plans.plan, wanted)
    if isinstance(found, Refusal):
        reason = f"{why}, and no server can come back: {found.reason}"
        return (commands.EndRun(_CHILD_FAILED, reason),)
    order = Order(
        decision_id=0,
        reason=why,
        old=plans.plan,
        wanted=wanted,
        cause="starved",
        has_way_back=False,
    )
    policy = plans.policy
    rules, timeout_s = policy.rules(wanted), policy.timeout_s
    change = Reconfiguration(order, ground, rules, timeout_s=timeout_s, now=at.now)
    fields: dict[str, object] = {"cause": order.cause, "why": why}
    return plan_life.begin(state, change, fields, at)
