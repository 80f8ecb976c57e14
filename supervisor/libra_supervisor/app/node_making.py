"""A follower's part in making trajectories, from its leader's TakePart until it is let go of.

Everything of a part is its own: scheduler, connections, reward workers, jobs. What was read for it
(the prompts) is kept for the next one, since it is the same run's.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, Never, assert_never

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
from msgspec.structs import asdict

from libra import clock
from libra.config.load import load_resolved
from libra.config.run import RunConfig
from libra.data.cursor import PromptRef
from libra.errors import InvariantError, LibraError, SiteError, ungrouped
from libra.ids import GroupId, InstanceId, NodeRank, RunId
from libra.rewards.case import RewardCase
from libra.rewards.coercion import RewardFailed
from libra.rewards.loading import check_reward_name
from libra.rollouts.evaluation import is_evaluated
from libra.rollouts.group import AdmittedGroup
from libra.rollouts.trajectory import Trajectory
from libra.scheduling.scheduler import Scheduler
from libra.tracing.log import get_log
from libra.tracing.span import SpanWriter
from libra.wire import node_rollouts as wire
from libra.wire.node import MAX_PIECE_BYTES, NodeEvent
from libra.wire.node_rollouts import MAX_TRAJECTORY_BYTES, RolloutOrder
from libra_supervisor.app.followed_servers import FollowedServers
from libra_supervisor.app.making import load_exchange, rollout_runner, span_writer
from libra_supervisor.app.prompts import Prompts, fingerprints_of, open_prompts
from libra_supervisor.app.routing import EngineRouter, explained_if_debugging
from libra_supervisor.app.scoring import reward_pool_of
from libra_supervisor.events import (
    SampleFinished,
    SampleGaveUp,
    SampleProgressed,
    SampleStarted,
)
from libra_supervisor.gateway.waiting import WaitingRoom
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.rewards.pool import RewardPool
from libra_supervisor.rollouts.runner import RolloutRunner, SampleEvent
from libra_supervisor.run_directory import RunDirectory

REPORT_PERIOD_S: Final = 0.25
"""How often the leader is told what is in flight here, when it has changed."""

_log = get_log()


class MakingSite(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node makes trajectories."""

    node: NodeRank
    run_id: RunId
    directory: RunDirectory
    """Of the run, on the file system that the nodes share."""

    own: RunDirectory
    """Of this node alone: sockets and logs of its reward workers."""

    environ: Mapping[str, str]
    spawner: Spawner
    say: Callable[[NodeEvent], None]
    say_when_room: Callable[[NodeEvent], Awaitable[None]]
    rng: Random


class NodeMaking:
    """`libra_supervisor.app.node_hands.Making`. `tasks` owns the parts."""

    def __init__(self, site: MakingSite, tasks: anyio.abc.TaskGroup) -> None:
        self._site = site
        self._tasks = tasks
        self._shelf = PromptShelf()
        self._part: Part | None = None

    def obey(self, order: RolloutOrder) -> None:
        if isinstance(order, wire.TakePart):
            self._end("the leader wants another part taken")
            if order.reads_anew:
                self._shelf = PromptShelf()
            part = self._part = Part(self._site, order, self._shelf)
            self._tasks.start_soon(part.run)
        elif self._part is not None:
            # Else it was said before the leader had heard that the part was let go of.
            self._part.obey(order)

    def let_go(self, reason: str) -> None:
        if self._end(reason):
            self._site.say(wire.StoppedMaking(reason))

    def _end(self, reason: str) -> bool:
        part, self._part = self._part, None
        if part is not None:
            _log.info("part_let_go", why=reason, num_trajectories=part.num_finished)
            part.close()
        return part is not None


class PromptShelf:
    """The prompts of the run, once they have been read."""

    def __init__(self) -> None:
        self._prompts: Prompts | None = None

    async def prompts(self, config: RunConfig) -> Prompts:
        """Raises DataError. The thread of a cancelled call reads on for the next."""
        if self._prompts is None:
            await anyio.to_thread.run_sync(self._read, config, abandon_on_cancel=True)
        if self._prompts is None:
            raise InvariantError("the prompts were read and are not there")
        return self._prompts

    def _read(self, config: RunConfig) -> None:
        self._prompts = open_prompts(config)


class Rewards:
    """`libra_supervisor.rollouts.runner.Scorer` of a part, which ends when workers cannot go on.

    What the pool says in its end is about no case: another node scores it.
    """

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool

    async def score(self, case: RewardCase) -> float | RewardFailed:
        outcome = await self._pool.score(case)
        if self._pool.is_over:
            await anyio.sleep_forever()
        return outcome


class Job(msgspec.Struct):
    """Samples of a group that are made here."""

    number: int
    group_id: GroupId
    num_left: int


class Part:
    """One part. Orders come before it is ready, too."""

    def __init__(self, site: MakingSite, order: wire.TakePart, shelf: PromptShelf) -> None:
        self._site = site
        self._order = order
        self._shelf = shelf
        self._scope = anyio.CancelScope()
        self._is_open = True
        self._early: list[wire.Servers] = [order.servers]
        self._servers: FollowedServers | None = None
        self._room: WaitingRoom | None = None
        self._runners: dict[bool, RolloutRunner] = {}
        """By whether the group is of an evaluation."""

        self._job_of: dict[GroupId, Job] = {}
        self.num_finished = 0
        """Trajectories that were made."""

    def close(self) -> None:
        """End it; nothing more is said of it."""
        self._is_open = False
        self._scope.cancel()

    async def run(self) -> None:
        """Make trajectories until it is closed; what keeps them from being made is told."""
        with self._scope:
            try:
                with ungrouped():
                    await self._make()
            except InvariantError:
                raise
            except LibraError as error:
                _log.error("no_trajectories_here", why=str(error))
                self._say(wire.CannotMake(str(error)))
                self._is_open = False

    def obey(self, order: RolloutOrder) -> None:
        """Orders of before the leader heard that nothing is made here are left undone."""
        if self._is_open:
            self._do(order)

    def _do(self, order: RolloutOrder) -> None:  # noqa: C901, PLR0912 - a table
        match order:
            case wire.Servers():
                if self._servers is None:
                    self._early.append(order)
                else:
                    self._servers.take(order)
            case wire.GiveBack(instance_id):
                if self._room is not None:
                    self._room.give_back(instance_id)
            case wire.MakeSamples():
                self._start(order)
            case wire.MakeAgain(number, samples):
                job = self._numbered(number)
                if job is not None:
                    self._runner_of(job.group_id).ask_again(job.group_id, samples)
            case wire.DropJob(number):
                job = self._numbered(number)
                if job is not None:
                    del self._job_of[job.group_id]
                    self._runner_of(job.group_id).cancel(job.group_id)
            case wire.TakePart():
                raise InvariantError("a part is taken once")
            case _:
                assert_never(order)

    # Parts of a part

    async def _make(self) -> None:
        site = self._site
        config = await anyio.to_thread.run_sync(load_resolved, site.directory.resolved_config_json)
        check_reward_name(config.data.reward)
        prompts = await self._shelf.prompts(config)
        token = await anyio.to_thread.run_sync(_read_token, Path(self._order.token_file))
        writer = partial(span_writer, config, site.directory, site.run_id, node=site.node)
        with closing(await anyio.to_thread.run_sync(writer)) as spans:
            await self._make_of(config, prompts, token, spans)

    async def _make_of(
        self, config: RunConfig, prompts: Prompts, token: str, spans: SpanWriter
    ) -> None:
        site = self._site
        scheduling = config.heterogeneous_rollout.scheduling
        scheduler = Scheduler(
            scheduling,
            kv_capacity_by_tp=self._order.kv_capacity_by_tp,
            explained=explained_if_debugging(),
        )
        servers = FollowedServers(scheduler, scheduling, token=token, rng=site.rng)
        room = self._room = WaitingRoom(scheduler, spans=spans)
        exchange = load_exchange(
            scheduler, config, site.directory, run_id=site.run_id, node=site.node, rng=site.rng
        )
        pool = reward_pool_of(
            config.data,
            run_id=site.run_id,
            run_dir=site.own.root,
            spawner=site.spawner,
            environ=site.environ,
        )
        router = EngineRouter(room, servers, wanted=lambda: servers.wanted)
        for is_evaluation, tasks_of in ((False, prompts.dataset), (True, prompts.evaluated)):
            self._runners[is_evaluation] = rollout_runner(
                config,
                tasks_of or prompts.dataset,
                router=router,
                scorer=Rewards(pool),
                post=self._post,
            )
        async with anyio.create_task_group() as tasks:
            for task in (pool.run, servers.run, room.run):
                tasks.start_soon(task)
            for runner in self._runners.values():
                tasks.start_soon(runner.run)
            if exchange is not None:
                tasks.start_soon(exchange.run)
            tasks.start_soon(_say_notices, scheduler)
            await pool.wait_ready()
            for early in self._early:
                servers.take(early)
            self._servers = servers
            self._say(wire.CanMake(fingerprints_of(prompts)))
            await self._report(scheduler, servers)

    def _start(self, order: wire.MakeSamples) -> None:
        group = AdmittedGroup(
            PromptRef(order.prompt_id, order.row, order.epoch), order.attempt, order.n_samples
        )
        job = Job(order.job, group.group_id, len(order.samples))
        self._job_of[group.group_id] = job
        runner = self._runner_of(group.group_id)
        # An earlier job of the group has said all it had to, but may not have wound down.
        runner.cancel(group.group_id)
        runner.start(group, order.samples)

    def _runner_of(self, group_id: GroupId) -> RolloutRunner:
        return self._runners[is_evaluated(group_id)]

    def _numbered(self, number: int) -> Job | None:
        return next((job for job in self._job_of.values() if job.number == number), None)

    async def _post(self, event: SampleEvent) -> None:  # noqa: C901, PLR0912 - a table
        """Tell the leader what a runner has to say."""
        match event:
            case SampleStarted(group_id, sample):
                if group_id in self._job_of:
                    self._say(wire.SampleBegun(self._job_of[group_id].number, sample))
            case SampleProgressed(group_id, sample):
                if group_id in self._job_of:
                    self._say(wire.SampleAlive(self._job_of[group_id].number, sample))
            case SampleGaveUp(group_id, sample, failure):
                job = self._job_of.get(group_id)
                if job is not None:
                    self._say(wire.SampleGone(job.number, sample, failure.kind, failure.message))
                    self._end(job)
            case SampleFinished(trajectory):
                job = self._job_of.get(trajectory.group_id)
                if job is not None:
                    await self._send(job, trajectory)
                    self.num_finished += 1
                    self._end(job)
            case _:
                assert_never(event)

    def _end(self, job: Job) -> None:
        """One of its samples has ended."""
        job.num_left -= 1
        if job.num_left == 0 and self._job_of.get(job.group_id) is job:
            del self._job_of[job.group_id]

    async def _send(self, job: Job, trajectory: Trajectory) -> None:
        """In pieces, so that others find their way between."""
        data, sample = msgspec.msgpack.encode(trajectory), trajectory.sample_index
        if len(data) > MAX_TRAJECTORY_BYTES:
            why = f"its trajectory of {len(data)} bytes is too long to be passed on"
            self._say(wire.SampleGone(job.number, sample, "workflow", why))
            return
        for piece in pieces_of(data, job=job.number, sample=sample):
            if self._is_open:
                await self._site.say_when_room(piece)

    def _say(self, word: wire.RolloutWord) -> None:
        if self._is_open:
            self._site.say(word)

    async def _report(self, scheduler: Scheduler, servers: FollowedServers) -> Never:
        """Tell what is in flight here whenever it has changed, or the roster has."""
        told: tuple[int, int] | None = None
        while True:
            current = (servers.revision, scheduler.load_revision)
            if current != told:
                told = current
                self._say(wire.InUse(servers.revision, _in_use(scheduler)))
            await clock.sleep(REPORT_PERIOD_S)


def pieces_of(data: bytes, *, job: int, sample: int) -> Iterator[wire.TrajectoryPiece]:
    """An encoded trajectory as it is said."""
    for first in range(0, len(data), MAX_PIECE_BYTES):
        yield wire.TrajectoryPiece(
            job=job,
            sample=sample,
            data=data[first : first + MAX_PIECE_BYTES],
            is_last=first + MAX_PIECE_BYTES >= len(data),
        )


def _in_use(scheduler: Scheduler) -> dict[InstanceId, int]:
    return {load.instance_id: load.num_requests for load in scheduler.own_load()}


def _read_token(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise SiteError(f"the servers' token, {path}, cannot be read here: {error}") from error


async def _say_notices(scheduler: Scheduler) -> Never:
    while True:
        for notice in scheduler.take_notices():
            _log.info("scheduler_notice", kind=type(notice).__name__, **asdict(notice))
        await clock.sleep(1.0)
