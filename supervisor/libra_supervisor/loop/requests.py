"""What people and the clock ask for. Pure."""

from typing import assert_never

from libra.ids import InstanceId
from libra.pools.member import MemberState
from libra_supervisor import events
from libra_supervisor.loop import commands, hybrid_life, plan_life
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.late_batch import on_collection_tick
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.run_state import RunState

INTERRUPTED = 130


def on_outside(
    state: RunState,
    event: events.StopRequested
    | events.DrainRequested
    | events.RestartRequested
    | events.ReloadRequested
    | events.Ticked,
    at: Moment,
) -> tuple[Command, ...]:
    if isinstance(event, events.DrainRequested | events.RestartRequested):
        member = state.pool.get(event.instance_id)
        if member is None or member.state is MemberState.ASLEEP:
            return ()  # it left the plan since it was asked for
    match event:
        case events.StopRequested():
            return _on_stop(state, event, at)
        case events.DrainRequested(instance_id, drain):
            return _on_drain(state, instance_id, drain=drain, at=at)
        case events.RestartRequested(instance_id):
            reason = "the operator asked for it"
            state.pool.on_replace_requested(instance_id, now=at.now)
            return (
                commands.Unroute(instance_id, is_draining=True),
                *state.publication.on_leaving(instance_id, at=at),
                commands.ReplaceInstance(instance_id, reason),
            )
        case events.ReloadRequested():
            return state.publication.refresh(at, held=state.cycle.held_version)
        case events.Ticked():
            return (
                *state.desk.on_tick(now=at.now),
                *state.publication.on_tick(at=at),
                *plan_life.on_tick(state, at),
                *hybrid_life.on_tick(state, at),
                *on_collection_tick(state, at),
                *state.follow(state.cycle.on_tick(now=at.now), at),
            )
        case _:
            assert_never(event)


def _on_stop(state: RunState, event: events.StopRequested, at: Moment) -> tuple[Command, ...]:
    if event.now:
        return (commands.EndRun(INTERRUPTED, f"{event.reason}: stopped at once"),)
    state.stop_exit_code = event.exit_code
    state.desk.close()
    said = commands.Say("stop_requested", {"why": event.reason, "phase": state.cycle.phase.value})
    return (said, *state.follow(state.cycle.on_stop_requested(event.reason, now=at.now), at))


def _on_drain(
    state: RunState, instance_id: InstanceId, *, drain: bool, at: Moment
) -> tuple[Command, ...]:
    if drain:
        state.pool.on_drain_requested(instance_id, now=at.now)
        return (commands.Unroute(instance_id, is_draining=True),)
    state.pool.on_undrain_requested(instance_id, now=at.now)
    member = state.pool[instance_id]
    if member.state is not MemberState.SERVING or member.incarnation is None:
        return ()
    version = member.version
    return () if version is None else (commands.RouteTo(instance_id, member.incarnation, version),)
