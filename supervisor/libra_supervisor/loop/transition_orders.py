"""What is to be done for one transition of a change of the plan. Pure."""

from typing import assert_never

from libra.ids import InstanceId
from libra.planner.plan import InstancePlacement, TrainPlacement
from libra.pools.ground import server_slots
from libra.pools.member import MemberState
from libra.pools.transition import (
    AttachHybrid,
    AwaitVersion,
    AwaitWarm,
    DetachHybrid,
    Drain,
    HoldStep,
    ReleaseStep,
    ReshapeTraining,
    Sleep,
    Start,
    Stop,
    Transition,
    Undrain,
    Wake,
    Warm,
)
from libra_supervisor.loop import commands
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.run_state import RunState


def orders_for(  # noqa: C901, PLR0911, PLR0912, PLR0915 - a table
    state: RunState, transition: Transition, at: Moment
) -> tuple[Command, ...]:
    pool = state.pool
    match transition:
        case Warm(placements, replicas):
            for it in placements:
                pool.add(
                    it.instance_id,
                    it.tp,
                    now=at.now,
                    node=it.node,
                    is_warming=True,
                    waits_for=_holders(state, it),
                )
            port = state.plans.hybrids
            return (
                *(commands.AddInstance(it, has_devices=False) for it in placements),
                *(command for it in replicas if port for command in port.warm(it)),
            )
        case Start(placements):
            for it in placements:
                member = pool.get(it.instance_id)
                if member is None or member.state is MemberState.GONE:
                    pool.add(it.instance_id, it.tp, now=at.now, node=it.node)
                pool.on_given_devices(it.instance_id, now=at.now)
            return tuple(commands.AddInstance(it, has_devices=True) for it in placements)
        case Drain(instance_ids, gives_back):
            return tuple(
                command
                for it in instance_ids
                for command in (*_leave(state, it, at), commands.DrainInstance(it, gives_back))
            )
        case Undrain(instance_ids):
            return tuple(command for it in instance_ids for command in _stay(state, it, at))
        case Stop(instance_ids):
            return tuple(
                command
                for it in instance_ids
                for command in (*_leave(state, it, at), commands.RetireInstance(it))
            )
        case Sleep(instance_ids):
            return tuple(
                command
                for it in instance_ids
                for command in (*_leave(state, it, at), commands.SleepInstance(it))
            )
        case Wake(instance_ids):
            for instance_id in instance_ids:
                pool.on_wake_wanted(instance_id, now=at.now)
            return tuple(commands.WakeInstance(it) for it in instance_ids)
        case HoldStep():
            state.cycle.hold()
            return ()
        case ReleaseStep():
            state.cycle.release()
            return ()
        case ReshapeTraining(placement):
            state.ready_step = None
            _note_layout(state, placement)
            if state.hybrids is not None:
                state.hybrids.on_core_reshaped(placement)
            return state.follow(state.cycle.on_reshape_wanted(), at)
        case AttachHybrid(placements):
            port = state.plans.hybrids
            return tuple(c for it in placements for c in port.attach(it)) if port else ()
        case DetachHybrid(replica_ids):
            port = state.plans.hybrids
            return tuple(c for it in replica_ids for c in port.detach(it)) if port else ()
        case AwaitVersion() | AwaitWarm():
            return ()
        case _:
            assert_never(transition)


def _note_layout(state: RunState, placement: TrainPlacement) -> None:
    """A layout that the loss of a node forces on the run is probed before it trains."""
    change, desk = state.plans.change, state.nodes
    is_known = desk is None or desk.is_known_to_fit(placement)
    is_forced = change is not None and change.order.cause == "node_lost"
    if is_forced and not is_known and state.policy.num_probes:
        state.probe.on_forced_layout(placement)
    else:
        state.probe.on_other_layout()


def _holders(state: RunState, placement: InstancePlacement) -> frozenset[InstanceId]:
    """Instances that have a device which `placement` is to get."""
    change = state.plans.change
    slots = server_slots(placement)
    return frozenset(
        it.instance_id
        for it in (change.ground.servers if change is not None else ())
        if it.instance_id != placement.instance_id and server_slots(it.placement) & slots
    )


def _leave(state: RunState, instance_id: InstanceId, at: Moment) -> tuple[Command, ...]:
    """Nothing new goes there, and no reload waits for it."""
    member = state.pool.get(instance_id)
    if member is None or member.is_leaving_plan:
        return ()
    state.pool.on_leave_wanted(instance_id, now=at.now)
    return (
        commands.Unroute(instance_id, is_draining=True),
        *state.publication.on_leaving(instance_id, at=at),
    )


def _stay(state: RunState, instance_id: InstanceId, at: Moment) -> tuple[Command, ...]:
    kept = commands.KeepInstance(instance_id)
    committed = state.publication.committed
    serves = state.pool.on_stay_wanted(instance_id, committed=committed, now=at.now)
    member = state.pool[instance_id]
    if not serves or member.incarnation is None or committed is None:
        return (kept,)
    return (kept, commands.RouteTo(instance_id, member.incarnation, committed))
