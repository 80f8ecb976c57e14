"""What happens to hybrid replicas, and what their membership means for a step. Pure."""

from collections.abc import Sequence
from typing import Final, assert_never

from libra.errors import InvariantError
from libra.rollouts.batch import trained_mini_batches
from libra.rollouts.group import CompleteGroup
from libra.wire.hybrid import CoreJoined, LaneOpened, StepFollowed
from libra.wire.rank import CheckpointSaved, StepTrained
from libra_supervisor import events
from libra_supervisor.loop import commands, plan_life
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.hybrid_desk import Done, HybridDesk
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.run_state import RunState

_BETWEEN_STEPS: Final = (Phase.COLLECTING, Phase.EXPORTING, Phase.SETTLING, Phase.EVALUATING)


def on_replica(
    state: RunState,
    event: events.ReplicaReady | events.ReplicaSaid | events.ReplicaDown,
    at: Moment,
) -> tuple[Command, ...]:
    desk = _desk(state)
    match event:
        case events.ReplicaReady(replica_id):
            desk.on_replica_ready(replica_id, now=at.now)
            return ()
        case events.ReplicaSaid(replica_id, said):
            return _told(state, desk.on_replica_said(replica_id, said, now=at.now), at)
        case events.ReplicaDown(replica_id, reason):
            return _told(state, desk.on_replica_down(replica_id, reason), at)
        case _:
            assert_never(event)


def on_core_said(
    state: RunState, said: LaneOpened | CoreJoined | StepFollowed, at: Moment
) -> tuple[Command, ...]:
    if not isinstance(said, LaneOpened):
        raise InvariantError(f"the core says what only a replica does: {said}")
    return _told(state, _desk(state).on_lane_opened(said), at)


def on_core_begins(state: RunState, attempt: int, at: Moment) -> tuple[Command, ...]:
    if state.hybrids is None:
        return ()
    return _told(state, state.hybrids.on_core_begins(attempt), at)


def on_core_lost(state: RunState, at: Moment) -> tuple[Command, ...]:
    """Its replicas hold nothing that is of use to the next one, which may be long in coming."""
    if state.hybrids is None:
        return ()
    return _told(state, state.hybrids.on_core_lost(), at)


def on_core_ready(state: RunState) -> None:
    if state.hybrids is not None:
        state.hybrids.on_core_ready()


def on_saved(state: RunState, said: CheckpointSaved, at: Moment) -> tuple[Command, ...] | None:
    """What follows from a snapshot; None when it is a checkpoint of the run."""
    if state.hybrids is None or not state.hybrids.is_snapshot(said.directory):
        return None
    return _told(state, state.hybrids.on_snapshot_saved(said.step, said.error), at)


def on_trained(state: RunState, said: StepTrained, at: Moment) -> tuple[Command, ...]:
    if state.hybrids is None:
        return ()
    return _told(state, state.hybrids.on_trained(said), at)


def on_tick(state: RunState, at: Moment) -> tuple[Command, ...]:
    if state.hybrids is None:
        return ()
    return _told(state, state.hybrids.on_tick(now=at.now), at)


def between_steps(state: RunState, at: Moment) -> tuple[Command, ...]:
    """Open lanes and take a snapshot when a replica waits for them."""
    if state.hybrids is None or state.cycle.phase not in _BETWEEN_STEPS:
        return ()
    is_saving = state.cycle.saving_step is not None
    return _told(state, state.hybrids.on_boundary(state.cycle.step, is_saving=is_saving), at)


def step_begins(
    state: RunState, step: int, groups: Sequence[CompleteGroup], at: Moment
) -> tuple[Command, ...]:
    """Send the batch of `step` to the core and to the members it has now."""
    if state.hybrids is None:
        return (commands.SendBatch(state.attempt, step, tuple(groups)),)
    terms = state.hybrids.terms
    mini_batches = trained_mini_batches(groups, terms.shape)
    begun, done = state.hybrids.on_step_begins(step, mini_batches)
    send = commands.SendBatch(
        state.attempt, step, tuple(groups), hybrids=begun, replica_data=terms.replica_data
    )
    return (send, *_told(state, done, at))


def _desk(state: RunState) -> HybridDesk:
    if state.hybrids is None:
        raise InvariantError("a hybrid replica in a run that can have none")
    return state.hybrids


def _told(state: RunState, done: Done, at: Moment) -> tuple[Command, ...]:
    """The commands, and what the plan makes of the news."""
    following = [plan_life.on_plan(state, news, at) for news in done.news]
    said = [commands.Say(*_in_words(news)) for news in done.news]
    return (*done.commands, *said, *(command for some in following for command in some))


def _in_words(
    news: events.HybridJoined | events.HybridLost | events.HybridLeft,
) -> tuple[str, dict[str, object], bool]:
    match news:
        case events.HybridJoined(replica_id):
            return "hybrid_joined", {"replica": replica_id}, False
        case events.HybridLost(replica_id, why):
            return "hybrid_lost", {"replica": replica_id, "why": why}, True
        case events.HybridLeft(replica_id):
            return "hybrid_left", {"replica": replica_id}, False
        case _:
            assert_never(news)
