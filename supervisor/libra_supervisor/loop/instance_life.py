"""What happens to one server: it comes up, answers, is doubted, hangs, ends, is given up. Pure."""

from typing import assert_never

from libra.ids import InstanceId
from libra.pools.member import MemberState
from libra_supervisor import events
from libra_supervisor.loop import commands, sleepers
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.run_state import RunState


def on_child(  # noqa: C901, PLR0912 - a table
    state: RunState, event: events.ChildEvent, at: Moment
) -> tuple[Command, ...]:
    instance_id = InstanceId(event.child_id)
    if instance_id not in state.pool:
        return ()  # it left the plan, and this was said before its end
    if state.pool[instance_id].state is MemberState.ASLEEP:
        return sleepers.on_child(event)
    match event:
        case events.ChildStarted():
            state.pool.on_started(instance_id, event.incarnation, now=at.now)
            return ()
        case events.ChildReady():
            return (commands.AskInstance(instance_id, event.incarnation),)
        case events.ChildSuspected():
            return _on_instance_suspected(state, instance_id, event, at)
        case events.ChildExited():
            is_planned = state.publication.is_replacing(instance_id, event.incarnation)
            error = "" if event.asked_for else event.reason
            state.pool.on_exited(instance_id, error, now=at.now, is_planned=is_planned)
            lost = state.publication.on_lost(instance_id, event.incarnation, at=at)
            return (commands.Unroute(instance_id), *lost)
        case events.ChildGaveUp():
            return _on_instance_given_up(state, instance_id, event, at)
        case (
            events.ChildWaiting()
            | events.ChildRestartScheduled()
            | events.ChildUnkillable()
            | events.LogSinkFailing()
            | events.LogSinkRecovered()
        ):
            return ()
        case _:
            assert_never(event)


def _on_instance_suspected(
    state: RunState, instance_id: InstanceId, event: events.ChildSuspected, at: Moment
) -> tuple[Command, ...]:
    """Route past it before it is ended, which takes as long as its grace when it hangs."""
    if event.incarnation != state.pool[instance_id].incarnation:
        return ()
    state.pool.on_suspected(instance_id, event.reason, now=at.now)
    lost = state.publication.on_lost(instance_id, event.incarnation, at=at)
    # Its supervision replaces it already, after its own pause.
    kept = [c for c in lost if not _is_replacement_of(c, instance_id)]
    return (commands.Unroute(instance_id), *kept)


def _on_instance_given_up(
    state: RunState, instance_id: InstanceId, event: events.ChildGaveUp, at: Moment
) -> tuple[Command, ...]:
    state.pool.on_gave_up(instance_id, event.reason, now=at.now)
    left = state.pool.num_possible_gpus
    if left >= state.policy.min_rollout_gpus:
        said: dict[str, object] = {
            "instance": instance_id,
            "why": event.reason,
            "cause": event.first_cause,
        }
        return (commands.Unroute(instance_id), commands.Say("instance_given_up", said, True))
    lines = "\n".join(event.last_lines[-20:])
    reason = (
        f"{instance_id} failed {event.num_failures} times and was given up "
        f"({event.reason}); {left} rollout GPUs are left, min_rollout_gpus is "
        f"{state.policy.min_rollout_gpus}. First cause: {event.first_cause}"
    )
    return (commands.EndRun(4, f"{reason}\n{lines}" if lines else reason),)


def on_engines(  # noqa: C901, PLR0912 - a table
    state: RunState,
    event: events.InstanceAnswered
    | events.InstanceDoubted
    | events.ReloadAnswered
    | events.ExportChecked,
    at: Moment,
) -> tuple[Command, ...]:
    if not isinstance(event, events.ExportChecked) and event.instance_id not in state.pool:
        return ()
    match event:
        case events.InstanceAnswered():
            return _on_instance_answered(state, event, at)
        case events.InstanceDoubted(instance_id):
            return _on_instance_doubted(state, instance_id)
        case events.ReloadAnswered(ack=ack) if ack is not None:
            return state.publication.on_ack(ack, asked=event.instance_id, nonce=event.nonce, at=at)
        case events.ReloadAnswered():
            return state.publication.on_undelivered(
                event.instance_id, event.nonce, event.error, at=at
            )
        case events.ExportChecked():
            if event.manifest_hash != state.publication.manifest_hash:
                return ()
            if event.error:
                reason = f"the trainer's weights v{event.version} are broken: {event.error}"
                return (commands.EndRun(4, reason),)
            state.publication.on_checked(event.receipt_of)
            state.book.on_reload_begun(at)
            return state.publication.reload(at=at)
        case _:
            assert_never(event)


def _on_instance_doubted(state: RunState, instance_id: InstanceId) -> tuple[Command, ...]:
    """Its answer brings it back into routing, or shows that it has to be replaced."""
    incarnation = state.pool[instance_id].incarnation
    if incarnation is None or instance_id not in state.pool.answering_ids:
        return ()
    return (commands.AskInstance(instance_id, incarnation),)


def _on_instance_answered(
    state: RunState, event: events.InstanceAnswered, at: Moment
) -> tuple[Command, ...]:
    member = state.pool[event.instance_id]
    if event.incarnation != member.incarnation or member.state is MemberState.ASLEEP:
        return ()
    if event.state.incarnation != event.incarnation:
        reason = f"another process ({event.state.incarnation}) answers in its place"
        state.pool.on_suspected(event.instance_id, reason, now=at.now)
        replaced = commands.ReplaceInstance(event.instance_id, reason)
        return (commands.Unroute(event.instance_id), replaced)
    state.pool.on_answering(event.instance_id, now=at.now)
    known = commands.KnowInstance(
        event.instance_id,
        event.incarnation,
        event.base_url,
        event.kv_capacity_tokens,
        is_planned=state.pool[event.instance_id].is_planned_restart,
    )
    committed, found = state.publication.committed, event.state
    has_committed = (
        committed is not None
        and found.policy_version == committed
        and (found.manifest_hash == state.publication.manifest_hash or not state.policy.publishes)
    )
    is_reloading = state.pool[event.instance_id].state is MemberState.RELOADING
    if committed is None or not has_committed or is_reloading:
        return (known,)  # a reload under way ends in a word of its own
    serves = state.pool.on_version_confirmed(
        event.instance_id, event.incarnation, committed, committed=committed, now=at.now
    )
    routed = (commands.RouteTo(event.instance_id, event.incarnation, committed),)
    return (known, *(routed if serves else ()))


def _is_replacement_of(command: Command, instance_id: InstanceId) -> bool:
    return isinstance(command, commands.ReplaceInstance) and command.instance_id == instance_id
