"""What happens to the plan: a change is wanted, goes its way, and ends. Pure."""

from collections.abc import Callable, Iterable
from typing import Final, assert_never

import msgspec

from libra.ids import InstanceId
from libra.planner.lending import serves_nothing
from libra.planner.plan import Plan
from libra.pools.change_policy import Refusal, devices_missing, judged
from libra.pools.ground import Stage
from libra.pools.member import MemberState
from libra.pools.pool import COMING
from libra.pools.reconfiguration import Order, Reconfiguration, Result
from libra.pools.transition import Transition, in_words
from libra_supervisor import events
from libra_supervisor.loop import commands
from libra_supervisor.loop.change_stages import stages_now
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.run_state import RunState
from libra_supervisor.loop.server_need import need_of_server
from libra_supervisor.loop.stage_clock import StageClock
from libra_supervisor.loop.transition_orders import orders_for
from libra_supervisor.records.reconfiguration import Outcome, ReconfigurationRecord

_SETS_HOME: Final = ("decision", "starved", "replica_lost")
"""Causes of changes that lead to another plan of the run, and not away from it or back."""

_LOST = frozenset(
    {
        *COMING,
        MemberState.QUARANTINED,
        MemberState.STALE,
        # By an operator. One that the change itself drains does not count as serving anyhow.
        MemberState.DRAINING,
    }
)


def on_plan(
    state: RunState,
    event: events.ReconfigurationWanted
    | events.ReconfigurationEnded
    | events.HybridWarmed
    | events.HybridJoined
    | events.HybridLost
    | events.HybridLeft,
    at: Moment,
) -> tuple[Command, ...]:
    change = state.plans.change
    match event:
        case events.ReconfigurationWanted():
            return _on_wanted(state, event, at)
        case events.ReconfigurationEnded():
            return ()
        case events.HybridWarmed(replica_id):
            ordered = change.on_hybrid_warm(replica_id, now=at.now) if change else ()
        case events.HybridJoined(replica_id):
            ordered = change.on_hybrid_joined(replica_id, now=at.now) if change else ()
        case events.HybridLeft(replica_id, lost):
            state.plans.lost |= lost
            ordered = change.on_hybrid_left(replica_id, now=at.now, lost=lost) if change else ()
        case events.HybridLost(replica_id, why, lost):
            state.plans.lost |= lost
            if change is None:
                return _on_hybrid_lost(state, event)
            ordered = change.on_hybrid_lost(replica_id, why, now=at.now, lost=lost)
        case _:
            assert_never(event)
    return _carried_out(state, ordered, at)


def on_instance(
    state: RunState,
    event: events.InstanceDrained
    | events.InstanceWarmed
    | events.InstanceAsleep
    | events.InstanceRetired,
    at: Moment,
) -> tuple[Command, ...]:
    change, instance_id = state.plans.change, event.instance_id
    match event:
        case events.InstanceDrained():
            ordered = _drained(state, change, instance_id, at) if change else ()
        case events.InstanceWarmed():
            ordered = change.on_warm(instance_id, now=at.now) if change else ()
        case events.InstanceAsleep():
            return _on_asleep(state, event, at)
        case events.InstanceRetired(is_clean=is_clean):
            state.pool.remove(instance_id)
            state.publication.forget(instance_id)
            state.plans.forget(instance_id)
            ordered = _gone(change, instance_id, at, is_clean=is_clean)
            forgotten = commands.ForgetInstance(instance_id)
            return (forgotten, *_carried_out(state, ordered, at))
        case _:
            assert_never(event)
    return _carried_out(state, ordered, at)


def _on_asleep(state: RunState, event: events.InstanceAsleep, at: Moment) -> tuple[Command, ...]:
    change, instance_id = state.plans.change, event.instance_id
    member = state.pool.get(instance_id)
    if member is None:
        return ()
    server = change.ground.find(instance_id) if change is not None else None
    is_wanted = server is not None and server.stage is Stage.FALLING_ASLEEP
    is_same = member.incarnation == event.incarnation
    if (
        change is None
        or not (is_wanted and is_same)
        or not state.pool.on_asleep(instance_id, now=at.now)
    ):
        return (commands.RetireInstance(instance_id),)
    state.publication.forget(instance_id)
    forgotten = commands.ForgetInstance(instance_id)
    return (forgotten, *_carried_out(state, change.on_asleep(instance_id, now=at.now), at))


def on_training_ready(state: RunState, at: Moment) -> tuple[Command, ...]:
    change = state.plans.change
    return () if change is None else _carried_out(state, change.on_training_ready(now=at.now), at)


def on_training_failed(state: RunState, reason: str, at: Moment) -> tuple[Command, ...]:
    change = state.plans.change
    if change is None:
        return ()
    return _carried_out(state, change.on_training_failed(reason, now=at.now), at)


def follow_change(state: RunState, at: Moment) -> tuple[Command, ...]:
    """Tell the change under way what has become of servers and of the trainer."""
    done = [*_resume(state, at)]
    if state.plans.change is not None:
        state.plans.stages.look(stages_now(state, state.plans.change), now=at.now)
    for notice in _notices(state):
        change = state.plans.change
        if change is None:
            break
        done += _carried_out(state, notice(change, at.now), at)
    is_kept = state.plans.policy.is_enabled or state.plans.home is not None
    memory = state.plans.memory_if_changed() if is_kept else None
    return (*done, *([] if memory is None else [commands.KeepPlan(memory)]))


# The begin


def _on_wanted(
    state: RunState, event: events.ReconfigurationWanted, at: Moment
) -> tuple[Command, ...]:
    plans = state.plans
    plan = plans.as_carried_out(event.plan)
    if why := (
        why_not_now(state)
        or plans.presence.missed_by(plan)
        or why_not_lent(state, plan)
        or plans.why_not(plan)
    ):
        return _refused(state, event, Refusal(why), at)
    wanted = plans.match(plan)
    if wanted == plans.plan:
        return _refused(state, event, Refusal("this plan is in force already"), at)
    ground = plans.ground_in_force(state.pool)
    found = judged(plans.policy, ground, plans.plan, wanted)
    if isinstance(found, Refusal):
        return _refused(state, event, found, at)
    order = Order(
        decision_id=event.decision_id,
        reason=event.reason,
        old=plans.plan,
        wanted=wanted,
        # Nothing would serve again: what does not come up is waited for, or ends the run.
        has_way_back=not serves_nothing(plans.plan),
    )
    change = Reconfiguration(
        order,
        ground,
        plans.policy.rules(wanted),
        timeout_s=plans.policy.timeout_s,
        now=at.now,
    )
    fields: dict[str, object] = {
        "decision": event.decision_id,
        "why": event.reason,
        "transitions": [in_words(it) for it in found],
    }
    return begin(state, change, fields, at)


def begin(
    state: RunState, change: Reconfiguration, fields: dict[str, object], at: Moment
) -> tuple[Command, ...]:
    """Make it the change that is under way; `fields` say why in the log."""
    change.order = msgspec.structs.replace(change.order, begun_wall_ns=at.wall_ns)
    state.plans.change = change
    state.plans.stages = StageClock(attempt=state.attempt)
    said = commands.Say("reconfiguration_begun", fields)
    return (said, *_carried_out(state, change.begin(now=at.now), at))


def overtaken(state: RunState, reason: str, at: Moment) -> tuple[Command, ...]:
    """Write down that the change under way, if any, is given up for another one.

    What it has done so far stays, and the other one begins from there.
    """
    plans, change = state.plans, state.plans.change
    order = plans.interrupted if change is None else change.order
    if order is None:
        return ()
    plans.stages.look({}, now=at.now)
    plans.change = plans.interrupted = None
    if change is not None:
        plans.take_over(change.ground)
    record = record_of(state, order, "failed", f"overtaken: {reason}", at)
    return told(state, msgspec.structs.replace(record, stages=plans.stages.seconds))


def why_not_now(state: RunState) -> str:
    """What keeps the run from any change of its plan at this moment; empty when nothing does."""
    if state.plans.is_busy:
        return "another change of the plan is under way"
    if state.publication.committed is None:
        return "no version is served yet"
    if state.cycle.stop_reason is not None:
        return f"the run is stopping: {state.cycle.stop_reason}"
    if missed := state.plans.presence.missed_by(state.plans.plan):
        return f"the run waits: {missed}"
    return ""


def why_not_lent(state: RunState, wanted: Plan) -> str:
    """What needs a server now, should nothing serve under `wanted`; empty when nothing does."""
    if not serves_nothing(wanted) or not wanted.hybrids:
        return ""
    if serves_nothing(state.plans.plan):
        return "nothing serves, and would not serve either: a server has to come back first"
    if state.evaluator.progress is not None:
        return "nothing would serve, and an evaluation is going on"
    return ""


def _resume(state: RunState, at: Moment) -> tuple[Command, ...]:
    """Go on with what an earlier supervisor began, once a version is served again."""
    plans = state.plans
    order = plans.interrupted
    if order is None or plans.change is not None or state.publication.committed is None:
        return ()
    if plans.presence.may_come(order.wanted):
        return ()
    plans.interrupted = None
    if not plans.policy.is_enabled:
        return ()
    # Replicas ended with their supervisor: those of the plan before are not attached again.
    old = msgspec.structs.replace(order.old, hybrids=())
    wanted = plans.renamed(order.wanted)
    # One of before this was written down began, for all that is known, now.
    begun_wall_ns = order.begun_wall_ns or at.wall_ns
    order = msgspec.structs.replace(
        order, old=old, wanted=wanted, is_resumed=True, begun_wall_ns=begun_wall_ns
    )
    why = devices_missing(plans.policy, order.wanted) or plans.presence.missed_by(order.wanted)
    if why and not order.is_turned:
        order = msgspec.structs.replace(order, is_turned=True, turned_by=why)
    placements = {it.instance_id: it for it in (*order.old.instances, *order.wanted.instances)}
    plans.change = change = Reconfiguration(
        order,
        msgspec.structs.replace(
            plans.ground(state.pool, tuple(placements.values())), train=plans.started_with.train
        ),
        plans.policy.rules(order.wanted),
        timeout_s=plans.policy.timeout_s,
        now=at.now,
    )
    plans.stages = StageClock(attempt=state.attempt)
    fields: dict[str, object] = {"decision": order.decision_id, "turned_by": order.turned_by}
    said = commands.Say("reconfiguration_resumed", fields)
    return (said, *_carried_out(state, change.begin(now=at.now), at))


# On its way


Notice = Callable[[Reconfiguration, float], tuple[Transition, ...]]


def _notices(state: RunState) -> list[Notice]:
    """What the change under way may not know yet."""
    change = state.plans.change
    if change is None:
        return []
    found: list[Notice] = []
    for server in change.ground.servers:
        member = state.pool.get(server.instance_id)
        if member is not None:
            found += _of_member(member.instance_id, member.state, member.last_error)
    if state.cycle.is_held:
        found.append(lambda it, now: it.on_step_held(now=now))
    else:
        found.append(lambda it, now: it.on_step_going(now=now))
    return found


def _of_member(instance_id: InstanceId, state: MemberState, error: str) -> list[Notice]:
    if state is MemberState.SERVING:
        return [lambda it, now: it.on_serving(instance_id, now=now)]
    if state is MemberState.GONE:
        return [lambda it, now: it.on_gave_up(instance_id, error, now=now)]
    if state in _LOST:
        return [lambda it, now: it.on_lost(instance_id, now=now)]
    return []


def on_tick(state: RunState, at: Moment) -> tuple[Command, ...]:
    change, presence = state.plans.change, state.plans.presence
    if change is None:
        return ()
    if presence.is_away(change.order.old) or presence.is_away(change.order.wanted):
        change.excuse(now=at.now)
    return _carried_out(state, change.on_tick(now=at.now), at)


def _drained(
    state: RunState, change: Reconfiguration, instance_id: InstanceId, at: Moment
) -> tuple[Transition, ...]:
    """The last server stays when it has not left enough to go on without it."""
    is_last = change.ground.ids_in(Stage.DRAINING) == (instance_id,) and state.pool.is_lent_out
    if is_last and serves_nothing(change.order.wanted) and (why := need_of_server(state, at)):
        turned = change.on_starved(why, now=at.now)
        if turned:
            return turned
    return change.on_drained(instance_id, now=at.now)


def on_starved(state: RunState, reason: str, at: Moment) -> tuple[Command, ...]:
    change = state.plans.change
    return () if change is None else _carried_out(state, change.on_starved(reason, now=at.now), at)


def _gone(
    change: Reconfiguration | None, instance_id: InstanceId, at: Moment, *, is_clean: bool
) -> tuple[Transition, ...]:
    if change is None:
        return ()
    if is_clean:
        return change.on_gone(instance_id, now=at.now)
    return change.on_unkillable(instance_id, now=at.now)


def _carried_out(state: RunState, ordered: Iterable[Transition], at: Moment) -> tuple[Command, ...]:
    done: list[Command] = []
    for transition in ordered:
        done.append(commands.Say("transition", {"what": in_words(transition)}))
        done += orders_for(state, transition, at)
    change = state.plans.change
    if change is not None and change.result is not None:
        done += _ended(state, change, change.result, at)
    return tuple(done)


# The end


def _ended(
    state: RunState, change: Reconfiguration, result: Result, at: Moment
) -> tuple[Command, ...]:
    plans, order = state.plans, change.order
    plans.stages.look({}, now=at.now)
    plans.change = None
    plans.take_over(change.ground)
    before = plans.plan
    plans.put_in_force(result.plan)
    record = record_of(state, order, result.outcome, result.reason, at)
    record = msgspec.structs.replace(
        record,
        total_s=_total_s(order, result, at),
        stalled_s=result.stalled_s,
        phases=result.phases,
        stages=plans.stages.seconds,
        transitions=result.transitions,
        started=_beyond(result.plan, before),
        stopped=_beyond(before, result.plan),
        asleep=tuple(it.instance_id for it in plans.asleep),
        attached=tuple(it.replica_id for it in result.plan.hybrids if it not in before.hybrids),
        detached=tuple(it.replica_id for it in before.hybrids if it not in result.plan.hybrids),
    )
    if state.nodes is not None and order.cause in _SETS_HOME and result.outcome == "done":
        state.nodes.home = result.plan
        plans.home = None if plans.home is None else result.plan
    given_up = tuple(
        commands.RetireInstance(it.instance_id)
        for it in state.pool.members
        if it.state is MemberState.GONE
    )
    return (*given_up, commands.WritePlan(result.plan), *told(state, record))


def _total_s(order: Order, result: Result, at: Moment) -> float:
    """With what it took an earlier supervisor, and the time without one."""
    if not order.is_resumed:
        return result.total_s
    return max(result.total_s, (at.wall_ns - order.begun_wall_ns) / 1e9)


def _refused(
    state: RunState, event: events.ReconfigurationWanted, refusal: Refusal, at: Moment
) -> tuple[Command, ...]:
    record = record_of(state, event, "refused", refusal.reason, at)
    return told(state, msgspec.structs.replace(record, transitions=refusal.transitions))


def record_of(
    state: RunState,
    of: Order | events.ReconfigurationWanted,
    outcome: Outcome,
    reason: str,
    at: Moment,
) -> ReconfigurationRecord:
    return ReconfigurationRecord(
        decision_id=of.decision_id,
        cause=of.cause if isinstance(of, Order) else "decision",
        wall_time_ns=at.wall_ns,
        step=state.cycle.step,
        strategy=state.plans.policy.strategy,
        outcome=outcome,
        reason=reason,
        total_s=0.0,
        stalled_s=0.0,
        phases={},
        transitions=(),
        plan=state.plans.plan,
    )


def told(state: RunState, record: ReconfigurationRecord) -> tuple[Command, ...]:
    state.plans.count(record)
    ended = events.ReconfigurationEnded(
        decision_id=record.decision_id,
        outcome=record.outcome,
        stalled_s=record.stalled_s,
        phases=record.phases,
        reason=record.reason,
        cause=record.cause,
    )
    fields: dict[str, object] = {
        "decision": record.decision_id,
        "outcome": record.outcome,
        "why": record.reason,
        "total_s": round(record.total_s, 3),
        "stalled_s": round(record.stalled_s, 3),
    }
    return (
        commands.Say("reconfiguration_ended", fields, is_warning=record.outcome != "done"),
        commands.WriteReconfiguration(record),
        commands.ReportReconfiguration(ended),
    )


def _on_hybrid_lost(state: RunState, event: events.HybridLost) -> tuple[Command, ...]:
    """Outside of a change: the plan in force goes on without it."""
    plans = state.plans
    if not plans.lose(event.replica_id, event.why):
        return ()
    return (commands.WritePlan(plans.plan),)


def _beyond(plan: Plan, other: Plan) -> tuple[InstanceId, ...]:
    known = {it.instance_id for it in other.instances}
    return tuple(it.instance_id for it in plan.instances if it.instance_id not in known)
