"""What the loss and the return of a node mean for the plan. Pure.

A loss is carried out at once, since what was there is gone whatever the run makes of it: servers
leave the plan, and a core that lost ranks is started anew where it fits. The way back is a change
of the plan like any other: first servers, then the core, from a checkpoint of the step at which it
stands.
"""

from math import inf

import msgspec

from libra.planner.plan import Plan, Slot
from libra.planner.without_nodes import Gone, Lack, is_same
from libra.pools.change_order import Rules
from libra.pools.ground import (
    ENDING,
    WITHOUT_DEVICE,
    Ground,
    Hybrid,
    Server,
    Stage,
    hybrid_slots,
    server_slots,
)
from libra.pools.ground import core_slots as slots_of_core
from libra.pools.member import MemberState
from libra.pools.reconfiguration import Order, Reconfiguration
from libra_supervisor import events
from libra_supervisor.loop import commands, plan_life
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.node_desk import Move, NodeDesk
from libra_supervisor.loop.run_state import RunState

_CHILD_FAILED = 4


def on_node(state: RunState, event: events.NodeJoined | events.NodeLost, at: Moment) -> None:
    desk, presence = state.nodes, state.plans.presence
    match event:
        case events.NodeJoined(node):
            presence.absent -= {node}
            if desk is not None:
                desk.on_here(node, now=at.now)
        case events.NodeLost(node, reason):
            presence.absent |= {node}
            if desk is not None:
                desk.on_lost(node, reason, now=at.now)


def follow_nodes(state: RunState, at: Moment) -> tuple[Command, ...]:
    """Bring the plan to what is there."""
    desk = state.nodes
    if desk is None or state.cycle.phase is Phase.STOPPED:
        return ()
    _take_in(state, desk, at)
    ended = _too_few_serve(state, desk)
    return _led_back(state, desk, at) if ended is None else (ended,)


def _take_in(state: RunState, desk: NodeDesk, at: Moment) -> None:
    desk.settle(now=at.now)
    state.plans.presence.uncounted = desk.away
    for member in state.pool.members:
        if member.state is MemberState.GONE:
            desk.give_up(member.instance_id)
    if state.plans.change is None:
        desk.on_over(state.plans.plan, now=at.now)


def _led_back(state: RunState, desk: NodeDesk, at: Moment) -> tuple[Command, ...]:
    """Whatever leads to the plan that the run should have."""
    plans = state.plans
    gone = desk.gone(plans.lost)
    target = desk.target(gone)
    if isinstance(target, Lack):
        return _wait(desk, target.reason)
    desk.lack = ""
    if _needs_gone(state, gone) or _is_refused(state, desk):
        return _do_without(state, desk, gone, target, at)
    if plans.change is None and not is_same(_standing(plans.plan, gone), target):
        return _move_back(state, desk, gone, target, at)
    return ()


def _too_few_serve(state: RunState, desk: NodeDesk) -> Command | None:
    """The end of the run when the servers that are left are fewer than the minimum."""
    not_there = (MemberState.GONE, MemberState.ASLEEP)
    living = [it for it in state.pool.members if it.state not in not_there]
    away = [it for it in living if it.node in desk.away]
    left = sum(it.num_gpus for it in living if it not in away)
    if not away or left >= state.policy.min_rollout_gpus:
        return None
    nodes = desk.in_words(frozenset(it.node for it in away))
    names = ", ".join(it.instance_id for it in away)
    return commands.EndRun(
        _CHILD_FAILED,
        f"{names} went with {nodes}; {left} rollout GPUs are left, min_rollout_gpus is "
        f"{state.policy.min_rollout_gpus}",
    )


def _wait(desk: NodeDesk, why: str) -> tuple[Command, ...]:
    """Nothing fits without the nodes: say once what was missing."""
    if desk.lack == why:
        return ()
    desk.lack = why
    fields: dict[str, object] = {"nodes": sorted(desk.away), "why": why}
    return (commands.Say("nodes_waited_for", fields, is_warning=True),)


def _standing(plan: Plan, gone: Gone) -> Plan:
    """What of the plan in force is not given up."""
    kept = tuple(it for it in plan.instances if it.instance_id not in gone.instances)
    return msgspec.structs.replace(plan, instances=kept)


def _needs_gone(state: RunState, gone: Gone) -> bool:
    """Whether the plan in force, or the one that is on its way, uses a node that is away."""
    change = state.plans.change
    if change is None:
        return gone.has(_all_slots(state.plans.plan))
    # A way back that is gone is a reason as well; servers there that are to leave are none.
    plans = (change.order.old, change.order.wanted)
    return gone.has([*change.ground.core_slots, *(slot for it in plans for slot in _all_slots(it))])


def _is_refused(state: RunState, desk: NodeDesk) -> bool:
    """Whether the core, or the one that is on its way, did not fit its recompute probe."""
    change = state.plans.change
    plan = state.plans.plan if change is None else change.order.wanted
    return plan.train.layout in desk.refused


def _all_slots(plan: Plan) -> list[Slot]:
    servers = [slot for it in plan.instances for slot in server_slots(it)]
    return [*slots_of_core(plan.train), *servers]


# A loss


def _do_without(
    state: RunState, desk: NodeDesk, gone: Gone, target: Plan, at: Moment
) -> tuple[Command, ...]:
    plans, change = state.plans, state.plans.change
    is_reshaping = state.cycle.phase is Phase.RESHAPING
    if state.cycle.stop_reason is not None and not is_reshaping:
        return ()
    if not desk.may("loss", now=at.now):
        return ()
    ground = change.ground if change else plans.ground_in_force(state.pool)
    is_core_gone = ground.is_core_gone or gone.has(ground.core_slots)
    is_down = state.cycle.phase is Phase.STARTING or is_reshaping
    if is_core_gone and (not is_down or state.ready_step is not None):
        # Its loss is still to be heard of; or it has come up there again, with a node that is
        # not counted on yet.
        return ()
    reason = f"{desk.in_words(gone.nodes)} left" if gone.nodes else "nodes are back"
    overtaken = plan_life.overtaken(state, reason, at)
    ground = _without_gone(ground, gone, is_core_gone=is_core_gone)
    target = _with_replicas(target, ground, gone)
    order = Order(
        decision_id=0,
        reason=reason,
        old=target,
        wanted=target,
        cause="node_lost" if gone.nodes else "node_back",
        has_way_back=False,
    )
    rules = Rules(min_rollout_gpus=plans.policy.min_rollout_gpus, gives_back=True)
    begun = _begin(state, desk, "loss", order, ground, rules, timeout_s=inf, at=at)
    return (*overtaken, *begun)


def _with_replicas(target: Plan, ground: Ground, gone: Gone) -> Plan:
    """With those that are members now, where the core goes on; others end."""
    if ground.is_core_gone or ground.reshaping is not None or ground.train != target.train:
        return target
    members = (it.placement for it in ground.hybrids if it.is_member)
    kept = tuple(it for it in members if not gone.has(hybrid_slots(it)))
    return msgspec.structs.replace(target, hybrids=kept)


def _without_gone(ground: Ground, gone: Gone, *, is_core_gone: bool) -> Ground:
    """What is there once the nodes are not: servers of theirs have only to be forgotten."""
    servers = tuple(
        Server(it.placement, Stage.DRAINING)
        if gone.has(server_slots(it.placement)) and it.stage not in {*WITHOUT_DEVICE, *ENDING}
        else it
        for it in ground.servers
    )
    ground = msgspec.structs.replace(ground, servers=servers)
    if not is_core_gone:
        return ground
    # Should its nodes be back before anything else is done, it comes up where it was to be.
    return msgspec.structs.replace(
        ground,
        is_core_gone=True,
        is_held=False,
        train=ground.reshaping or ground.train,
        reshaping=None,
    )


# The way back


def _move_back(
    state: RunState, desk: NodeDesk, gone: Gone, target: Plan, at: Moment
) -> tuple[Command, ...]:
    plans = state.plans
    if state.cycle.stop_reason is not None or state.publication.committed is None:
        return ()
    found = _next_move(desk, _standing(plans.plan, gone), target, now=at.now)
    if found is None:
        return ()
    move, wanted = found
    old = _standing(plans.plan, gone)
    members = tuple(Hybrid(it, is_member=True) for it in old.hybrids)
    ground = msgspec.structs.replace(plans.ground(state.pool, old.instances), hybrids=members)
    order = Order(
        decision_id=0,
        reason=_why_back(desk),
        old=old,
        wanted=_with_replicas(wanted, ground, gone),
        cause="node_back",
    )
    rules = Rules(min_rollout_gpus=plans.policy.min_rollout_gpus)
    timeout_s = plans.policy.timeout_s
    return _begin(state, desk, move, order, ground, rules, timeout_s=timeout_s, at=at)


def _why_back(desk: NodeDesk) -> str:
    if desk.away:
        return f"without {desk.in_words(desk.away)}"
    return "nodes are back" if desk.has_lost else "what a change that failed had left out"


def _next_move(
    desk: NodeDesk, standing: Plan, target: Plan, *, now: float
) -> tuple[Move, Plan] | None:
    """Servers first, which cost no step; those where ranks are now come with the core."""
    core = slots_of_core(standing.train)
    beside = tuple(it for it in target.instances if not server_slots(it) & core)
    moves: tuple[tuple[Move, Plan], ...] = (
        ("servers", msgspec.structs.replace(target, train=standing.train, instances=beside)),
        ("training", target),
    )
    for move, wanted in moves:
        if not is_same(wanted, standing) and desk.may(move, now=now):
            return move, wanted
    return None


def _begin(  # noqa: PLR0913 - a change and what becomes of it
    state: RunState,
    desk: NodeDesk,
    move: Move,
    order: Order,
    ground: Ground,
    rules: Rules,
    *,
    timeout_s: float,
    at: Moment,
) -> tuple[Command, ...]:
    desk.on_begun(move, order.wanted)
    state.plans.home = desk.home
    change = Reconfiguration(order, ground, rules, timeout_s=timeout_s, now=at.now)
    fields: dict[str, object] = {"cause": order.cause, "why": order.reason}
    return plan_life.begin(state, change, fields, at)
