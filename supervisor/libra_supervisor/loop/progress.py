"""What becomes possible, whatever the event was. Pure."""

from libra.ids import PolicyVersion
from libra.pools.member import MemberState
from libra.rollouts.group import CompleteGroup
from libra_supervisor.loop import commands, hybrid_life
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.lending import follow_lending
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.node_life import follow_nodes
from libra_supervisor.loop.plan_life import follow_change
from libra_supervisor.loop.replica_loss import follow_losses
from libra_supervisor.loop.run_state import RunState


def proceed(state: RunState, at: Moment) -> tuple[Command, ...]:
    return (
        *_begin_when_ready(state, at),
        *state.publication.retry(at),
        *_finish_publication(state, at),
        *_finish_evaluation(state, at),
        *state.publication.catch_up(at=at, held=state.cycle.held_version),
        *hybrid_life.between_steps(state, at),
        *_take_batch(state, at),
        *_publish_when_nobody_serves(state, at),
        *_admit(state, at),
        *follow_lending(state, at),
        *follow_nodes(state, at),
        *follow_losses(state, at),
        *follow_change(state, at),
    )


def _begin_when_ready(state: RunState, at: Moment) -> tuple[Command, ...]:
    if state.cycle.phase is not Phase.STARTING or state.ready_step is None:
        return ()
    if not state.probe.is_open:
        return ()
    num_gpus = sum(state.pool[i].num_gpus for i in state.pool.answering_ids)
    if not state.pool.is_settled or num_gpus < state.policy.min_rollout_gpus:
        return ()
    asked: tuple[Command, ...] = ()
    if not state.policy.publishes:
        state.publication.keep_base(PolicyVersion(0))
        # They answered before there was a version that could be served.
        members = [state.pool[instance_id] for instance_id in state.pool.answering_ids]
        asked = tuple(
            commands.AskInstance(it.instance_id, it.incarnation)
            for it in members
            if it.incarnation is not None
        )
    begun = state.cycle.on_parts_ready(restored_step=state.ready_step, now=at.now)
    return (*asked, *state.follow(begun, at))


def _finish_publication(state: RunState, at: Moment) -> tuple[Command, ...]:
    version = state.publication.just_committed
    if version is None:
        return ()
    state.publication.just_committed = None
    state.book.on_reloaded(at, is_held=state.policy.transfers)
    freed: tuple[Command, ...] = ()
    if state.policy.transfers:
        freed = state.follow(state.cycle.on_exported(version, now=at.now), at)
    return (*freed, *state.follow(state.cycle.on_settled(version, now=at.now), at))


def _publish_when_nobody_serves(state: RunState, at: Moment) -> tuple[Command, ...]:
    """Late engines need a version that is served, and nobody is left to serve it."""
    if not state.policy.transfers or not state.publication.is_idle:
        return ()
    if state.publication.can_give(state.cycle.held_version):
        return ()  # they are given it as it is
    states = (MemberState.SERVING, MemberState.RELOADING, MemberState.DRAINING)
    num_gpus = state.pool.num_gpus_in(MemberState.STALE)
    if state.pool.ids_in(*states) or num_gpus < state.policy.min_rollout_gpus:
        return ()
    return state.follow(state.cycle.on_nobody_serves(), at)


def _finish_evaluation(state: RunState, at: Moment) -> tuple[Command, ...]:
    version = state.evaluator.just_done
    if version is None:
        return ()
    state.evaluator.just_done = None
    return state.follow(state.cycle.on_evaluated(version, now=at.now), at)


def _take_batch(state: RunState, at: Moment) -> tuple[Command, ...]:
    if state.cycle.phase is not Phase.COLLECTING or state.cycle.is_hold_wanted:
        return ()
    trainer_version = PolicyVersion(state.cycle.step)
    groups = state.desk.take_batch(trainer_version)
    if groups is None:
        if not state.desk.is_exhausted:
            return ()
        left_out = state.desk.end_of_data()
        return state.follow(state.cycle.on_data_exhausted(left_out, now=at.now), at)
    return train_on(state, groups, at)


def train_on(state: RunState, groups: tuple[CompleteGroup, ...], at: Moment) -> tuple[Command, ...]:
    """Send the next step's batch to the ranks."""
    trainer_version = PolicyVersion(state.cycle.step)
    step = state.cycle.step + 1
    state.collection.end()
    state.book.on_batch_taken(step, groups, trainer_version, at)
    return (
        *hybrid_life.step_begins(state, step, groups, at),
        *state.follow(state.cycle.on_batch_taken(step), at),
    )


def _admit(state: RunState, at: Moment) -> tuple[Command, ...]:
    committed = state.publication.committed
    if committed is None or state.cycle.phase is Phase.STOPPED or not _is_somebody_there(state):
        return ()
    if state.cycle.end_reason(now=at.now) is None:
        return state.desk.admit(committed)
    return ()


def _is_somebody_there(state: RunState) -> bool:
    """Whether new requests find a server, or one that only reloads or restarts.

    A server that a change of the plan starts takes its time, in which they would fill the queue.
    """
    pool = state.pool
    return not pool.is_lent_out if state.plans.change is None else pool.has_answering
