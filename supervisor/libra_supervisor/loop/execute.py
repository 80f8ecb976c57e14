"""Command -> effect. What takes time runs in a task or a thread and comes back as an event.

An error in an effect is not swallowed: it leaves its task, ends the root task group and with it
the run, unless the effect's own answer can say it (a reload that was not delivered).
"""

import shutil
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, assert_never

import anyio
import anyio.to_thread
import msgspec
import structlog
from anyio.abc import TaskGroup

from libra import clock
from libra.algorithms.advantage import advantages
from libra.config.algorithm import AlgorithmConfig
from libra.errors import DataError, LibraError, PeerError, SiteError
from libra.ids import NodeRank, PolicyVersion, ReplicaId, RunId
from libra.planner.plan import Plan
from libra.pools.hybrid import BegunStep
from libra.rollouts.batch import BatchShape, shard
from libra.rollouts.group import CompleteGroup
from libra.storage.arrival import when_visible
from libra.storage.atomic import PARTIAL_SUFFIX, discard_directory
from libra.storage.checkpoints import list_complete_checkpoints
from libra.storage.manifests import verify_announced
from libra.storage.receipt import SETTLE_S
from libra.weights.retention import deletable_versions
from libra.wire.hybrid import HybridStep, MemberShare
from libra.wire.instance import WeightsReceipt
from libra.wire.rank import ExportWeights, MiniBatch, SaveCheckpoint, TrainStep
from libra_supervisor.events import (
    Event,
    ExportChecked,
    InstanceAnswered,
    ProbeJudged,
    ReloadAnswered,
)
from libra_supervisor.loop import commands
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.plan_memory import PlanMemory
from libra_supervisor.loop.rollout_state import encoded
from libra_supervisor.ports import (
    Engines,
    Ranks,
    Readers,
    Replicas,
    Rollouts,
    Routing,
    Shards,
    Trainers,
)
from libra_supervisor.records.step import StepRecord
from libra_supervisor.records.writer import RecordsWriter
from libra_supervisor.run_directory import RunDirectory

_log = structlog.get_logger()

Judge: TypeAlias = Callable[[commands.WriteStep], Callable[[], StepRecord]]
"""Called on the loop; what it returns is called in a thread and completes the step's record."""

JudgeProbe: TypeAlias = Callable[[commands.JudgeProbe], ProbeJudged]
"""Called in a thread."""


class Plans(Protocol):
    """Where the plan in force is written down."""

    def write(self, plan: Plan) -> None:
        """Have plan.json and the resolved configuration say it. Called in a thread."""

    def remember(self, memory: PlanMemory) -> None:
        """Keep it for a later supervisor, without waiting for the disk."""


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """The world."""

    ranks: Ranks
    replicas: Replicas
    trainer: Trainers
    plans: Plans
    engines: Engines
    readers: Readers | None = None
    """On other nodes; None where there are none."""

    rollouts: Rollouts
    evaluations: Rollouts
    """The same for the evaluation's data."""

    routing: Routing
    records: RecordsWriter
    judge: Judge
    judge_probe: JudgeProbe


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What effects need of the configuration."""

    run_id: RunId
    directory: RunDirectory
    algorithm: AlgorithmConfig
    shape: BatchShape
    """Of the plan that the run starts with."""

    keep_last: int
    probe_token_ids: tuple[int, ...]


class Executor:
    """Carries out commands; `tasks` owns whatever takes time."""

    def __init__(
        self,
        terms: Terms,
        ports: Ports,
        *,
        tasks: TaskGroup,
        post: Callable[[Event], Awaitable[None]],
        end: Callable[[int, str], None],
    ) -> None:
        self._terms = terms
        self._shape = terms.shape
        self._ports = ports
        self._tasks = tasks
        self._post = post
        self._end = end
        # One at a time and in order: records are lines, and versions are deleted after use.
        self._files = anyio.CapacityLimiter(1)
        self._num_unwritten = 0
        self._all_written = anyio.Event()
        self._untold_saves: list[anyio.Event] = []
        """Saves that the ranks have not been told of; later batches wait for them."""

    def execute(self, command: Command) -> None:  # noqa: C901, PLR0912, PLR0915 - a table
        """Begin the effect; never waits."""
        ports = self._ports
        match command:
            case commands.PrepareExport(attempt, version):
                self._start(self._prepare_export, attempt, version)
            case commands.CheckExport():
                self._start(self._check_export, command)
            case commands.TellRanks(attempt, message):
                ports.ranks.tell_all(attempt, message)
            case commands.TellRankZero(attempt, message):
                ports.ranks.tell_rank_zero(attempt, message)
            case commands.SendBatch():
                self._start(self._send_batch, command, tuple(self._untold_saves))
            case commands.SaveRun():
                self._start(self._save, command, self._new_save())
            case commands.TakeSnapshot():
                self._start(self._take_snapshot, command, self._new_save())
            case commands.DropSnapshot(directory):
                self._start(self._drop_snapshot, Path(directory))
            case commands.StartReplica(placement, has_devices):
                ports.replicas.start(placement, has_devices=has_devices)
            case commands.StopReplica(replica_id, in_a_hurry):
                ports.replicas.stop(replica_id, in_a_hurry=in_a_hurry)
            case commands.TellReplica(replica_id, message):
                ports.replicas.tell(replica_id, message)
            case commands.SendReload():
                self._start(self._send_reload, command)
            case commands.AskInstance():
                self._start(self._ask_instance, command)
            case commands.KnowInstance():
                ports.routing.know(
                    command.instance_id,
                    command.incarnation,
                    command.kv_capacity_tokens,
                    is_planned=command.is_planned,
                )
            case commands.RouteTo(instance_id, _, version):
                ports.routing.serve(instance_id, version)
            case commands.Unroute(instance_id, is_draining):
                ports.routing.withdraw(instance_id, is_draining=is_draining)
            case commands.ReplaceInstance(instance_id, reason):
                ports.engines.replace(instance_id, reason)
            case commands.AddInstance(placement, has_devices):
                ports.engines.add(placement, has_devices=has_devices)
            case commands.DrainInstance(instance_id, gives_back):
                ports.engines.drain(instance_id, gives_back=gives_back)
            case commands.KeepInstance(instance_id):
                ports.engines.keep(instance_id)
            case commands.RetireInstance(instance_id):
                ports.engines.retire(instance_id)
            case commands.SleepInstance(instance_id):
                ports.engines.sleep(instance_id)
            case commands.WakeInstance(instance_id):
                ports.engines.wake(instance_id)
            case commands.ForgetInstance(instance_id):
                ports.routing.forget(instance_id)
            case commands.ReshapeGang(plan, probes):
                self._start(self._reshape, plan, probes)
            case commands.KeepPlan(memory):
                ports.plans.remember(memory)
            case commands.WritePlan(plan):
                self._write(ports.plans.write, plan)
            case commands.StartGroup(group):
                ports.rollouts.start(group)
            case commands.AskAgain(group_id, sample_indices):
                ports.rollouts.ask_again(group_id, sample_indices)
            case commands.SayMissing(fields, group_ids):
                places = ports.routing.places_of(group_ids)
                _log.warning("batch_collection_timeout", **fields, requests=places)
            case commands.CancelGroup(group_id):
                ports.rollouts.cancel(group_id)
            case commands.CancelAllGroups(reason):
                ports.rollouts.cancel_all(reason)
                ports.evaluations.cancel_all(reason)
            case commands.StartEvaluated(group):
                ports.evaluations.start(group)
            case commands.CancelEvaluated(group_id):
                ports.evaluations.cancel(group_id)
            case commands.WriteEvaluation(record, trajectories):
                self._write(ports.records.write_evaluation, record, trajectories)
            case commands.WriteStep():
                # What the engines did in the step is read off here, the rest is done in a thread.
                self._write(self._write_step, command, ports.judge(command))
            case commands.WriteReload(record) | commands.WriteStrayAck(record):
                self._write(ports.records.write_reload, record)
            case commands.WriteReconfiguration(line):
                self._write(ports.records.write_reconfiguration, line)
            case commands.ReportReconfiguration(ended):
                self._start(self._tell, ended)
            case commands.RetireVersions(pinned):
                loading = ports.engines.loading_directories()
                self._write(self._retire_versions, pinned, loading)
            case commands.Say(event, fields, is_warning):
                (_log.warning if is_warning else _log.info)(event, **fields)
            case commands.JudgeProbe():
                self._start(self._judge_probe, command)
            case commands.ChangePlan(reason):
                self._end(0, reason)
            case commands.EndRun(exit_code, reason):
                self._end(exit_code, reason)
            case _:
                assert_never(command)

    async def _tell(self, event: Event) -> None:
        await self._post(event)

    async def _judge_probe(self, command: commands.JudgeProbe) -> None:
        judged = await anyio.to_thread.run_sync(self._ports.judge_probe, command)
        await self._post(judged)

    def _start(self, effect: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> None:
        self._tasks.start_soon(effect, *arguments)

    async def until_written(self) -> None:
        """Wait until every record begun so far is in its file."""
        while self._num_unwritten:
            self._all_written = anyio.Event()
            await self._all_written.wait()

    def _write_step(self, command: commands.WriteStep, judged: Callable[[], StepRecord]) -> None:
        self._ports.records.write_step(judged(), command.groups)

    def _write(self, write: Callable[..., None], *arguments: object) -> None:
        self._num_unwritten += 1
        self._start(self._in_order, write, *arguments)

    async def _in_order(self, write: Callable[..., None], *arguments: object) -> None:
        try:
            await anyio.to_thread.run_sync(write, *arguments, limiter=self._files)
        finally:
            self._num_unwritten -= 1
            self._all_written.set()

    # Weights

    async def _prepare_export(self, attempt: int, version: PolicyVersion) -> None:
        directory = self._terms.directory.weights_of(version)
        await anyio.to_thread.run_sync(_discard_if_there, directory, limiter=self._files)
        self._ports.ranks.tell_all(
            attempt,
            ExportWeights(
                run_id=self._terms.run_id,
                policy_version=version,
                directory=str(directory),
                probe_token_ids=self._terms.probe_token_ids,
                # Every byte is checked before it is used, and a resumed run writes its own.
                is_durable=False,
            ),
        )

    async def _check_export(self, command: commands.CheckExport) -> None:
        receipt_of: dict[NodeRank, WeightsReceipt] = {}
        async with anyio.create_task_group() as elsewhere:
            for node in command.nodes:
                elsewhere.start_soon(self._have_read, node, command, receipt_of)
            # Without it the files would often be too new for a receipt.
            await clock.sleep(2 * SETTLE_S)
            error = await self._read_here(command, receipt_of)
            if error:
                elsewhere.cancel_scope.cancel()
        checked = ExportChecked(command.version, command.manifest_hash, error, receipt_of)
        await self._post(checked)

    async def _read_here(
        self, command: commands.CheckExport, receipt_of: dict[NodeRank, WeightsReceipt]
    ) -> str:
        """What is wrong with the export; empty when nothing is."""
        check = partial(verify_announced, Path(command.directory), command.manifest_hash)

        def on_wait(lack: str) -> None:
            _log.warning("weights_not_seen_yet", version=command.version, why=lack)

        try:
            receipt = await when_visible(check, on_wait=on_wait)
        except DataError as found:
            return str(found)
        if receipt is not None:
            receipt_of[NodeRank(0)] = receipt
        return ""

    async def _have_read(
        self,
        node: NodeRank,
        command: commands.CheckExport,
        receipt_of: dict[NodeRank, WeightsReceipt],
    ) -> None:
        """A node that cannot say leaves it to its servers, which read for themselves."""
        if self._ports.readers is None:
            return
        try:
            receipt = await self._ports.readers.read_weights(
                node, command.directory, command.manifest_hash
            )
        except PeerError as error:
            _log.warning("weights_not_read", version=command.version, node=node, why=str(error))
            return
        if receipt is not None:
            receipt_of[node] = receipt

    def _retire_versions(self, pinned: frozenset[PolicyVersion], loading: frozenset[Path]) -> None:
        published = {
            PolicyVersion(int(path.name[1:])): path
            for path in self._terms.directory.weights.iterdir()
            if path.name[:1] == "v" and path.name[1:].isdecimal()
        }
        doomed = deletable_versions(
            published,
            keep_last=self._terms.keep_last,
            pinned=pinned,
            in_use={version for version, path in published.items() if path in loading},
        )
        for version in doomed:
            _retire(published[version])

    # Ranks

    async def _reshape(self, plan: Plan, probes: bool) -> None:
        """The ranks read their configuration when they start."""
        await anyio.to_thread.run_sync(self._ports.plans.write, plan, limiter=self._files)
        self._shape = msgspec.structs.replace(self._shape, dp_size=plan.train.dp)
        self._ports.trainer.reshape(plan.train, probes=probes)

    async def _send_batch(
        self, command: commands.SendBatch, before: tuple[anyio.Event, ...]
    ) -> None:
        """`before`: saves that were asked for earlier hold the step before."""
        num_members = len(command.hybrids.members) if command.hybrids else 0
        shape = msgspec.structs.replace(
            self._shape, num_hybrid_shards=num_members * command.replica_data
        )
        cut = partial(cut_batch, command.groups, self._terms.algorithm, shape)
        shards = await anyio.to_thread.run_sync(cut)
        for is_told in before:
            await is_told.wait()
        self._train(command, shape.dp_size, shards)

    def _train(
        self,
        command: commands.SendBatch,
        num_core_shards: int,
        shards: tuple[tuple[MiniBatch, ...], ...],
    ) -> None:
        """Give the core the first shards and each member its own."""
        members = command.hybrids.members if command.hybrids else ()
        each = command.replica_data
        first = [num_core_shards + place * each for place in range(len(members))]
        own = {it: shards[at : at + each] for it, at in zip(members, first, strict=True)}
        train = TrainStep(command.step, (), hybrid_step(command.hybrids, own))
        self._ports.ranks.train(command.attempt, train, shards[:num_core_shards])
        for replica_id, of_member in own.items():
            self._ports.replicas.train(replica_id, train, of_member)

    async def _save(self, command: commands.SaveRun, is_told: anyio.Event) -> None:
        directory = self._terms.directory.checkpoint_of(command.step)
        rollout_state = await anyio.to_thread.run_sync(encoded, command.rollout_state)
        await anyio.to_thread.run_sync(_discard_if_there, directory, limiter=self._files)
        await anyio.to_thread.run_sync(self._retire_checkpoints, limiter=self._files)
        self._ports.ranks.tell_all(
            command.attempt,
            SaveCheckpoint(
                step=command.step,
                directory=str(directory),
                rollout_state=rollout_state,
            ),
        )
        self._told(is_told)

    async def _take_snapshot(self, command: commands.TakeSnapshot, is_told: anyio.Event) -> None:
        directory = Path(command.directory)
        await anyio.to_thread.run_sync(_discard_snapshot, directory, limiter=self._files)
        self._ports.ranks.tell_all(
            command.attempt,
            SaveCheckpoint(
                step=command.step,
                directory=command.directory,
                rollout_state=b"",
                is_snapshot=True,
            ),
        )
        self._told(is_told)

    async def _drop_snapshot(self, directory: Path) -> None:
        await anyio.to_thread.run_sync(_discard_snapshot, directory, limiter=self._files)

    def _new_save(self) -> anyio.Event:
        self._untold_saves.append(anyio.Event())
        return self._untold_saves[-1]

    def _told(self, save: anyio.Event) -> None:
        save.set()
        self._untold_saves.remove(save)

    def _retire_checkpoints(self) -> None:
        """Make room for one more; at least one complete checkpoint is always there."""
        complete = list_complete_checkpoints(self._terms.directory.checkpoints)
        for info in complete[max(1, self._terms.keep_last - 1) :]:
            _retire(info.directory)

    # Engines

    async def _ask_instance(self, command: commands.AskInstance) -> None:
        engines = self._ports.engines
        try:
            state = await engines.ask_state(command.instance_id)
            capacity = await engines.ask_kv_capacity(command.instance_id)
        except PeerError as error:
            # It was ready a moment ago: its supervision finds out whether it still is.
            engines.replace(command.instance_id, f"it does not tell its state: {error}")
            return
        await self._post(
            InstanceAnswered(
                instance_id=command.instance_id,
                incarnation=command.incarnation,
                base_url=engines.url_of(command.instance_id),
                state=state,
                kv_capacity_tokens=capacity,
            )
        )

    async def _send_reload(self, command: commands.SendReload) -> None:
        nonce = command.request.nonce
        begun_at = clock.now()
        try:
            ack = await self._ports.engines.reload(command.instance_id, command.request)
        except LibraError as error:
            answer = ReloadAnswered(
                command.instance_id, command.incarnation, nonce, None, str(error)
            )
        else:
            answer = ReloadAnswered(command.instance_id, command.incarnation, nonce, ack, "")
        _log.debug("reload_answered", instance=command.instance_id, s=clock.now() - begun_at)
        await self._post(answer)


def cut_batch(
    groups: tuple[CompleteGroup, ...], algorithm: AlgorithmConfig, shape: BatchShape
) -> tuple[tuple[MiniBatch, ...], ...]:
    """Advantages by group, then one tuple of mini-batches per data-parallel rank."""
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    values = advantages(rewards, [t.group_id for t in trajectories], algorithm)
    return shard(groups, values, shape)


def hybrid_step(
    begun: BegunStep | None, shards_of: Mapping[ReplicaId, Shards]
) -> HybridStep | None:
    """The membership as the ranks are told it, with what each member contributes."""
    if begun is None:
        return None
    shares = tuple(_share(replica_id, shards) for replica_id, shards in shards_of.items())
    return HybridStep(begun.epoch, shares, begun.joiners)


def _share(replica_id: ReplicaId, shards: Shards) -> MemberShare:
    parts = [[s for part in parts for s in part.samples] for parts in zip(*shards, strict=True)]
    counts = [[sum(sample.loss_mask) for sample in part] for part in parts]
    return MemberShare(
        replica_id=replica_id,
        num_tokens=tuple(map(sum, counts)),
        num_sequences=tuple(sum(1 for tokens in part if tokens) for part in counts),
    )


def _discard_if_there(directory: Path) -> None:
    """Raises SiteError when it stays where something is to be written."""
    if directory.exists():
        try:
            left = discard_directory(directory)
        except OSError as error:
            raise SiteError(f"{directory} cannot be removed: {error.strerror}") from error
        _say_left(left)


def _discard_snapshot(directory: Path) -> None:
    """And what is left of one that a core did not finish."""
    _discard_if_there(directory)
    for unfinished in directory.parent.glob(f".{directory.name}*{PARTIAL_SUFFIX}"):
        shutil.rmtree(unfinished, ignore_errors=True)


def _retire(directory: Path) -> None:
    """What nobody needs any more; the run goes on without the space that it does not give back."""
    try:
        left = discard_directory(directory)
    except OSError as error:
        _log.warning("directory_not_removed", path=str(directory), why=error.strerror)
    else:
        _say_left(left)


def _say_left(left: Path | None) -> None:
    if left is not None:
        _log.warning("directory_not_removed", path=str(left), why="something in it is held")
