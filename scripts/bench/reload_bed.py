"""Reload batches through the real control state, loop and executor; the rest of a run is played.

The trainer publishes the version it is asked for, as files or by transfer, and judges ACKs as rank
0 does; trajectories are finished the moment they are admitted. What the engines are, the caller
decides.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from time import process_time
from typing import Protocol

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup  # noqa: TC002 - one list of imports

from control_parts import METRICS, ListCursor, still_plans, trajectory
from libra import clock
from libra.config.algorithm import AlgorithmConfig
from libra.config.weights import WeightsConfig
from libra.ids import InstanceId, NodeRank, PolicyVersion, RunId
from libra.planner.plan import Plan, TrainPlacement
from libra.pools.pool import EMPTY, RolloutPool
from libra.rollouts.accounts import BufferLimits
from libra.rollouts.batch import BatchShape
from libra.rollouts.evaluation import EvaluationTerms
from libra.rollouts.group import AdmittedGroup
from libra.weights.judge import judge_acks
from libra.wire.instance import ReloadRequest  # noqa: TC001 - one list of imports
from libra.wire.rank import (
    CheckpointSaved,
    ExportWeights,
    JudgeAcks,
    OfferWeights,
    RankCommand,
    SaveCheckpoint,
    SendWeights,
    StepTrained,
    TrainStep,
    WeightsExported,
    WeightsOffered,
    WeightsSent,
)
from libra_supervisor.events import (
    CheckpointChosen,
    Event,
    GangReady,
    RankSaid,
    SampleFinished,
    SampleStarted,
)
from libra_supervisor.inbox import Inbox
from libra_supervisor.loop.commands import Command, EndRun, SendReload, WriteReload
from libra_supervisor.loop.control import Control
from libra_supervisor.loop.cycle import Cycle, Limits
from libra_supervisor.loop.evaluator import Evaluator
from libra_supervisor.loop.execute import Executor, Ports
from libra_supervisor.loop.execute import Terms as ExecutorTerms
from libra_supervisor.loop.plan_memory import PlanMemory
from libra_supervisor.loop.publication import Publication, Terms
from libra_supervisor.loop.rollout_desk import RolloutDesk
from libra_supervisor.loop.run import run_loop, tick
from libra_supervisor.loop.run_state import Policy
from libra_supervisor.ports import Engines, Readers, Rollouts, Routing
from libra_supervisor.records.reload import ReloadRecord
from libra_supervisor.records.writer import RecordsWriter
from libra_supervisor.run_directory import RunDirectory

RUN = RunId("bench")
PROBE = (5, 6, 7, 8, 9, 10)
TOLERANCE = 1e-3
ATTEMPT = 1

Publish = Callable[[Path, PolicyVersion], str]
"""Write the version's directory; returns the manifest's hash. Runs in a thread."""


class Transferring(Protocol):
    """Rank 0's part in transfers; called in a thread."""

    def offer(self, command: OfferWeights, probe_logprobs: tuple[float, ...]) -> WeightsOffered: ...

    def send(self, command: SendWeights) -> WeightsSent: ...


class Batch(msgspec.Struct, frozen=True):
    """One batch as it was recorded, and what it cost this process."""

    record: ReloadRecord
    cpu_s: float
    """From the first request to the committed record, all threads."""

    since_export_s: float
    """From the announcement of the written version to the committed record."""


class NoReplicas:
    """No plan has a hybrid replica."""

    def start(self, placement: object) -> None:
        raise AssertionError(f"{placement} is to be started")

    def stop(self, replica_id: object) -> None:
        raise AssertionError(f"{replica_id} is to be stopped")

    def tell(self, replica_id: object, command: object) -> None:
        raise AssertionError(f"{replica_id} is told {command}")

    def train(self, replica_id: object, command: object, shards: object) -> None:
        raise AssertionError(f"{replica_id} is to train {command} on {shards}")


class NoPlans:
    """The plan stays as it is."""

    def reshape(self, placement: TrainPlacement) -> None: ...

    def write(self, plan: Plan) -> None: ...

    def remember(self, memory: PlanMemory) -> None: ...


class Bed:
    """`post` is where the engines' own events go; `run` ends after `num_batches` versions."""

    def __init__(  # noqa: PLR0913 - what a run is made of
        self,
        root: Path,
        weights: WeightsConfig,
        instances: Sequence[tuple[InstanceId, int]],
        publish: Publish,
        *,
        num_batches: int,
        transfers: Transferring | None = None,
        node_of: Mapping[InstanceId, NodeRank] = EMPTY,
        readers: Readers | None = None,
        min_rollout_gpus: int | None = None,
    ) -> None:
        """`min_rollout_gpus` is all of them when it is not said."""
        self.transfers = transfers
        self.readers = readers
        self.rollouts: Callable[[TaskGroup], Rollouts] = lambda tasks: PlayedRollouts(self, tasks)
        self.routing: Routing = NoRouting()
        self.exported_at = 0.0
        self.directory = RunDirectory(root)
        self.directory.create()
        self.inbox: Inbox[Event] = Inbox()
        self.batches: list[Batch] = []
        self.ended = EndRun(70, "the loop ended by itself")
        self.probe_logprobs: tuple[float, ...] = tuple(-1.0 for _ in PROBE[1:])
        self.last_request: ReloadRequest | None = None
        self._publish = publish
        self._began_cpu_s: float | None = None
        limits = BufferLimits(
            n_samples=2,
            batch_size=2,
            max_concurrent=2,
            max_head_offpolicyness=0,
            last_step=num_batches - 1,
        )
        num_gpus = min_rollout_gpus or sum(size for _, size in instances)
        pool = RolloutPool(instances, now=anyio.current_time(), node_of=node_of)
        self.control = Control(
            cycle_machine=Cycle(
                Limits(total_steps=num_batches - 1, sync_interval=1, save_interval=0)
            ),
            pool=pool,
            desk=RolloutDesk(limits, ListCursor()),
            publication=Publication(
                Terms(
                    run_id=RUN,
                    weights=weights,
                    min_rollout_gpus=num_gpus,
                    probe_token_ids=PROBE,
                    probe_tolerance=TOLERANCE,
                ),
                pool,
            ),
            evaluator=Evaluator(
                EvaluationTerms(
                    rows=(), num_samples=1, max_concurrent=1, max_attempts=1, pass_reward=1.0
                )
            ),
            policy=Policy(
                min_rollout_gpus=num_gpus, publishes=True, transfers=transfers is not None
            ),
            plans=still_plans([instance_id for instance_id, _ in instances]),
        )

    async def run(self, engines: Engines) -> list[Batch]:
        """Raises RuntimeError when the run does not end as it should."""
        async with anyio.create_task_group() as tasks:
            executor = Executor(
                ExecutorTerms(
                    run_id=RUN,
                    directory=self.directory,
                    algorithm=AlgorithmConfig(),
                    shape=BatchShape(dp_size=1, mini_batch_size=2, mask_truncated=False),
                    keep_last=2,
                    probe_token_ids=PROBE,
                ),
                Ports(
                    ranks=PlayedRanks(self, tasks),
                    replicas=NoReplicas(),
                    trainer=NoPlans(),
                    plans=NoPlans(),
                    engines=engines,
                    readers=self.readers,
                    rollouts=self.rollouts(tasks),
                    evaluations=PlayedRollouts(self, tasks),
                    routing=self.routing,
                    records=RecordsWriter(self.directory),
                    judge=lambda command: lambda: command.record,
                    judge_probe=lambda metrics: metrics,
                ),
                tasks=tasks,
                post=self.inbox.post,
                end=self._end,
            )
            tasks.start_soon(tick, self.inbox)
            await self.inbox.post(CheckpointChosen(ATTEMPT, 0, None))
            await self.inbox.post(GangReady(ATTEMPT, 0, 1))
            await run_loop(
                self.inbox,
                self.control,
                lambda command: self._execute(executor, command),
                note=lambda _event: None,
            )
            await executor.until_written()
            tasks.cancel_scope.cancel()
        self.inbox.close()
        if self.ended.exit_code:
            raise RuntimeError(self.ended.reason)
        return self.batches

    def publish(self, command: ExportWeights) -> str:
        return self._publish(Path(command.directory), command.policy_version)

    def _execute(self, executor: Executor, command: Command) -> None:
        if isinstance(command, SendReload):
            self.last_request = command.request
            if self._began_cpu_s is None:
                self._began_cpu_s = process_time()
        elif isinstance(command, WriteReload) and self._began_cpu_s is not None:
            cpu_s = process_time() - self._began_cpu_s
            self.batches.append(Batch(command.record, cpu_s, clock.now() - self.exported_at))
            self._began_cpu_s = None
        executor.execute(command)

    def _end(self, exit_code: int, reason: str) -> None:
        self.ended = EndRun(exit_code, reason)


class PlayedRanks:
    """`libra_supervisor.ports.Ranks`: answers at once, except that weights are really written."""

    def __init__(self, bed: Bed, tasks: anyio.abc.TaskGroup) -> None:
        self._bed = bed
        self._tasks = tasks

    def tell_all(self, attempt: int, command: RankCommand) -> None:
        self._tasks.start_soon(self._answer, attempt, command)

    def tell_rank_zero(self, attempt: int, command: RankCommand) -> None:
        self._tasks.start_soon(self._answer, attempt, command)

    def train(self, attempt: int, command: TrainStep, shards: object) -> None:
        del shards
        said = RankSaid(attempt, StepTrained(0, command.step, METRICS))
        self._tasks.start_soon(self._bed.inbox.post, said)

    async def _answer(self, attempt: int, command: RankCommand) -> None:
        match command:
            case ExportWeights():
                manifest_hash = await anyio.to_thread.run_sync(self._bed.publish, command)
                self._bed.exported_at = clock.now()
                said = WeightsExported(
                    command.policy_version,
                    command.directory,
                    manifest_hash,
                    self._bed.probe_logprobs,
                    0.0,
                )
            case OfferWeights() if self._bed.transfers is not None:
                offer = self._bed.transfers.offer
                said = await anyio.to_thread.run_sync(offer, command, self._bed.probe_logprobs)
            case SendWeights() if self._bed.transfers is not None:
                said = await anyio.to_thread.run_sync(self._bed.transfers.send, command)
            case JudgeAcks(request, acks):
                said = judge_acks(
                    request,
                    acks,
                    trainer_probe_logprobs=self._bed.probe_logprobs,
                    probe_tolerance=TOLERANCE,
                )
            case SaveCheckpoint(step, directory):
                said = CheckpointSaved(step, directory, 0.0)
            case _:
                raise RuntimeError(f"nobody plays the answer to {command}")
        await self._bed.inbox.post(RankSaid(attempt, said))


class PlayedRollouts:
    """`libra_supervisor.ports.Rollouts`: every sample is answered by the committed version."""

    def __init__(self, bed: Bed, tasks: anyio.abc.TaskGroup) -> None:
        self._bed = bed
        self._tasks = tasks
        self._rng = Random(0)  # noqa: S311 - made-up rewards need no secrets

    def start(self, group: AdmittedGroup) -> None:
        self._tasks.start_soon(self._finish, group)

    def cancel(self, group_id: object) -> None: ...

    def cancel_all(self, reason: str) -> None: ...

    async def _finish(self, group: AdmittedGroup) -> None:
        for index in range(group.n_samples):
            await self._bed.inbox.post(SampleStarted(group.group_id, index))
            version = self._bed.control.publication.committed
            done = trajectory(group, index, version, self._rng.random())
            await self._bed.inbox.post(SampleFinished(done))


class NoRouting:
    """`libra_supervisor.ports.Routing` that nobody asks."""

    def know(self, *_what: object, is_planned: bool = False) -> None: ...

    def serve(self, *_what: object) -> None: ...

    def withdraw(self, *_what: object, is_draining: bool) -> None: ...
