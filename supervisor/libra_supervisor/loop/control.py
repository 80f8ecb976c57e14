"""Event -> the machines it concerns -> commands. Pure; the loop is its only caller.

`Control` is the whole control state of a run. Nothing else may change the machines it holds.
"""

from typing import assert_never

import msgspec

from libra.errors import InfeasiblePlanError
from libra.ids import GroupId, InstanceId, PolicyVersion
from libra.pools.member import MemberState
from libra.pools.pool import RolloutPool
from libra.rollouts.evaluation import is_evaluated
from libra.wire.rank import (
    AcksJudged,
    CheckpointSaved,
    Heartbeat,
    Hello,
    ModelReady,
    RankEvent,
    RankFailed,
    RecomputeProbed,
    SaveBegun,
    StepTrained,
    WeightsExported,
    WeightsOffered,
    WeightsSent,
)
from libra_supervisor import events
from libra_supervisor.loop import commands, cycle
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.cycle import Cycle, Phase
from libra_supervisor.loop.evaluator import Evaluator
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.probe_gate import ProbeGate
from libra_supervisor.loop.publication import Publication
from libra_supervisor.loop.rollout_desk import RolloutDesk
from libra_supervisor.loop.step_book import StepBook

TRAINER = "trainer"
INTERRUPTED = 130


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What the control state needs of the configuration beyond its machines."""

    min_rollout_gpus: int
    publishes: bool
    """False: `rollout_weight_sync_mode: none`."""

    transfers: bool = False
    """Weights go through a process group: the trainer holds a version until it is committed."""

    num_probes: int = 0
    """Ranks that run a recompute probe before training; 0: none does."""


class Control:
    """Every machine of one run."""

    def __init__(
        self,
        *,
        cycle_machine: Cycle,
        pool: RolloutPool,
        desk: RolloutDesk,
        publication: Publication,
        evaluator: Evaluator,
        policy: Policy,
    ) -> None:
        self.cycle = cycle_machine
        self.pool = pool
        self.desk = desk
        self.publication = publication
        self.evaluator = evaluator
        self.book = StepBook()
        self.attempt = 0
        self.attempts_before = 0
        """Of earlier supervisors of the run: what is recorded counts through all of them."""

        self.ready_step: int | None = None
        """The step that the gang holds; None while it is not ready."""

        self._probe = ProbeGate(policy.num_probes)
        self.stop_exit_code = 0
        self.is_ending = False
        self._policy = policy

    def on_event(self, event: events.Event, at: Moment) -> tuple[Command, ...]:
        """What follows from `event`; nothing any more once the run is ending."""
        if self.is_ending:
            return ()
        done = (*self._dispatch(event, at), *self._proceed(at))
        self._note_groups(done, at)
        return self._until_end(done, at)

    # One method per family of events

    def _dispatch(self, event: events.Event, at: Moment) -> tuple[Command, ...]:
        match event:
            case events.RankSaid(attempt, said):
                return self._on_rank_said(said, at) if attempt == self.attempt else ()
            case (
                events.CheckpointChosen()
                | events.GangReady()
                | events.ProbeJudged()
                | events.GangLost()
                | events.GangGaveUp()
            ):
                return self._on_gang(event, at)
            case (
                events.InstanceAnswered()
                | events.InstanceDoubted()
                | events.ReloadAnswered()
                | events.ExportChecked()
            ):
                return self._on_engines(event, at)
            case (
                events.SampleStarted()
                | events.SampleProgressed()
                | events.SampleFinished()
                | events.SampleGaveUp()
            ):
                return self._on_sample(event, at)
            case events.ReconfigurationWanted() | events.ReconfigurationEnded():
                return self._on_plan(event)
            case (
                events.StopRequested()
                | events.DrainRequested()
                | events.RestartRequested()
                | events.ReloadRequested()
                | events.Ticked()
            ):
                return self._on_outside(event, at)
            case _ if event.child_id == TRAINER:
                # The gang reports its own life, rank by rank and attempt by attempt.
                return ()
            case _:
                return self._on_child(event, at)

    def _on_plan(
        self, event: events.ReconfigurationWanted | events.ReconfigurationEnded
    ) -> tuple[Command, ...]:
        if isinstance(event, events.ReconfigurationEnded):
            return ()
        why = "plans are not changed while the run goes on"
        refused = events.ReconfigurationEnded(event.decision_id, "refused", 0.0, {}, why)
        return (commands.ReportReconfiguration(refused),)

    def _on_child(self, event: events.ChildEvent, at: Moment) -> tuple[Command, ...]:
        instance_id = InstanceId(event.child_id)
        match event:
            case events.ChildStarted():
                self.pool.on_started(instance_id, event.incarnation, now=at.now)
                return ()
            case events.ChildReady():
                return (commands.AskInstance(instance_id, event.incarnation),)
            case events.ChildSuspected():
                return self._on_instance_suspected(instance_id, event, at)
            case events.ChildExited():
                is_planned = self.publication.is_replacing(instance_id, event.incarnation)
                error = "" if event.asked_for else event.reason
                self.pool.on_exited(instance_id, error, now=at.now, is_planned=is_planned)
                lost = self.publication.on_lost(instance_id, event.incarnation, at=at)
                return (commands.Unroute(instance_id), *lost)
            case events.ChildGaveUp():
                return self._on_instance_given_up(instance_id, event, at)
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
        self, instance_id: InstanceId, event: events.ChildSuspected, at: Moment
    ) -> tuple[Command, ...]:
        """Route past it before it is ended, which takes as long as its grace when it hangs."""
        if event.incarnation != self.pool[instance_id].incarnation:
            return ()
        self.pool.on_suspected(instance_id, event.reason, now=at.now)
        lost = self.publication.on_lost(instance_id, event.incarnation, at=at)
        # Its supervision replaces it already, after its own pause.
        kept = [c for c in lost if not _is_replacement_of(c, instance_id)]
        return (commands.Unroute(instance_id), *kept)

    def _on_instance_given_up(
        self, instance_id: InstanceId, event: events.ChildGaveUp, at: Moment
    ) -> tuple[Command, ...]:
        self.pool.on_gave_up(instance_id, event.reason, now=at.now)
        left = self.pool.num_possible_gpus
        if left >= self._policy.min_rollout_gpus:
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
            f"{self._policy.min_rollout_gpus}. First cause: {event.first_cause}"
        )
        return (commands.EndRun(4, f"{reason}\n{lines}" if lines else reason),)

    def _on_gang(
        self,
        event: events.CheckpointChosen
        | events.GangReady
        | events.ProbeJudged
        | events.GangLost
        | events.GangGaveUp,
        at: Moment,
    ) -> tuple[Command, ...]:
        match event:
            case events.CheckpointChosen():
                self.attempt = event.attempt
                self._probe.on_attempt(restored_step=event.step)
                self.desk.rewind(event.rollout_state, PolicyVersion(event.step))
                return ()
            case events.GangReady():
                if event.attempt == self.attempt:
                    self.ready_step = event.step
                return ()
            case events.ProbeJudged():
                return self._on_probe_judged(event)
            case events.GangLost():
                return self._on_gang_lost(event, at)
            case events.GangGaveUp():
                return (commands.EndRun(event.exit_code, event.reason),)
            case _:
                assert_never(event)

    def _on_gang_lost(self, event: events.GangLost, at: Moment) -> tuple[Command, ...]:
        self.ready_step = None
        self.desk.close()
        self.book.discard()
        unrouted = tuple(commands.Unroute(i) for i in self.pool.answering_ids)
        self.pool.on_rewound(now=at.now)
        self.evaluator.drop()
        cancelled_batch = self.publication.on_rewound(at=at)
        said = commands.Say("gang_lost", {"attempt": event.attempt, "why": event.reason}, True)
        cancelled = commands.CancelAllGroups(event.reason)
        begun_anew = self._follow(self.cycle.on_gang_lost(), at)
        return (said, cancelled, *unrouted, *cancelled_batch, *begun_anew)

    def _on_probe_judged(self, event: events.ProbeJudged) -> tuple[Command, ...]:
        if event.attempt != self.attempt:
            return ()
        said = commands.Say(
            "recompute_probe", {"what": event.message}, is_warning=event.verdict != "kept"
        )
        match event.verdict:
            case "kept":
                self._probe.on_kept()
                return (said,)
            case "replaced":
                return (said, commands.ChangePlan(event.message))
            case "impossible":
                return (commands.EndRun(InfeasiblePlanError.exit_code, event.message),)

    def _on_rank_said(  # noqa: C901, PLR0912 - a table
        self, said: RankEvent, at: Moment
    ) -> tuple[Command, ...]:
        match said:
            case WeightsExported(policy_version=version):
                self.book.on_exported(said.export_s)
                check = self.publication.on_exported(said)
                return (*check, *self._follow(self.cycle.on_exported(version, now=at.now), at))
            case WeightsOffered() | WeightsSent():
                return self._on_transfer(said, at)
            case StepTrained(metrics=metrics):
                if metrics is None:
                    return ()
                self.book.on_trained(metrics)
                return self._follow(self.cycle.on_trained(said.step, now=at.now), at)
            case AcksJudged():
                return self.publication.on_judged(said, at=at)
            case CheckpointSaved():
                fields: dict[str, object] = {"step": said.step, "save_s": round(said.save_s, 3)}
                saved = commands.Say("checkpoint_saved", fields)
                return (saved, *self._follow(self.cycle.on_saved(said.step, now=at.now), at))
            case RecomputeProbed():
                probes = self._probe.on_probed(said)
                return () if probes is None else (commands.JudgeProbe(self.attempt, probes),)
            case Hello() | ModelReady() | Heartbeat() | SaveBegun() | RankFailed():
                # The gang keeps these: identity, readiness, liveness and the first cause.
                return ()
            case _:
                assert_never(said)

    def _on_transfer(self, said: WeightsOffered | WeightsSent, at: Moment) -> tuple[Command, ...]:
        if isinstance(said, WeightsSent):
            self.book.on_exported(said.send_s)
            return self.publication.on_sent(said)
        self.book.on_reload_begun(at)
        return self.publication.on_offered(said, at=at)

    def _on_engines(
        self,
        event: events.InstanceAnswered
        | events.InstanceDoubted
        | events.ReloadAnswered
        | events.ExportChecked,
        at: Moment,
    ) -> tuple[Command, ...]:
        match event:
            case events.InstanceAnswered():
                return self._on_instance_answered(event, at)
            case events.InstanceDoubted(instance_id):
                return self._on_instance_doubted(instance_id)
            case events.ReloadAnswered(ack=ack) if ack is not None:
                return self.publication.on_ack(
                    ack, asked=event.instance_id, nonce=event.nonce, at=at
                )
            case events.ReloadAnswered():
                return self.publication.on_undelivered(
                    event.instance_id, event.nonce, event.error, at=at
                )
            case events.ExportChecked():
                if event.manifest_hash != self.publication.manifest_hash:
                    return ()
                if event.error:
                    reason = f"the trainer's weights v{event.version} are broken: {event.error}"
                    return (commands.EndRun(4, reason),)
                self.publication.on_checked(event.receipt)
                self.book.on_reload_begun(at)
                return self.publication.reload(at=at)
            case _:
                assert_never(event)

    def _on_instance_doubted(self, instance_id: InstanceId) -> tuple[Command, ...]:
        """Its answer brings it back into routing, or shows that it has to be replaced."""
        incarnation = self.pool[instance_id].incarnation
        if incarnation is None or instance_id not in self.pool.answering_ids:
            return ()
        return (commands.AskInstance(instance_id, incarnation),)

    def _on_instance_answered(
        self, event: events.InstanceAnswered, at: Moment
    ) -> tuple[Command, ...]:
        if event.incarnation != self.pool[event.instance_id].incarnation:
            return ()
        if event.state.incarnation != event.incarnation:
            reason = f"another process ({event.state.incarnation}) answers in its place"
            self.pool.on_suspected(event.instance_id, reason, now=at.now)
            replaced = commands.ReplaceInstance(event.instance_id, reason)
            return (commands.Unroute(event.instance_id), replaced)
        self.pool.on_answering(event.instance_id, now=at.now)
        known = commands.KnowInstance(
            event.instance_id,
            event.incarnation,
            event.base_url,
            event.kv_capacity_tokens,
            is_planned=self.pool[event.instance_id].is_planned_restart,
        )
        committed, state = self.publication.committed, event.state
        has_committed = (
            committed is not None
            and state.policy_version == committed
            and (
                state.manifest_hash == self.publication.manifest_hash or not self._policy.publishes
            )
        )
        is_reloading = self.pool[event.instance_id].state is MemberState.RELOADING
        if committed is None or not has_committed or is_reloading:
            return (known,)  # a reload under way ends in a word of its own
        serves = self.pool.on_version_confirmed(
            event.instance_id, event.incarnation, committed, committed=committed, now=at.now
        )
        routed = (commands.RouteTo(event.instance_id, event.incarnation, committed),)
        return (known, *(routed if serves else ()))

    def _on_sample(
        self,
        event: events.SampleStarted
        | events.SampleProgressed
        | events.SampleFinished
        | events.SampleGaveUp,
        at: Moment,
    ) -> tuple[Command, ...]:
        if is_evaluated(_group_of(event)):
            return self._on_evaluated_sample(event, at)
        match event:
            case events.SampleStarted(group_id, sample_index):
                self.book.rollouts.on_started((group_id, sample_index), now=at.now)
                self.desk.on_started(group_id, sample_index, now=at.now)
                return ()
            case events.SampleProgressed(group_id, sample_index):
                self.desk.on_progress(group_id, sample_index, now=at.now)
                return ()
            case events.SampleFinished(trajectory):
                self.book.rollouts.on_finished(trajectory, now=at.now)
                return self.desk.on_finished(trajectory)
            case events.SampleGaveUp(group_id, sample_index, failure):
                self.book.rollouts.on_ended((group_id, sample_index), now=at.now)
                return self.desk.on_failed(group_id, sample_index, failure)
            case _:
                assert_never(event)

    def _on_evaluated_sample(
        self,
        event: events.SampleStarted
        | events.SampleProgressed
        | events.SampleFinished
        | events.SampleGaveUp,
        at: Moment,
    ) -> tuple[Command, ...]:
        attempt = self.attempts_before + self.attempt
        match event:
            case events.SampleStarted() | events.SampleProgressed():
                return ()
            case events.SampleFinished(trajectory):
                return self.evaluator.on_finished(trajectory, attempt=attempt, at=at)
            case events.SampleGaveUp(group_id, _, failure):
                return self.evaluator.on_failed(group_id, failure, attempt=attempt, at=at)
            case _:
                assert_never(event)

    def _on_outside(
        self,
        event: events.StopRequested
        | events.DrainRequested
        | events.RestartRequested
        | events.ReloadRequested
        | events.Ticked,
        at: Moment,
    ) -> tuple[Command, ...]:
        match event:
            case events.StopRequested():
                return self._on_stop(event, at)
            case events.DrainRequested(instance_id, drain):
                return self._on_drain(instance_id, drain=drain, at=at)
            case events.RestartRequested(instance_id):
                reason = "the operator asked for it"
                self.pool.on_replace_requested(instance_id, now=at.now)
                return (
                    commands.Unroute(instance_id, is_draining=True),
                    *self.publication.on_leaving(instance_id, at=at),
                    commands.ReplaceInstance(instance_id, reason),
                )
            case events.ReloadRequested():
                return self.publication.refresh(at, held=self.cycle.held_version)
            case events.Ticked():
                return (
                    *self.desk.on_tick(now=at.now),
                    *self.publication.on_tick(at=at),
                    *self._follow(self.cycle.on_tick(now=at.now), at),
                )
            case _:
                assert_never(event)

    def _on_stop(self, event: events.StopRequested, at: Moment) -> tuple[Command, ...]:
        if event.now:
            return (commands.EndRun(INTERRUPTED, f"{event.reason}: stopped at once"),)
        self.stop_exit_code = event.exit_code
        self.desk.close()
        said = commands.Say(
            "stop_requested", {"why": event.reason, "phase": self.cycle.phase.value}
        )
        return (said, *self._follow(self.cycle.on_stop_requested(event.reason, now=at.now), at))

    def _on_drain(self, instance_id: InstanceId, *, drain: bool, at: Moment) -> tuple[Command, ...]:
        if drain:
            self.pool.on_drain_requested(instance_id, now=at.now)
            return (commands.Unroute(instance_id, is_draining=True),)
        self.pool.on_undrain_requested(instance_id, now=at.now)
        member = self.pool[instance_id]
        if member.state is not MemberState.SERVING or member.incarnation is None:
            return ()
        version = member.version
        return (
            () if version is None else (commands.RouteTo(instance_id, member.incarnation, version),)
        )

    # What becomes possible, whatever the event was

    def _proceed(self, at: Moment) -> tuple[Command, ...]:
        return (
            *self._begin_when_ready(at),
            *self.publication.retry(at),
            *self._finish_publication(at),
            *self._finish_evaluation(at),
            *self.publication.catch_up(at=at, held=self.cycle.held_version),
            *self._take_batch(at),
            *self._publish_when_nobody_serves(at),
            *self._admit(at),
        )

    def _begin_when_ready(self, at: Moment) -> tuple[Command, ...]:
        if self.cycle.phase is not Phase.STARTING or self.ready_step is None:
            return ()
        if not self._probe.is_open:
            return ()
        num_gpus = sum(self.pool[i].num_gpus for i in self.pool.answering_ids)
        if not self.pool.is_settled or num_gpus < self._policy.min_rollout_gpus:
            return ()
        if not self._policy.publishes:
            self.publication.keep_base(PolicyVersion(0))
        begun = self.cycle.on_parts_ready(restored_step=self.ready_step, now=at.now)
        return self._follow(begun, at)

    def _finish_publication(self, at: Moment) -> tuple[Command, ...]:
        version = self.publication.just_committed
        if version is None:
            return ()
        self.publication.just_committed = None
        self.book.on_reloaded(at, is_held=self._policy.transfers)
        freed: tuple[Command, ...] = ()
        if self._policy.transfers:
            freed = self._follow(self.cycle.on_exported(version, now=at.now), at)
        return (*freed, *self._follow(self.cycle.on_settled(version, now=at.now), at))

    def _publish_when_nobody_serves(self, at: Moment) -> tuple[Command, ...]:
        """Late engines need a version that is served, and nobody is left to serve it."""
        if not self._policy.transfers or not self.publication.is_idle:
            return ()
        states = (MemberState.SERVING, MemberState.RELOADING, MemberState.DRAINING)
        num_gpus = self.pool.num_gpus_in(MemberState.STALE)
        if self.pool.ids_in(*states) or num_gpus < self._policy.min_rollout_gpus:
            return ()
        return self._follow(self.cycle.on_nobody_serves(), at)

    def _finish_evaluation(self, at: Moment) -> tuple[Command, ...]:
        version = self.evaluator.just_done
        if version is None:
            return ()
        self.evaluator.just_done = None
        return self._follow(self.cycle.on_evaluated(version, now=at.now), at)

    def _take_batch(self, at: Moment) -> tuple[Command, ...]:
        if self.cycle.phase is not Phase.COLLECTING:
            return ()
        trainer_version = PolicyVersion(self.cycle.step)
        groups = self.desk.take_batch(trainer_version)
        if groups is None:
            if not self.desk.is_exhausted:
                return ()
            return self._follow(self.cycle.on_data_exhausted(now=at.now), at)
        step = self.cycle.step + 1
        self.book.on_batch_taken(step, groups, trainer_version, at)
        return (
            commands.SendBatch(self.attempt, step, groups),
            *self._follow(self.cycle.on_batch_taken(step), at),
        )

    def _admit(self, at: Moment) -> tuple[Command, ...]:
        committed = self.publication.committed
        if committed is None or self.cycle.phase is Phase.STOPPED:
            return ()
        if self.cycle.end_reason(now=at.now) is None:
            return self.desk.admit(committed)
        return ()

    def _follow(self, ordered: tuple[cycle.Command, ...], at: Moment) -> tuple[Command, ...]:
        """Turn what the cycle wants next into commands."""
        done: list[Command] = []
        self.book.on_phase(is_settling=self.cycle.phase is Phase.SETTLING, at=at)
        for command in ordered:
            match command:
                case cycle.Publish(version):
                    done += self.publication.begin(version, attempt=self.attempt)
                case cycle.Collect():
                    done += self._close_step(at)
                    self.book.on_collect(at)
                    self.desk.open()
                case cycle.Save(step):
                    done += self._close_step(at)
                    done.append(commands.SaveRun(self.attempt, step, self.desk.state()))
                case cycle.Evaluate() | cycle.DropEvaluation():
                    done += self._evaluate(command, at)
                case cycle.Finish(reason):
                    done += self._close_step(at)
                    done.append(commands.EndRun(self.stop_exit_code, reason))
                case _:
                    assert_never(command)
        return tuple(done)

    def _evaluate(
        self, command: cycle.Evaluate | cycle.DropEvaluation, at: Moment
    ) -> tuple[Command, ...]:
        if isinstance(command, cycle.Evaluate):
            return self.evaluator.begin(command.version, at)
        return self.evaluator.drop()

    def _close_step(self, at: Moment) -> tuple[Command, ...]:
        return self.book.close(
            attempt=self.attempts_before + self.attempt,
            num_dropped=self.desk.dropped_by_reason,
            at=at,
        )

    def _note_groups(self, done: tuple[Command, ...], at: Moment) -> None:
        for command in done:
            if isinstance(command, commands.StartGroup):
                self.book.rollouts.on_opened(command.group.group_id, command.group.n_samples)
            elif isinstance(command, commands.CancelGroup):
                self.book.rollouts.on_cancelled(command.group_id, now=at.now)

    def _until_end(self, done: tuple[Command, ...], at: Moment) -> tuple[Command, ...]:
        for index, command in enumerate(done):
            if isinstance(command, commands.EndRun | commands.ChangePlan):
                self.is_ending = True
                return (*done[:index], *self.publication.on_run_ended(at=at), command)
        return done


def _group_of(
    event: events.SampleStarted
    | events.SampleProgressed
    | events.SampleFinished
    | events.SampleGaveUp,
) -> GroupId:
    if isinstance(event, events.SampleFinished):
        return event.trajectory.group_id
    return event.group_id


def _is_replacement_of(command: Command, instance_id: InstanceId) -> bool:
    return isinstance(command, commands.ReplaceInstance) and command.instance_id == instance_id
