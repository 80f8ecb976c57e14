"""One run from its first task to its last: the one root task group."""

import signal
import traceback
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from random import Random

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from msgspec.structs import astuple

from libra import clock
from libra.ids import ChildId, InstanceId, NodeRank, RunId
from libra.planner.plan import plan_in_words
from libra.planner.probe import SwitchPlan
from libra.planner.replan import Replanner
from libra.rewards.loading import check_reward_name
from libra.scheduling.scheduler import Scheduler
from libra.tracing.log import get_log
from libra_supervisor.api.access import read_or_make_token
from libra_supervisor.api.server import api_server
from libra_supervisor.app.adoption import adoptee_of, take_over
from libra_supervisor.app.builder import Builder
from libra_supervisor.app.children import Children
from libra_supervisor.app.cluster import Cluster
from libra_supervisor.app.cluster_routing import ClusterRouting
from libra_supervisor.app.collector import RunCollector, Sources, registry_of
from libra_supervisor.app.ending import BUG, INTERRUPTED, Outcome, outcome_of
from libra_supervisor.app.fleet import Fleet
from libra_supervisor.app.forecaster import Forecaster
from libra_supervisor.app.launch import Launch, gpus_per_node, new_run_id, num_gpus_of, replanned
from libra_supervisor.app.making import span_writer
from libra_supervisor.app.operator import ChildStatuses, Facts, Operator
from libra_supervisor.app.parts import control_of, kv_capacity_by_tp
from libra_supervisor.app.plan_files import PlanFiles, TrainerPlace
from libra_supervisor.app.probe_judge import ProbeJudge
from libra_supervisor.app.prompts import Prompts, fingerprints_of
from libra_supervisor.app.rank_mail import RankMail
from libra_supervisor.app.recall import (
    RunMemory,
    record_run_id,
    recorded_run_id,
    remembered_drains,
)
from libra_supervisor.app.replan_desk import DeskPorts, ReplanDesk
from libra_supervisor.app.rim import say_notices, show, tell_systemd
from libra_supervisor.app.routing import SchedulerRouting, explained_if_debugging
from libra_supervisor.app.spread_rollouts import SpreadRollouts
from libra_supervisor.app.stop_signals import exit_code_of, stop_signals
from libra_supervisor.app.tracer import Tracer
from libra_supervisor.app.user_threads import abandon_user_threads
from libra_supervisor.display.console import Display
from libra_supervisor.events import Event, StopRequested
from libra_supervisor.gateway.waiting import WaitingRoom
from libra_supervisor.inbox import Inbox
from libra_supervisor.instances.serving_meter import ServingMeter
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.execute import Executor, Ports
from libra_supervisor.loop.run import run_loop, tick
from libra_supervisor.loop.server_need import lead_steps
from libra_supervisor.loop.stall import StallMeter, measure_stalls
from libra_supervisor.notify import Notifier
from libra_supervisor.process.cgroup import delegated_root
from libra_supervisor.process.kernel import Kernel, Linux
from libra_supervisor.process.lifecycle import Adoptee
from libra_supervisor.process.logs import LogRelay, log_policy_from, open_log_relay
from libra_supervisor.process.spawn import LinuxSpawner, Spawner, become_subreaper
from libra_supervisor.records.reader import last_attempt, last_decision_id
from libra_supervisor.records.tracker_backends import open_trackers
from libra_supervisor.records.writer import RecordsWriter
from libra_supervisor.rollouts.user_tasks import contain_exits

_log = get_log()


async def run_to_end(launch: Launch, prompts: Prompts, display: Display) -> Outcome:
    """Run until the work is done, a stop is asked for, or something fails for good.

    Whatever the outcome, nothing that was started is left running.
    """
    become_subreaper()
    abandon_user_threads()
    contain_exits()
    try:
        wanted = launch.config.control.run_id
        run_id = recorded_run_id(launch.directory) or new_run_id(launch.directory, wanted)
        record_run_id(launch.directory, run_id)
        check_reward_name(launch.config.data.reward)
        _log.info("run_begins", run_id=run_id, plan=plan_in_words(launch.plan))
        outcome = await _until_planned_right(launch, prompts, run_id, display)
    except BaseException as error:  # noqa: BLE001 - the top of the program
        outcome = outcome_of(error)
        if outcome.exit_code == BUG:
            _log.error("bug", traceback="".join(traceback.format_exception(error)))
    say = _log.info if outcome.exit_code == 0 else _log.error
    say("run_ended", exit_code=outcome.exit_code, why=outcome.reason)
    return outcome


async def _until_planned_right(
    launch: Launch, prompts: Prompts, run_id: RunId, display: Display
) -> Outcome:
    """Run; begin anew with another plan when the recompute probe shows that this one cannot be."""
    while True:
        outcome, switch = await _supervised(launch, prompts, run_id, display)
        if switch is None:
            return outcome
        launch = await anyio.to_thread.run_sync(replanned, launch, switch)
        _log.warning("run_planned_anew", plan=plan_in_words(launch.plan))


async def _supervised(
    launch: Launch, prompts: Prompts, run_id: RunId, display: Display
) -> tuple[Outcome, SwitchPlan | None]:
    run = Run(launch, prompts, run_id, display)
    async with open_log_relay(
        launch.directory.root,
        run_id=run_id,
        env=dict(launch.environ),
        post=run.inbox.post,
        policy=log_policy_from(launch.config.supervision),
    ) as logs:
        outcome = await run.to_end(logs)
        return outcome, run.next_plan


class Run:
    """Every part of one run, joined."""

    def __init__(self, launch: Launch, prompts: Prompts, run_id: RunId, display: Display) -> None:
        self._launch = launch
        self._config = launch.config
        self._prompts = prompts
        self._run_id = run_id
        self._display = display
        self._num_signals = 0
        self.inbox: Inbox[Event] = Inbox()
        self._control = control_of(launch, prompts, run_id)
        self._control.attempts_before = last_attempt(launch.directory.metrics)
        self._memory = RunMemory(launch.directory, run_id)
        if launch.memory is not None:
            self._memory.remember_plan(launch.memory)
        self._leave_drained(remembered_drains(launch.directory))
        self._memory.look_at_drained = self._drained
        self._spans = span_writer(launch.config, launch.directory, run_id)
        self._tracer = Tracer(self._spans)
        self._scheduler = Scheduler(
            launch.config.heterogeneous_rollout.scheduling,
            kv_capacity_by_tp=kv_capacity_by_tp(launch.config, launch.plan),
            explained=explained_if_debugging(),
        )
        self._stalls = StallMeter()
        self._replans: ReplanDesk | None = None
        self._outcome: Outcome | None = None
        self._probe_judge: ProbeJudge | None = None
        self._trackers = open_trackers(launch.config.tracing, launch.directory, run_id)

    @property
    def next_plan(self) -> SwitchPlan | None:
        """What to go on with after `to_end`, because this plan did not fit."""
        return None if self._probe_judge is None else self._probe_judge.next

    async def to_end(self, logs: LogRelay) -> Outcome:
        kernel = Linux()
        spawner = LinuxSpawner(
            run_id=self._run_id, logs=logs, kernel=kernel, cgroups=delegated_root()
        )
        async with AsyncExitStack() as stack:
            cluster = self._cluster()
            if cluster is not None:
                await stack.enter_async_context(cluster.running())
            try:
                builder = self._builder(spawner, cluster)
                outcome = await self._supervise(logs, kernel, builder, cluster)
            except BaseException as error:
                if cluster is not None:
                    with anyio.CancelScope(shield=True):  # bounded by itself
                        await cluster.dismiss(*astuple(outcome_of(error)))
                raise
            # With another plan the run begins anew, under a new term and with the same nodes.
            if cluster is not None and self.next_plan is None:
                await cluster.dismiss(outcome.exit_code, outcome.reason)
        return outcome

    def _cluster(self) -> Cluster | None:
        """The other nodes; None when there are none."""
        launch = self._launch
        if launch.site is None:
            return None
        return Cluster(
            launch.directory,
            launch.loaded.config,
            self._run_id,
            site=launch.site,
            token=launch.node_token,
            post=self.inbox.post,
        )

    async def _supervise(
        self, logs: LogRelay, kernel: Kernel, builder: Builder, cluster: Cluster | None
    ) -> Outcome:
        fleet, gang = builder.fleet(self._served_directory), builder.gang()
        children = Children(fleet, gang, builder.replicas())
        adopt = await self._take_over(fleet, logs, kernel, cluster)
        forecaster = builder.forecaster()
        self._probe_judge = ProbeJudge(self._launch, learn=forecaster.learn)
        self._replans = replans = self._replan_desk(forecaster)
        operator = self._operator(children, forecaster, replans)
        if cluster is not None:
            self._show_nodes(operator, cluster, builder.others)
        notifier = Notifier.from_environment(self._launch.environ)
        try:
            async with (
                fleet,
                builder.gateway(fleet) as gateway,
                api_server(
                    operator,
                    config=self._config.api,
                    socket_path=self._launch.directory.control_socket,
                    token=builder.token,
                    more_tcp_routes=gateway.routes(),
                ) as port,
                anyio.create_task_group() as tasks,
            ):
                if port is not None:
                    _log.info("api_listens", host=self._config.api.api_host, port=port)
                self._start_rim(tasks, notifier, operator)
                tasks.start_soon(self._hear_signals, children)
                children.start(tasks, adopt)
                await self._work(builder, children, forecaster, replans)
                self._display.show(operator.progress())
                notifier.stopping("ending children")
                await self._end_children(children)
                tasks.cancel_scope.cancel()
        finally:
            self._memory.save()
            self._memory.close()
            self._tracer.close()
            with anyio.CancelScope(shield=True):  # bounded by the trackers themselves
                await anyio.to_thread.run_sync(self._trackers.close)
        return self._outcome or Outcome(INTERRUPTED, "interrupted")

    def _show_nodes(
        self, operator: Operator, cluster: Cluster, others: SpreadRollouts | None
    ) -> None:
        if others is not None:
            operator.nodes = lambda: others.status(cluster.status(self._note_of_node))
            operator.num_in_flight = others.num_in_flight

    def _note_of_node(self, node: NodeRank) -> str:
        """What the run makes of a node that it does not count on."""
        desk = self._control.nodes
        return "" if desk is None else desk.note(node)

    def _start_rim(self, tasks: TaskGroup, notifier: Notifier, operator: Operator) -> None:
        """Start what tells others about the run and decides nothing."""
        tasks.start_soon(self._memory.run)
        tasks.start_soon(measure_stalls, self._stalls)
        tasks.start_soon(notifier.keep_alive)
        tasks.start_soon(tell_systemd, notifier, operator)
        tasks.start_soon(show, self._display, operator)

    async def _take_over(
        self, fleet: Fleet, logs: LogRelay, kernel: Kernel, cluster: Cluster | None
    ) -> dict[ChildId, Adoptee]:
        """End what an earlier supervisor left, but for the servers that go on."""
        node_of = {ChildId(it.instance_id): it.node for it in self._launch.plan.instances}
        kept = await take_over(
            self._launch.directory,
            self._run_id,
            startable=fleet.required_facts(),
            elsewhere={child_id for child_id, node in node_of.items() if node},
            logs=logs,
            kernel=kernel,
        )
        self._memory.remember(kept)
        if cluster is not None:
            cluster.let_stay(
                {
                    node: frozenset(it for it in kept if node_of[it] == node)
                    for node in cluster.nodes
                }
            )
        return {child_id: adoptee_of(record) for child_id, record in kept.items()}

    async def _work(
        self,
        builder: Builder,
        children: Children,
        forecaster: Forecaster,
        replans: ReplanDesk,
    ) -> None:
        """Until the end of the loop; rollouts and effects end here."""
        fleet, gang, others = children.fleet, children.gang, builder.others
        pool = builder.reward_pool()
        runner = builder.runner(self._prompts.dataset, fleet, pool)
        # Without data for evaluations nothing is ever started on it.
        evaluated = self._prompts.evaluated or self._prompts.dataset
        evaluations = builder.runner(evaluated, fleet, pool)
        if others is not None:
            others.begin(runner, evaluations, note_served=fleet.note_progress)
        mail = RankMail(gang)
        probe_judge = self._probe_judge = ProbeJudge(self._launch, learn=forecaster.learn)
        async with anyio.create_task_group() as work:
            executor = Executor(
                builder.terms(),
                Ports(
                    ranks=mail,
                    replicas=children.replicas,
                    trainer=TrainerPlace(builder, gang),
                    plans=PlanFiles(self._launch, self._memory, forecaster),
                    engines=fleet,
                    readers=builder.cluster,
                    rollouts=others or runner,
                    evaluations=others or evaluations,
                    routing=self._routing(fleet, builder),
                    records=RecordsWriter(self._launch.directory, self._trackers),
                    judge=forecaster,
                    judge_probe=probe_judge,
                ),
                tasks=work,
                post=self.inbox.post,
                end=self._end,
            )
            for task in (
                pool.run,
                runner.run,
                evaluations.run,
                mail.run,
                replans.run,
                builder.room.run,
                partial(say_notices, self._scheduler, self.inbox.post),
            ):
                work.start_soon(task)
            if others is not None:
                work.start_soon(others.run)
            if (exchange := builder.load_exchange()) is not None:
                work.start_soon(exchange.run)
            work.start_soon(tick, self.inbox)
            await run_loop(
                self.inbox,
                self._control,
                partial(self._execute, executor),
                note=self._note,
                on_stall=None if builder.cluster is None else builder.cluster.check_after_stall,
            )
            self._scheduler.stop_admitting()
            for made in (runner, evaluations) if others is None else (others,):
                made.cancel_all("the run is over")
            await executor.until_written()
            work.cancel_scope.cancel()

    def _routing(self, fleet: Fleet, builder: Builder) -> SchedulerRouting | ClusterRouting:
        own = SchedulerRouting(self._scheduler, fleet, builder.room)
        if builder.others is None:
            return own
        return ClusterRouting(own, fleet, builder.others)

    async def _end_children(self, children: Children) -> None:
        """End every child; what is still said about them is noted and decides nothing."""
        children.stop()
        async with anyio.create_task_group() as listening:
            listening.start_soon(self._note_the_rest)
            await children.until_down()
            listening.cancel_scope.cancel()

    async def _note_the_rest(self) -> None:
        async for event in self.inbox.events():
            self._note(event)

    def _note(self, event: Event) -> None:
        self._memory.note(event)
        self._tracer.on_event(event)
        if self._replans is not None:
            self._replans.on_event(event)

    def _leave_drained(self, instance_ids: tuple[InstanceId, ...]) -> None:
        """What an operator took out of routing before this supervisor began stays out of it."""
        pool = self._control.pool
        kept = [it for it in instance_ids if it in pool]
        for instance_id in kept:
            pool.on_drain_requested(instance_id, now=clock.now())
        if kept:
            _log.info("drained_before", instances=kept)

    def _drained(self) -> tuple[InstanceId, ...]:
        members = self._control.pool.members
        return tuple(it.instance_id for it in members if it.is_drained_by_operator)

    def _execute(self, executor: Executor, command: Command) -> None:
        self._tracer.on_command(command)
        if self._replans is not None:
            self._replans.on_command(command)
        executor.execute(command)

    def _end(self, exit_code: int, reason: str) -> None:
        self._outcome = Outcome(exit_code, reason)

    def _builder(self, spawner: Spawner, cluster: Cluster | None) -> Builder:
        given = self._config.api.api_token_file
        token_file = Path(given) if given else self._launch.directory.token
        token = read_or_make_token(token_file)
        return Builder(
            launch=self._launch,
            prompts=self._prompts,
            run_id=self._run_id,
            token=token,
            token_file=token_file,
            spawner=spawner,
            cluster=cluster,
            others=None if cluster is None else self._others(cluster, token_file),
            scheduler=self._scheduler,
            room=WaitingRoom(self._scheduler, spans=self._spans),
            inbox=self.inbox,
            rng=Random(f"{self._run_id} {clock.wall_ns()}"),  # noqa: S311 - jitter and names
            meter=ServingMeter({i.instance_id: i.tp for i in self._launch.plan.instances}),
        )

    def _others(self, cluster: Cluster, token_file: Path) -> SpreadRollouts:
        others = SpreadRollouts(
            cluster.nodes,
            term=cluster.term,
            traffic=self._scheduler,
            fingerprints=fingerprints_of(self._prompts),
            token_file=token_file,
            kv_capacity_by_tp=kv_capacity_by_tp(self._config, self._launch.plan),
            post=self.inbox.post,
        )
        cluster.listener = others
        for rank, node in cluster.nodes.items():
            node.on_rollouts = partial(others.on_word, rank)
        return others

    def _served_directory(self) -> Path | None:
        """A replaced engine starts from the committed version; the first ones from the base."""
        version = self._control.publication.committed
        if version is None or self._control.publication.manifest_hash is None:
            return None
        directory = self._launch.directory.weights_of(version)
        return directory if directory.exists() else None

    def _replan_desk(self, forecaster: Forecaster) -> ReplanDesk:
        launch = self._launch
        # What plans are made for; other devices of the machine are spare.
        num_gpus, per_node = num_gpus_of(launch), gpus_per_node(launch)
        return ReplanDesk(
            launch.given,
            Replanner(
                launch.given,
                num_gpus=num_gpus,
                gpus_per_node=per_node,
                book=launch.book,
            ),
            DeskPorts(
                control=self._control,
                book=lambda: forecaster.book,
                instances=lambda: self._scheduler.instances(clock.now()),
                write=RecordsWriter(launch.directory).write_reconfiguration,
                post=self.inbox.post,
                gpus_per_node=per_node or len(launch.devices),
                lead_steps=lambda: lead_steps(self._control, now=clock.now()),
            ),
            last_decision_id=last_decision_id(launch.directory.reconfigurations),
            started_at=clock.now(),
        )

    def _operator(
        self, children: Children, forecaster: Forecaster, replans: ReplanDesk
    ) -> Operator:
        operator = Operator(
            Facts(
                run_id=self._run_id,
                directory=self._launch.directory,
                total_steps=self._config.control.total_steps,
                started_at=clock.now(),
                manages_engines=(
                    self._config.global_resource_planner.runtime_manage_rollout_processes
                ),
            ),
            control=self._control,
            inbox=self.inbox,
            children=ChildStatuses(
                engine=children.fleet.status_of,
                trainer=children.gang.status,
                replicas=children.replicas.statuses,
            ),
            scheduler=self._scheduler,
            replans=replans,
        )
        operator.registry = registry_of(
            RunCollector(
                self._control,
                operator.status,
                Sources(
                    stalls=self._stalls,
                    forecaster=forecaster,
                    trackers=self._trackers,
                    scheduler=self._scheduler,
                    outcomes=replans.outcomes,
                ),
            )
        )
        return operator

    # Signals

    async def _hear_signals(self, children: Children) -> None:
        with stop_signals() as signals:
            async for number in signals:
                await self._on_signal(signal.Signals(number), children)

    async def _on_signal(self, number: signal.Signals, children: Children) -> None:
        self._num_signals += 1
        _log.info("signal_received", signal=number.name, count=self._num_signals)
        if self._control.is_ending:
            # The deadlines of what is being ended are shortened.
            children.stop()
            return
        is_repeated = self._num_signals > 1
        await self.inbox.post(
            StopRequested(number.name, now=is_repeated, exit_code=exit_code_of(number))
        )
