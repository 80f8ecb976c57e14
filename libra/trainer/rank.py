"""One rank's life after it has said Hello: build, report, then do as it is told."""

from pathlib import Path
from threading import Thread
from typing import TypeAlias, assert_never

from libra import clock
from libra.config.run import RunConfig
from libra.errors import InvariantError, SiteError
from libra.storage.writer_claim import claim
from libra.tracing.span import Phase, SpanWriter
from libra.trainer.assembly import Trainer, assemble
from libra.trainer.background import BackgroundWork
from libra.trainer.checkpoint import restore_checkpoint, stage_checkpoint
from libra.trainer.dry_run import probe_recompute
from libra.trainer.identity import RankIdentity
from libra.trainer.link import Link, MainCommand
from libra.trainer.probe import judge, stored_probe
from libra.trainer.publish import export_weights
from libra.trainer.transfer import Transfers
from libra.trainer.world import choose_device, join_world
from libra.wire.hybrid import CoreJoined, FollowStep, JoinCore, OpenLanes, StepFollowed
from libra.wire.rank import (
    AcksJudged,
    ExportWeights,
    Heartbeat,
    JudgeAcks,
    ModelReady,
    OfferWeights,
    RankEvent,
    SaveBegun,
    SaveCheckpoint,
    SendWeights,
    Shutdown,
    StepTrained,
    TakeDevice,
    TrainStep,
)

WorkCommand: TypeAlias = (
    TrainStep
    | ExportWeights
    | OfferWeights
    | SendWeights
    | OpenLanes
    | JoinCore
    | FollowStep
    | TakeDevice
)

HEARTBEAT_EVERY_S = 0.25
"""Shortest time between two heartbeats of one phase: micro-batches may take a millisecond."""


def run_rank(  # noqa: PLR0913 - what a rank is started with
    config: RunConfig,
    identity: RankIdentity,
    link: Link,
    spans: SpanWriter,
    *,
    checkpoints: Path,
    restore: Path | None,
    is_replica: bool = False,
    probes: bool = False,
) -> None:
    """Build the trainer and serve commands until Shutdown; `probes`: after a recompute probe.

    `checkpoints` is where this attempt alone writes from now on. Raises SiteError when it cannot.
    """
    pulse = Pulse(link, identity.at.rank)
    began_at = clock.monotonic()
    with spans.span(Phase.BUILD_MODEL):
        trainer = _built(config, identity, pulse, checkpoints, is_replica=is_replica)
    if restore is not None:
        pulse.beat(0, "restore")
        with spans.span(Phase.RESTORE, directory=str(restore)):
            restore_checkpoint(trainer, restore)
    if probes:
        pulse.beat(0, "dry run")
        with spans.span(Phase.RECOMPUTE_PROBE):
            probed = probe_recompute(trainer)
        link.send(probed)
        if probed.error:
            _await_end(link)
            return
    link.send(_ready(trainer, identity, build_s=clock.monotonic() - began_at))
    _prepare(trainer, spans, is_replica=is_replica)
    behind = BackgroundWork(on_error=link.interrupt)
    transfers = Transfers(trainer, abort_reason=link.abort_reason, host=identity.host)
    judging = (config, identity, link, transfers, spans)
    Thread(target=_judge_acks, args=judging, daemon=True).start()
    while not isinstance(command := _next(link, spans), Shutdown):
        if isinstance(command, SaveCheckpoint):
            _begin_save(trainer, command, link, spans, behind, writer=identity.writer)
        elif (event := _answer(trainer, transfers, command, spans)) is not None:
            link.send(event)
    transfers.close()
    behind.wait()


def _prepare(trainer: Trainer, spans: SpanWriter, *, is_replica: bool) -> None:
    """Do what would hold up others later, while nobody waits for this rank."""
    if is_replica:
        # While the core writes what it is to join from.
        with spans.span(Phase.REHEARSE):
            trainer.learner.rehearse()
    elif _will_save(trainer.config):
        trainer.backend.prepare_to_stage()


def _ready(trainer: Trainer, identity: RankIdentity, *, build_s: float) -> ModelReady:
    ready = ModelReady(
        rank=identity.at.rank,
        step=trainer.learner.progress.step,
        num_parameters=trainer.backend.num_parameters,
        build_s=build_s,
    )
    print(  # noqa: T201 - the rank's log is what it prints
        f"ready at step {ready.step}: {ready.num_parameters} parameters, {build_s:.1f} s to build",
        flush=True,
    )
    return ready


def _will_save(config: RunConfig) -> bool:
    """Whether states are taken while the run goes on; at its end they may take their time."""
    planner = config.global_resource_planner
    return bool(config.control.save_interval) or planner.runtime_dynamic_reconfiguration_enabled


def _built(
    config: RunConfig,
    identity: RankIdentity,
    pulse: "Pulse",
    checkpoints: Path,
    *,
    is_replica: bool,
) -> Trainer:
    pulse.beat(0, "join")
    device = choose_device(config.control.device, local_rank=identity.at.local_rank)
    world = join_world(
        identity.sizes,
        identity.at,
        device,
        timeout_s=config.supervision.rank_heartbeat_timeout_s,
        has_megatron=config.training.train_backend == "megatron_core",
    )
    if identity.at.rank == 0 and not is_replica:
        # All have come together: no attempt that is left over gets here.
        _claim(checkpoints, identity.writer)
    return assemble(config, world, beat=pulse.beat, is_replica=is_replica)


def _claim(checkpoints: Path, writer: str) -> None:
    try:
        claim(checkpoints, writer)
    except OSError as error:
        raise SiteError(f"{checkpoints} cannot be written: {error}") from error


def _await_end(link: Link) -> None:
    """Do nothing more: what was built does not fit."""
    while not isinstance(link.receive(), Shutdown):
        pass


def _next(link: Link, spans: SpanWriter) -> MainCommand:
    with spans.span(Phase.COLLECT_BATCH):
        return link.receive()


class Pulse:
    """Heartbeats from the main thread: one per change of phase, and a bounded rate within one."""

    def __init__(self, link: Link, rank: int) -> None:
        self._link = link
        self._rank = rank
        self._last: tuple[int, str] = (-1, "")
        self._sent_at = 0.0

    def beat(self, step: int, phase: str) -> None:
        now = clock.monotonic()
        if (step, phase) == self._last and now - self._sent_at < HEARTBEAT_EVERY_S:
            return
        self._last, self._sent_at = (step, phase), now
        self._link.send(Heartbeat(rank=self._rank, step=step, phase=phase))


def _begin_save(
    trainer: Trainer,
    command: SaveCheckpoint,
    link: Link,
    spans: SpanWriter,
    behind: BackgroundWork,
    *,
    writer: str,
) -> None:
    """Take the state, say so, and leave the writing to a thread, which says when it is done."""
    # Before the state is taken: one that is written and one that waits are in memory at most.
    behind.make_room()
    with spans.span(Phase.SAVE_CHECKPOINT, step=command.step):
        staged = stage_checkpoint(trainer, command, writer=writer)
    link.send(SaveBegun(rank=trainer.world.at.rank, step=command.step))

    def write() -> None:
        with spans.span(Phase.WRITE_CHECKPOINT, track="checkpoint", step=command.step):
            saved = staged.write()
        if saved is not None:
            link.send(saved)

    behind.start(write, name="checkpoint")


def _judge_acks(
    config: RunConfig,
    identity: RankIdentity,
    link: Link,
    transfers: Transfers,
    spans: SpanWriter,
) -> None:
    """Judge beside the main thread: engines that wait for a commit must not wait for a step."""
    try:
        while (command := link.receive_acks()) is not None:
            version = command.request.policy_version
            with spans.span(Phase.JUDGE_ACKS, track="acks", version=version):
                verdict = _verdict(command, config, identity, transfers)
            link.send(verdict)
    except Exception as error:  # noqa: BLE001 - the top of the thread; the main one raises it
        link.interrupt(error)


def _verdict(
    command: JudgeAcks, config: RunConfig, identity: RankIdentity, transfers: Transfers
) -> AcksJudged:
    if identity.at.rank:
        raise InvariantError(f"rank {identity.at.rank} was asked to judge ACKs; only rank 0 does")
    request = command.request
    if request.transfer is None:
        return judge(command, stored_probe(Path(request.weights_directory)), config)
    sent = transfers.sent(request.nonce)
    return judge(command, sent.probe, config, checksum=sent.checksum)


def _answer(  # noqa: C901, PLR0912 - a table
    trainer: Trainer, transfers: Transfers, command: WorkCommand, spans: SpanWriter
) -> RankEvent | None:
    """Obey one command; returns what to tell the supervisor, if anything."""
    rank = trainer.world.at.rank
    match command:
        case TrainStep(step=step):
            began_at = clock.monotonic()
            metrics = trainer.learner.train(command)
            updating_at = began_at + metrics.recompute_s
            spans.record(Phase.RECOMPUTE_LOGPROBS, began_at, updating_at, step=step)
            spans.record(Phase.GRPO_UPDATE, updating_at, clock.monotonic(), step=step)
            if rank:
                return StepTrained(rank=rank, step=step, metrics=None)
            dropped = trainer.learner.exchange.dropped
            return StepTrained(rank=rank, step=step, metrics=metrics, dropped=dropped)
        case ExportWeights(policy_version=version):
            with spans.span(Phase.WEIGHT_EXPORT, version=version):
                return export_weights(trainer, command)
        case OfferWeights():
            return transfers.offer(command)
        case SendWeights(policy_version=version):
            with spans.span(Phase.WEIGHT_EXPORT, version=version):
                return transfers.send(command)
        case OpenLanes():
            return trainer.learner.exchange.open(command)
        case JoinCore() | FollowStep():
            return _obey_as_replica(trainer, command, spans)
        case TakeDevice():
            raise InvariantError(f"rank {rank} has its device already")
        case _:
            assert_never(command)


def _obey_as_replica(
    trainer: Trainer, command: JoinCore | FollowStep, spans: SpanWriter
) -> RankEvent:
    from libra.trainer.hybrid_member import MemberLearner  # noqa: PLC0415 - Megatron's

    rank, learner = trainer.world.at.rank, trainer.learner
    if not isinstance(learner, MemberLearner):
        raise InvariantError(f"the core was told what only a replica is: {type(command).__name__}")
    if isinstance(command, FollowStep):
        with spans.span(Phase.GRPO_UPDATE, step=command.step, follows=True):
            learner.follow(command)
        return StepFollowed(rank=rank, step=command.step)
    began_at = clock.monotonic()
    learner.beat("join the core")
    with spans.span(Phase.RESTORE, directory=command.snapshot):
        restore_checkpoint(trainer, Path(command.snapshot))
    restore_s = clock.monotonic() - began_at
    step = learner.progress.step
    return CoreJoined(rank=rank, step=step, restore_s=restore_s, connect_s=learner.join(command))
