"""What happens to the trainer: attempts that begin and end, and what ranks say. Pure."""

from typing import assert_never

from libra.errors import InfeasiblePlanError
from libra.ids import PolicyVersion
from libra.wire.hybrid import CoreJoined, LaneOpened, StepFollowed
from libra.wire.rank import (
    AcksJudged,
    CheckpointSaved,
    Heartbeat,
    Hello,
    ModelReady,
    RankEvent,
    RankFailed,
    RankWarm,
    RecomputeProbed,
    SaveBegun,
    StepTrained,
    WeightsExported,
    WeightsOffered,
    WeightsSent,
)
from libra_supervisor import events
from libra_supervisor.loop import commands, hybrid_life, plan_life
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.run_state import RunState


def on_gang(
    state: RunState,
    event: events.CheckpointChosen
    | events.GangReady
    | events.ProbeJudged
    | events.GangLost
    | events.GangGaveUp,
    at: Moment,
) -> tuple[Command, ...]:
    match event:
        case events.CheckpointChosen():
            state.attempt = event.attempt
            replicas_end = hybrid_life.on_core_begins(state, event.attempt, at)
            if state.cycle.phase is Phase.RESHAPING and event.step == state.cycle.step:
                # The same policy in other ranks: what rollouts have made so far is as good.
                state.publication.on_reshaped(attempt=event.attempt)
                return replicas_end
            state.probe.on_attempt(restored_step=event.step)
            state.desk.rewind(event.rollout_state, PolicyVersion(event.step))
            return replicas_end
        case events.GangReady():
            return _on_gang_ready(state, event, at)
        case events.ProbeJudged():
            return _on_probe_judged(state, event)
        case events.GangLost():
            return _on_gang_lost(state, event, at)
        case events.GangGaveUp():
            return (commands.EndRun(event.exit_code, event.reason),)
        case _:
            assert_never(event)


def _on_gang_ready(state: RunState, event: events.GangReady, at: Moment) -> tuple[Command, ...]:
    if event.attempt != state.attempt:
        return ()
    state.ready_step = event.step
    hybrid_life.on_core_ready(state)
    resumed: tuple[Command, ...] = ()
    if state.cycle.phase is Phase.RESHAPING:
        resumed = state.follow(state.cycle.on_reshaped(now=at.now), at)
    return (*resumed, *plan_life.on_training_ready(state, at))


def _on_gang_lost(state: RunState, event: events.GangLost, at: Moment) -> tuple[Command, ...]:
    state.ready_step = None
    state.desk.close()
    state.book.discard()
    state.collection.end()
    unrouted = tuple(commands.Unroute(i) for i in state.pool.answering_ids)
    state.pool.on_rewound(now=at.now)
    state.evaluator.drop()
    cancelled_batch = state.publication.on_rewound(at=at)
    said = commands.Say("gang_lost", {"attempt": event.attempt, "why": event.reason}, True)
    cancelled = commands.CancelAllGroups(event.reason)
    begun_anew = state.follow(state.cycle.on_gang_lost(), at)
    changed = plan_life.on_training_failed(state, event.reason, at)
    replicas_end = hybrid_life.on_core_lost(state, at)
    return (said, cancelled, *unrouted, *cancelled_batch, *begun_anew, *changed, *replicas_end)


def _on_probe_judged(state: RunState, event: events.ProbeJudged) -> tuple[Command, ...]:
    if event.attempt != state.attempt:
        return ()
    said = commands.Say(
        "recompute_probe", {"what": event.message}, is_warning=event.verdict != "kept"
    )
    match event.verdict:
        case "kept":
            if state.nodes is not None and state.probe.forced is not None:
                state.nodes.note_fit(state.probe.forced)
            state.probe.on_kept()
            return (said,)
        case "refused":
            # What follows is said by `node_life`: another layout, or the node is waited for.
            if state.nodes is not None and state.probe.forced is not None:
                state.nodes.refuse(state.probe.forced.layout)
            return (said,)
        case "replaced":
            return (said, commands.ChangePlan(event.message))
        case "impossible":
            return (commands.EndRun(InfeasiblePlanError.exit_code, event.message),)


def on_rank_said(  # noqa: C901, PLR0911, PLR0912 - a table
    state: RunState, said: RankEvent, at: Moment
) -> tuple[Command, ...]:
    match said:
        case WeightsExported(policy_version=version):
            state.book.on_exported(said.export_s)
            check = state.publication.on_exported(said)
            return (*check, *state.follow(state.cycle.on_exported(version, now=at.now), at))
        case WeightsOffered() | WeightsSent():
            return _on_transfer(state, said, at)
        case StepTrained(metrics=metrics):
            if metrics is None:
                return ()
            state.book.on_trained(metrics)
            replicas = hybrid_life.on_trained(state, said, at)
            return (*replicas, *state.follow(state.cycle.on_trained(said.step, now=at.now), at))
        case AcksJudged():
            return state.publication.on_judged(said, at=at)
        case CheckpointSaved():
            if (joining := hybrid_life.on_saved(state, said, at)) is not None:
                return joining
            fields: dict[str, object] = {"step": said.step, "save_s": round(said.save_s, 3)}
            saved = commands.Say("checkpoint_saved", fields)
            return (saved, *state.follow(state.cycle.on_saved(said.step, now=at.now), at))
        case RecomputeProbed():
            probes = state.probe.on_probed(said)
            if probes is None:
                return ()
            return (commands.JudgeProbe(state.attempt, probes, state.probe.forced),)
        case LaneOpened() | CoreJoined() | StepFollowed():
            return hybrid_life.on_core_said(state, said, at)
        case Hello() | RankWarm() | ModelReady() | Heartbeat() | SaveBegun() | RankFailed():
            # The gang keeps these: identity, readiness, liveness and the first cause.
            return ()
        case _:
            assert_never(said)


def _on_transfer(
    state: RunState, said: WeightsOffered | WeightsSent, at: Moment
) -> tuple[Command, ...]:
    if isinstance(said, WeightsSent):
        state.book.on_exported(said.send_s)
        return state.publication.on_sent(said)
    state.book.on_reload_begun(at)
    return state.publication.on_offered(said, at=at)
