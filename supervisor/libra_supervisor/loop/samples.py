"""What happens to samples, of training and of evaluations. Pure."""

from typing import assert_never

from libra.ids import GroupId
from libra.rollouts.evaluation import is_evaluated
from libra_supervisor import events
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.run_state import RunState


def on_sample(
    state: RunState,
    event: events.SampleStarted
    | events.SampleProgressed
    | events.SampleFinished
    | events.SampleGaveUp,
    at: Moment,
) -> tuple[Command, ...]:
    if is_evaluated(_group_of(event)):
        return _on_evaluated_sample(state, event, at)
    match event:
        case events.SampleStarted(group_id, sample_index):
            state.book.rollouts.on_started((group_id, sample_index), now=at.now)
            state.desk.on_started(group_id, sample_index, now=at.now)
            return ()
        case events.SampleProgressed(group_id, sample_index):
            state.desk.on_progress(group_id, sample_index, now=at.now)
            return ()
        case events.SampleFinished(trajectory):
            state.book.rollouts.on_finished(trajectory, now=at.now)
            return state.desk.on_finished(trajectory)
        case events.SampleGaveUp(group_id, sample_index, failure):
            state.book.rollouts.on_ended((group_id, sample_index), now=at.now)
            return state.desk.on_failed(group_id, sample_index, failure)
        case _:
            assert_never(event)


def _on_evaluated_sample(
    state: RunState,
    event: events.SampleStarted
    | events.SampleProgressed
    | events.SampleFinished
    | events.SampleGaveUp,
    at: Moment,
) -> tuple[Command, ...]:
    attempt = state.attempts_before + state.attempt
    match event:
        case events.SampleStarted() | events.SampleProgressed():
            return ()
        case events.SampleFinished(trajectory):
            return state.evaluator.on_finished(trajectory, attempt=attempt, at=at)
        case events.SampleGaveUp(group_id, _, failure):
            return state.evaluator.on_failed(group_id, failure, attempt=attempt, at=at)
        case _:
            assert_never(event)


def _group_of(
    event: events.SampleStarted
    | events.SampleProgressed
    | events.SampleFinished
    | events.SampleGaveUp,
) -> GroupId:
    if isinstance(event, events.SampleFinished):
        return event.trajectory.group_id
    return event.group_id
