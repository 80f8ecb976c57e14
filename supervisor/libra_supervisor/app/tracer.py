"""The control plane's phase trace: what the loop's events and records say about time."""

import msgspec

from libra import clock
from libra.ids import ChildId, GroupId
from libra.tracing.lanes import Lanes
from libra.tracing.span import Phase, SpanWriter
from libra.wire.rank import StepTrained
from libra_supervisor.events import (
    ChildExited,
    ChildReady,
    Event,
    GangLost,
    RankSaid,
    ReloadAnswered,
    SampleFinished,
    SampleGaveUp,
    SampleStarted,
)
from libra_supervisor.loop.commands import (
    CancelAllGroups,
    CancelGroup,
    Command,
    SendBatch,
    StartGroup,
    WriteReconfiguration,
    WriteReload,
    WriteStep,
)
from libra_supervisor.records.reconfiguration import ReconfigurationRecord


class Running(msgspec.Struct, frozen=True):
    """A sample on its way."""

    began_at: float
    lane: int


class Training(msgspec.Struct, frozen=True):
    """A batch on its way through the ranks."""

    began_at: float
    step: int
    groups: tuple[GroupId, ...]


class OpenGroup(msgspec.Struct):
    """Samples of a group that have not ended; those that have begun run on lanes."""

    num_left: int
    running: dict[int, Running] = {}


class Tracer:
    """Follows events and commands, and records the spans that they end."""

    def __init__(self, spans: SpanWriter) -> None:
        self._spans = spans
        self._lanes = Lanes("rollouts")
        self._open: dict[GroupId, OpenGroup] = {}
        """What is heard of other groups is late."""

        self._training: Training | None = None
        self._exited_at: dict[ChildId, float] = {}

    def on_event(self, event: Event) -> None:
        now = clock.monotonic()
        match event:
            case ChildExited():
                self._exited_at[event.child_id] = now
            case ChildReady():
                self._on_child_ready(event, now)
            case ReloadAnswered(ack=ack) if ack is not None:
                self._spans.record(
                    Phase.RELOAD_INSTANCE,
                    now - ack.total_s,
                    now,
                    track=ack.instance_id,
                    version=ack.policy_version,
                    method=ack.method,
                    model_load_s=ack.model_load_s,
                )
            case SampleStarted() | SampleFinished() | SampleGaveUp():
                self._on_sample(event, now)
            case RankSaid(event=StepTrained(metrics=metrics)) if metrics is not None:
                self._end_training("trained", now)
            case GangLost():
                self._end_training("lost", now)
            case _:
                return

    def on_command(self, command: Command) -> None:
        now = clock.monotonic()
        match command:
            case StartGroup(group):
                self._open[group.group_id] = OpenGroup(group.n_samples)
            case CancelGroup(group_id):
                self._end_group(group_id, now)
            case CancelAllGroups():
                for group_id in tuple(self._open):
                    self._end_group(group_id, now)
            case SendBatch(_, step, groups):
                self._training = Training(now, step, tuple(group.group_id for group in groups))
            case WriteStep() | WriteReload() | WriteReconfiguration():
                self._on_record(command, now)
            case _:
                return

    def close(self) -> None:
        """Record what is still going on, so that no span is left open."""
        now = clock.monotonic()
        for group_id in tuple(self._open):
            self._end_group(group_id, now)
        self._end_training("cancelled", now)
        self._spans.close()

    def _on_record(
        self, command: WriteStep | WriteReload | WriteReconfiguration, now: float
    ) -> None:
        match command:
            case WriteStep(record):
                began_at = now - record.step_s
                self._spans.record(
                    Phase.ROLLOUT_WAIT,
                    began_at,
                    began_at + record.rollout_wait_s,
                    track="rollout wait",
                    step=record.step,
                )
            case WriteReload(record):
                self._spans.record(
                    Phase.WEIGHT_SYNC,
                    now - record.total_s,
                    now,
                    track="weights",
                    version=record.policy_version,
                )
            case WriteReconfiguration(ReconfigurationRecord() as record):
                self._spans.record(
                    Phase.RECONFIGURATION,
                    now - record.total_s,
                    now,
                    track="plan",
                    decision=record.decision_id,
                    outcome=record.outcome,
                    stalled_s=record.stalled_s,
                    **record.phases,
                )
            case WriteReconfiguration():
                return  # a decision takes no time of the run

    def _on_sample(self, event: SampleStarted | SampleFinished | SampleGaveUp, now: float) -> None:
        match event:
            case SampleStarted(group_id, sample_index):
                if (group := self._open.get(group_id)) is not None:
                    group.running[sample_index] = Running(now, self._lanes.take())
            case SampleFinished(trajectory):
                self._end_sample(trajectory.group_id, trajectory.sample_index, "finished", now)
            case SampleGaveUp(group_id, sample_index, failure):
                self._end_sample(group_id, sample_index, failure.kind, now)

    def _on_child_ready(self, event: ChildReady, now: float) -> None:
        child = event.child_id
        exited_at = self._exited_at.pop(child, None)
        if exited_at is not None:
            self._spans.record(Phase.RESTART_CHILD, exited_at, now, track=child, child=child)
        self._spans.record(Phase.START_CHILD, now - event.start_s, now, track=child, child=child)

    def _end_training(self, outcome: str, now: float) -> None:
        training, self._training = self._training, None
        if training is not None:
            self._spans.record(
                Phase.TRAIN_STEP,
                training.began_at,
                now,
                track="training",
                step=training.step,
                groups=training.groups,
                outcome=outcome,
            )

    def _end_group(self, group_id: GroupId, now: float) -> None:
        if (group := self._open.get(group_id)) is not None:
            for sample_index in tuple(group.running):
                self._end_sample(group_id, sample_index, "cancelled", now)
            self._open.pop(group_id, None)

    def _end_sample(self, group_id: GroupId, sample_index: int, outcome: str, now: float) -> None:
        group = self._open.get(group_id)
        if group is None:
            return
        group.num_left -= 1
        if group.num_left == 0:
            del self._open[group_id]
        running = group.running.pop(sample_index, None)
        if running is None:
            return
        self._lanes.give_back(running.lane)
        self._spans.record(
            Phase.ROLLOUT,
            running.began_at,
            now,
            track=self._lanes.track(running.lane),
            group=group_id,
            sample=sample_index,
            outcome=outcome,
        )
