"""The control API's view of the run: `ControlPort` over the control state and the children."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from libra import clock
from libra.ids import InstanceId, PolicyVersion, PromptId, ReplicaId, RequestId, RunId
from libra.planner.plan import plan_in_words, slots_in_words
from libra.pools.member import MemberState
from libra.pools.transition import in_words
from libra.scheduling.explanation import InstanceView
from libra.scheduling.load import EngineLoad
from libra.scheduling.request import RouteRequest
from libra.scheduling.scheduler import Scheduler
from libra.wire.api import (
    ChildStatus,
    EngineStatus,
    NodeStatus,
    StatusSnapshot,
    Verb,
    VerbReply,
    VerbRequest,
)
from libra_supervisor.app.replan_desk import ReplanDesk
from libra_supervisor.app.routing import OWN_CATEGORY
from libra_supervisor.display.progress import Progress, eta_s
from libra_supervisor.events import (
    DrainRequested,
    Event,
    ReloadRequested,
    RestartRequested,
    StopRequested,
)
from libra_supervisor.inbox import Inbox
from libra_supervisor.loop.control import Control
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.process.lifecycle import ChildState as ProcessState
from libra_supervisor.process.lifecycle import ChildStatus as ProcessStatus
from libra_supervisor.run_directory import RunDirectory


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the run goes on."""

    run_id: RunId
    directory: RunDirectory
    total_steps: int | None
    started_at: float
    manages_engines: bool = True
    """False: they are somebody else's, and never started or ended."""


class ChildStatuses(msgspec.Struct, frozen=True, kw_only=True):
    """What supervision says about processes."""

    engine: Callable[[InstanceId], ProcessStatus]
    trainer: Callable[[], ProcessStatus]
    replicas: Callable[[], Mapping[ReplicaId, ProcessStatus]]
    """Of the hybrid replicas that have processes."""


class Operator:
    """Answers from the loop's state; changes it only by posting events."""

    def __init__(
        self,
        facts: Facts,
        *,
        control: Control,
        inbox: Inbox[Event],
        children: ChildStatuses,
        scheduler: Scheduler,
        replans: ReplanDesk,
    ) -> None:
        self._replans = replans
        self._facts = facts
        self._control = control
        self._inbox = inbox
        self.registry = CollectorRegistry()
        self.nodes: Callable[[], tuple[NodeStatus, ...]] = tuple
        """The machines of the run; none are named when there is one."""

        self.num_in_flight: Callable[[InstanceId], int] = scheduler.num_in_flight
        """Requests on an engine, from whichever node."""

        self._children = children
        self._scheduler = scheduler

    # libra_supervisor.api.control.ControlPort

    def is_ready(self) -> bool:
        return self._control.cycle.committed is not None and not self._control.is_ending

    def metrics_text(self) -> bytes:
        return generate_latest(self.registry)

    def status(self) -> StatusSnapshot:
        progress = self.progress()
        return StatusSnapshot(
            run_id=self._facts.run_id,
            run_directory=str(self._facts.directory.root),
            pid=os.getpid(),
            phase=progress.phase,
            step=progress.step,
            total_steps=progress.total_steps,
            policy_version=progress.policy_version,
            waiting_for=progress.waiting_for,
            reward_mean=progress.reward_mean,
            num_running=progress.num_running,
            num_buffered=progress.num_buffered,
            uptime_s=progress.elapsed_s,
            eta_s=progress.eta_s,
            plan=plan_in_words(self._control.plans.plan),
            last_decision=self._replans.last_in_words,
            children=(self._trainer(), *self._replicas(), *self._engines()),
            oldest_wait=self._oldest_wait(),
            nodes=self.nodes(),
        )

    async def do(self, verb: Verb, request: VerbRequest) -> VerbReply:
        match verb:
            case "stop":
                await self._inbox.post(StopRequested("the control API", now=request.now))
                return VerbReply(ok=True, message="stopping")
            case "drain" | "undrain" if request.node is not None:
                return await self._on_node(verb, request.node)
            case "drain" | "undrain" | "restart":
                return await self._on_engine(verb, request.target)
            case "reload":
                return await self._reload()
            case "explain":
                return self._explain(request)
            case "replan" if request.plan is not None:
                return await self._replans.order(request.plan, is_dry_run=request.dry_run)
            case "replan":
                return await self._replans.ask(is_dry_run=request.dry_run)

    async def _reload(self) -> VerbReply:
        control = self._control
        if why := control.publication.why_not_refresh(control.cycle.held_version):
            return VerbReply(ok=False, message=f"nothing is reloaded: {why}")
        await self._inbox.post(ReloadRequested())
        return VerbReply(ok=True, message="reload of every engine begun")

    def progress(self) -> Progress:
        """One look at the run, for the display too."""
        control, facts = self._control, self._facts
        last, counts = control.book.last, control.desk.counts
        serving = sum(1 for member in control.pool.members if member.state.value == "serving")
        return Progress(
            phase=control.cycle.phase.value,
            # With the figures of the same step: they are whole once it has been published.
            step=control.cycle.step if last is None else last.step,
            total_steps=facts.total_steps,
            policy_version=control.cycle.committed,
            reward_mean=None if last is None else last.reward_mean,
            tokens_per_s=None if last is None else last.tokens_per_s,
            staleness_mean=None if last is None else last.staleness_mean,
            kl_mismatch=None if last is None else last.kl_mismatch,
            num_serving=serving,
            num_instances=len(control.pool.members),
            num_running=counts.enqueued + counts.running,
            num_buffered=control.desk.num_complete,
            waiting_for=waiting_for(control),
            elapsed_s=clock.now() - facts.started_at,
            eta_s=eta_s(
                step=control.cycle.step,
                first_step=control.cycle.step - control.book.num_closed,
                total_steps=facts.total_steps,
                trained_s=control.book.trained_s,
            ),
        )

    async def _on_node(self, verb: Verb, node: int) -> VerbReply:
        """Every engine there, so that its machine serves nothing: nothing else of it changes."""
        last = max((status.node for status in self.nodes()), default=0)
        if node > last:
            known = f"its nodes are 0 to {last}" if last else "it has one, node 0"
            return VerbReply(ok=False, message=f"the run has no node {node}; {known}")
        placed = self._control.plans.plan.instances
        # Servers of others lie on no node.
        there = tuple(it.instance_id for it in placed if it.node == node and it.slots)
        if not there:
            return VerbReply(ok=False, message=f"no rollout instance is on node {node}")
        replies = [await self._on_engine(verb, instance_id) for instance_id in there]
        refused = [reply for reply in replies if not reply.ok]
        if len(refused) == len(replies):
            return refused[0]
        words = ", ".join(there)
        left_out = "".join(f"; {reply.message}" for reply in refused)
        return VerbReply(ok=True, message=f"{verb} of {words} on node {node} begun{left_out}")

    async def _on_engine(self, verb: Verb, target: str) -> VerbReply:
        if target not in self._engine_ids():
            known = ", ".join(self._engine_ids()) or "none"
            return VerbReply(ok=False, message=f"no engine {target!r}; there are {known}")
        instance_id = InstanceId(target)
        if self._control.pool[instance_id].state is MemberState.GONE:
            return VerbReply(
                ok=False,
                message=f"{target} was given up and stays down until the run is resumed: "
                f"{self._control.pool[instance_id].last_error}",
            )
        if self._control.pool[instance_id].state is MemberState.ASLEEP:
            return VerbReply(
                ok=False,
                message=f"{target} sleeps while training has its devices; a change of the plan "
                "(replan) gives them back, or ends it",
            )
        if verb == "restart" and not self._facts.manages_engines:
            return VerbReply(
                ok=False,
                message=f"{target} is run by somebody else (heterogeneous_rollout.endpoints): "
                "whoever runs it restarts it",
            )
        if verb == "restart":
            await self._inbox.post(RestartRequested(instance_id))
        else:
            await self._inbox.post(DrainRequested(instance_id, drain=verb == "drain"))
        return VerbReply(ok=True, message=f"{verb} of {target} begun")

    def _explain(self, request: VerbRequest) -> VerbReply:
        wanted = RouteRequest(
            request_id=RequestId("explain"),
            max_new_tokens=request.max_new_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            prompt_id=None if request.prompt_id is None else PromptId(request.prompt_id),
            category=OWN_CATEGORY,
            min_version=None if request.min_version is None else PolicyVersion(request.min_version),
        )
        now = clock.now()
        self._scheduler.on_tick(now)  # as a request would: what ends by time has ended
        explanation = self._scheduler.explain(wanted, now)
        return VerbReply(
            ok=True, message=explanation.reason, details=msgspec.to_builtins(explanation)
        )

    def _engine_ids(self) -> tuple[InstanceId, ...]:
        return tuple(member.instance_id for member in self._control.pool.members)

    def _engines(self) -> list[ChildStatus]:
        views = {view.instance_id: view for view in self._scheduler.instances(clock.now())}
        return [self._engine(i, views.get(i)) for i in self._engine_ids()]

    def _engine(self, instance_id: InstanceId, view: InstanceView | None) -> ChildStatus:
        """`view`: as routing sees it; None before it has answered."""
        member, process = self._control.pool[instance_id], self._children.engine(instance_id)
        is_waiting = process.state is ProcessState.WAITING
        return ChildStatus(
            child=instance_id,
            role="rollout",
            state=process.state.value if is_waiting else member.state.value,
            since_s=clock.now() - (process.since if is_waiting else member.since),
            pid=process.pid or None,
            num_restarts=member.num_restarts,
            policy_version=member.version,
            num_in_flight=self.num_in_flight(instance_id),
            num_queued=None if view is None else view.num_queued,
            kv_use_fraction=None if view is None else view.kv_use_fraction,
            signals_age_s=None if view is None else view.snapshot_age_s,
            last_error=_said_of(process) or member.last_error or process.last_error,
            engines=() if view is None else tuple(map(_status_of, view.engines)),
        )

    def _trainer(self) -> ChildStatus:
        process = self._children.trainer()
        return ChildStatus(
            child="trainer",
            role="trainer",
            state=process.state.value,
            since_s=clock.now() - process.since,
            pid=process.pid,
            num_restarts=max(0, self._control.attempt - 1),
            policy_version=self._control.cycle.step,
            num_in_flight=0,
            num_queued=None,
            kv_use_fraction=None,
            signals_age_s=None,
            last_error=_said_of(process) or process.last_error,
        )

    def _replicas(self) -> Iterator[ChildStatus]:
        """Hybrid replicas that have processes, by what they are to the core."""
        hybrids = self._control.hybrids
        for replica_id, process in self._children.replicas().items():
            if hybrids is None:
                return
            hybrid = hybrids.pool[replica_id]
            yield ChildStatus(
                child=replica_id,
                role="trainer",
                state=hybrid.state.value,
                since_s=clock.now() - process.since,
                pid=process.pid,
                num_restarts=0,
                policy_version=PolicyVersion(hybrid.taken) if hybrid.taken >= 0 else None,
                num_in_flight=0,
                num_queued=None,
                kv_use_fraction=None,
                signals_age_s=None,
                last_error=_said_of(process) or hybrid.reason or process.last_error,
            )

    def _oldest_wait(self) -> str:
        oldest = self._control.desk.oldest_wait()
        if oldest is None:
            return ""
        group_id, since = oldest
        return f"group {group_id} has been silent for {clock.now() - since:.0f} s"


def _status_of(engine: EngineLoad) -> EngineStatus:
    return EngineStatus(
        engine=engine.engine,
        num_running=_whole(engine.num_running),
        num_queued=_whole(engine.num_waiting),
        kv_use_fraction=engine.kv_use_fraction,
    )


def _whole(count: float | None) -> int | None:
    return None if count is None else int(count)


def _said_of(process: ProcessStatus) -> str:
    """What a start waits for; empty for one that does not wait."""
    return process.detail if process.state is ProcessState.WAITING else ""


def waiting_for(control: Control) -> str:
    """Who waits for whom, as a sentence."""
    cycle, parts = control.cycle, [_of_trainer(control)]
    if cycle.publishing is not None and cycle.phase not in (Phase.EXPORTING, Phase.SETTLING):
        parts.append(f"engines load v{cycle.publishing}: {_loading(control)}")
    if cycle.saving_step is not None and cycle.phase is not Phase.SAVING:
        parts.append(f"the checkpoint of step {cycle.saving_step} is being written")
    if (change := control.plans.change) is not None and change.current is not None:
        parts.append(f"the plan changes: {in_words(change.current)}")
    elif control.plans.lent_from is not None:
        left = control.desk.num_batches(PolicyVersion(control.cycle.step))
        parts.append(f"nothing serves: {left} batches are left before a server comes back")
    elif idle := control.plans.idle:
        parts.append(f"slots {slots_in_words(sorted(idle))} are idle since a replica was lost")
    members = control.pool.members
    if members and all(member.is_drained_by_operator for member in members):
        parts.append("every server is drained by order: nothing is asked of any until undrain")
    if (progress := control.evaluator.progress) is not None:
        num_ended, total = progress
        parts.append(f"{num_ended} of {total} trajectories are evaluated")
    return "; ".join(parts)


_WAITS: Final = {
    Phase.EXPORTING: "engines wait for the trainer to write weights",
    Phase.COLLECTING: "the trainer waits for rollouts",
    Phase.TRAINING: "rollouts go on while the trainer trains",
    Phase.SAVING: "the trainer writes a checkpoint",
    Phase.EVALUATING: "the trainer waits for the evaluation of the version before",
    Phase.RESHAPING: "the trainer is being started anew in another layout; rollouts go on",
    Phase.STOPPED: "stopping",
}


def _of_trainer(control: Control) -> str:
    match control.cycle.phase:
        case Phase.STARTING:
            parts = [] if control.ready_step is not None else ["the trainer"]
            answering = set(control.pool.answering_ids)
            parts += [m.instance_id for m in control.pool.members if m.instance_id not in answering]
            return f"waiting for {', '.join(parts) or 'nothing'} to come up"
        case Phase.SETTLING:
            return f"the trainer waits for weight reloads: {_loading(control)}"
        case phase:
            return _WAITS[phase]


def _loading(control: Control) -> str:
    """Whom the open publication waits for."""
    if control.publication.is_being_checked:
        return "the files are being checked"
    return ", ".join(control.publication.waiting_for) or "the trainer's verdict"
