"""A world for `Control`: carries out its commands in any order, with faults, and keeps the truth.

The truth (which process holds which weights, what the ranks trained and saved) is kept here from
the commands alone, never read back from the machines under test. Everything that could happen next
waits in `pending`; `step(rng)` lets one of it happen.
"""

from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec

from control_parts import METRICS, RUN, control_with, probe_logprobs, still_plans, trajectory
from libra.config.weights import ReloadMethod
from libra.ids import ChildId, GroupId, Incarnation, InstanceId, PolicyVersion
from libra.planner.plan import Plan, TrainPlacement
from libra.rollouts.evaluation import is_evaluated
from libra.rollouts.group import AdmittedGroup
from libra.rollouts.trajectory import SampleFailed
from libra.weights.judge import judge_acks
from libra.wire.instance import InstanceState, ReloadAck, ReloadRequest
from libra.wire.rank import (
    AcksJudged,
    CheckpointSaved,
    JudgeAcks,
    StepTrained,
    WeightsExported,
    WeightsOffered,
)
from libra_supervisor import events
from libra_supervisor.loop import commands
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.plan_desk import PlanDesk
from libra_supervisor.loop.rollout_state import encoded


class Process(msgspec.Struct, kw_only=True):
    """One engine process as it really is."""

    incarnation: Incarnation
    version: PolicyVersion | None
    manifest_hash: str | None
    answers: bool = False


class World:
    """Two engines and a gang, driven by `control`'s commands."""

    def __init__(  # noqa: PLR0915 - the parts of the truth
        self,
        *,
        num_instances: int = 2,
        offpolicyness: float = 1.0,
        reload_method: ReloadMethod = "inplace",
        plans: PlanDesk | None = None,
        probe_error_of: Callable[[InstanceId], float] = lambda _: 0.0,
        **knobs,
    ) -> None:
        """`knobs` are those of `control_with`."""
        self.now = 0.0
        self.pending: list[events.Event] = []
        self.routes: dict[InstanceId, PolicyVersion] = {}
        self.processes: dict[InstanceId, Process] = {}
        self.saving: dict[int, bytes] = {}
        self.checkpoints: dict[int, bytes] = {}
        """The complete ones: those of which rank 0 has said so."""

        self.trained: list[tuple[int, int, int]] = []
        """(attempt, step, worst staleness) of every batch sent to the ranks."""

        self.written: list[commands.WriteStep] = []
        self.evaluated: list[commands.WriteEvaluation] = []
        self.reloads: list[commands.WriteReload] = []
        self.reconfigurations: list[commands.WriteReconfiguration] = []
        self.retired: set[InstanceId] = set()
        self.draining: set[InstanceId] = set()
        self.asked_again: list[commands.AskAgain] = []
        self.missing: list[commands.SayMissing] = []
        self.kept_plans: list[commands.KeepPlan] = []
        self.plan_in_force: Plan | None = None
        self.stray_acks: list[commands.WriteStrayAck] = []
        self.pinned: list[frozenset[PolicyVersion]] = []
        """What was to be kept each time that versions were retired."""

        self.said: list[commands.Say] = []
        self.answers_as: dict[InstanceId, Incarnation] = {}
        """Strangers that answer in the place of a process, until it is replaced."""

        self.known: list[commands.KnowInstance] = []
        self.ended: commands.EndRun | None = None
        self.replaced: commands.ChangePlan | None = None
        self.judged: list[commands.JudgeProbe] = []
        self.attempt = 0
        self.gang_version: PolicyVersion | None = None
        self.gang_is_busy = False
        """Ranks do one thing after another, except that rank 0 judges ACKs at any time."""

        self.publishing: PolicyVersion | None = None
        """From the order to write it to the committed batch."""

        self.trained_while_publishing: list[int] = []
        """Steps whose batch was sent while a publication was open."""

        self.published: list[tuple[int, PolicyVersion]] = []
        """(attempt, version) of every export ordered."""

        self.loads_to_fail: list[InstanceId] = []
        """Each makes one load of that instance fail, after which nobody knows its weights."""

        self.num_births_of = Counter[InstanceId]()
        self.open_groups: dict[GroupId, AdmittedGroup] = {}
        self.offpolicyness = offpolicyness
        self._births = 0
        self._reload_method = reload_method
        self._probe_error_of = probe_error_of
        desk = plans or still_plans([InstanceId(f"vllm-{k}") for k in range(num_instances)])
        self.placed = {it.instance_id: it for it in desk.started_with.instances}
        self.train = desk.started_with.train
        self._ids = list(self.placed)
        self.control = control_with(
            desk, offpolicyness=offpolicyness, reload_method=reload_method, **knobs
        )

    def boot(self) -> None:
        for instance_id in self._ids:
            self.start_process(instance_id)
        self.start_gang()

    def post(self, event: events.Event) -> None:
        """Let `event` happen now."""
        self.now += 0.01
        if isinstance(event, events.RankSaid) and isinstance(event.event, CheckpointSaved):
            self.checkpoints[event.event.step] = self.saving[event.event.step]
        if isinstance(event, events.RankSaid) and self._ends_work(event.event):
            self.gang_is_busy = False
        for command in self.control.on_event(event, Moment(self.now, int(self.now * 1e9))):
            self._carry_out(command)

    def step(self, rng: Random) -> bool:
        """Let one pending thing happen; False when nothing is pending."""
        if not self.pending or self.ended is not None:
            return False
        self.post(self.pending.pop(rng.randrange(len(self.pending))))
        return True

    def run(self, rng: Random, *, most: int = 5000) -> None:
        """Until the run ends or nothing is left to happen."""
        for _ in range(most):
            if not self.step(rng):
                return
        raise AssertionError("the run neither ends nor waits")

    # Faults

    def start_gang(self) -> None:
        self.attempt += 1
        step = max(self.checkpoints, default=0)
        self.gang_version = PolicyVersion(step)
        self.post(events.CheckpointChosen(self.attempt, step, self.checkpoints.get(step)))
        self.pending.append(events.GangReady(self.attempt, step, 100))

    def lose_gang(self) -> None:
        self.pending = [e for e in self.pending if not isinstance(e, events.RankSaid)]
        self.gang_version = self.publishing = None
        self.gang_is_busy = False
        self.post(events.GangLost(self.attempt, "rank 1 killed by SIGKILL"))
        if self.ended is None:
            self.start_gang()

    def kill_process(self, instance_id: InstanceId) -> None:
        for wanted in self.pending:
            if isinstance(wanted, _Replace) and wanted.instance_id == instance_id:
                # It was about to be replaced: what comes instead starts from the version too.
                self.pending.remove(wanted)
                self.replace_for_reload(wanted, is_asked_for=False)
                return
        if self._end_process(instance_id, is_asked_for=False):
            self.start_process(instance_id)

    def suspect_process(self, instance_id: InstanceId) -> None:
        """Its supervision finds that it hangs, and begins to end it."""
        process = self.processes[instance_id]
        reason = "it has made no progress for 120 s while requests run"
        child_id = ChildId(instance_id)
        self.post(events.ChildSuspected(child_id, process.incarnation, reason, self.now))

    def _end_process(self, instance_id: InstanceId, *, is_asked_for: bool) -> bool:
        process = self.processes.pop(instance_id, None)
        if process is None:
            return False
        self.pending = [e for e in self.pending if not self._is_of(e, process.incarnation)]
        self.post(
            events.ChildExited(
                child_id=ChildId(instance_id),
                incarnation=process.incarnation,
                exit_code=None,
                signal=15 if is_asked_for else 9,
                asked_for=is_asked_for,
                reason="asked to" if is_asked_for else "killed by SIGKILL",
                last_lines=(),
                at=self.now,
            )
        )
        return True

    def start_process(
        self,
        instance_id: InstanceId,
        version: PolicyVersion = PolicyVersion(0),  # noqa: B008 - a number
        manifest_hash: str | None = None,
    ) -> None:
        self._births += 1
        self.num_births_of[instance_id] += 1
        incarnation = Incarnation(f"{instance_id}-{self._births}")
        self.processes[instance_id] = Process(
            incarnation=incarnation, version=version, manifest_hash=manifest_hash
        )
        child = ChildId(instance_id)
        self.post(
            events.ChildStarted(
                child_id=child, pid=1, start_ticks=self._births, incarnation=incarnation, at=0.0
            )
        )
        self.pending.append(events.ChildReady(child, incarnation, 1.0, self.now))

    # Effects

    def _carry_out(self, command: commands.Command) -> None:  # noqa: C901, PLR0912, PLR0915
        match command:
            case commands.PrepareExport(attempt, version):
                assert attempt == self.attempt
                assert version == self.gang_version
                assert self.publishing is None, "two publications at once"
                self.publishing = version
                self.published.append((attempt, version))
                self._work(
                    WeightsExported(
                        version, f"/w/v{version}", f"hash-{self.attempt}-{version}",
                        probe_logprobs(version), 0.1,
                    )
                )  # fmt: skip
            case commands.CheckExport(version, _, manifest_hash):
                self.pending.append(events.ExportChecked(version, manifest_hash, ""))
            case commands.TellRankZero(_, JudgeAcks(request, acks)):
                self._rank_says(self._judge(request, acks))
            case commands.SendBatch(_, step, groups):
                self._train(step, groups)
            case commands.SaveRun(_, step, state):
                assert step == self.gang_version, "a later step is saved as this one"
                self.saving[step] = encoded(state)
                self._rank_says(CheckpointSaved(step, f"/c/{step}", 0.1))
            case commands.SendReload(instance_id, incarnation, request):
                self._reload(instance_id, incarnation, request)
            case commands.AskInstance(instance_id, incarnation):
                self._answer(instance_id, incarnation)
            case commands.RouteTo(instance_id, incarnation, version):
                assert instance_id not in self.draining, "routed to one that is to leave"
                process = self.processes[instance_id]
                assert process.incarnation == incarnation
                assert process.version == version, "routed to weights it does not hold"
                self.routes[instance_id] = version
            case commands.Unroute(instance_id, _):
                self.routes.pop(instance_id, None)
            case commands.ReplaceInstance(instance_id, _) if instance_id in self.retired:
                pass  # it is on its way out, or has gone
            case commands.ReplaceInstance(instance_id, _):
                is_coming = any(isinstance(it, _Replace) for it in self.pending)
                assert instance_id in self.processes or is_coming, "its process is gone already"
                self.kill_process(instance_id)
            case commands.StartGroup(group):
                self.open_groups[group.group_id] = group
                for index in range(group.n_samples):
                    self.pending.append(events.SampleStarted(group.group_id, index))
                    self._sample(group, index)
            case commands.CancelGroup(group_id):
                self._drop_samples({group_id})
            case commands.CancelAllGroups():
                self._drop_samples(set(self.open_groups))
            case commands.StartEvaluated(group):
                self.open_groups[group.group_id] = group
                self.pending.append(events.SampleStarted(group.group_id, 0))
                self._sample(group, 0)
            case commands.CancelEvaluated(group_id):
                self._drop_samples({group_id})
            case commands.WriteEvaluation():
                self.evaluated.append(command)
            case commands.WriteStep():
                self.written.append(command)
            case commands.WriteStrayAck():
                self.stray_acks.append(command)
            case commands.WriteReload(record):
                self.reloads.append(command)
                assert len({ack.nonce for ack in record.acks} - {record.nonce}) == 0
                assert {ack.instance_id for ack in record.acks} >= set(record.accepted)
                if record.outcome == "committed" and not record.is_catch_up:
                    assert record.policy_version == self.publishing
                    self.publishing = None
            case commands.Say():
                self.said.append(command)
            case commands.EndRun():
                assert self.ended is None
                self.ended = command
            case commands.JudgeProbe():
                self.judged.append(command)
            case commands.ChangePlan():
                self.replaced = command
            case commands.KnowInstance():
                self.known.append(command)
            case commands.AskAgain():
                self.asked_again.append(command)
            case commands.SayMissing():
                self.missing.append(command)
            case commands.AddInstance(placement, has_devices):
                assert has_devices
                assert placement.instance_id not in self.processes, "it runs already"
                self.retired.discard(placement.instance_id)
                self.placed[placement.instance_id] = placement
                self._check_slots()
                self.start_process(placement.instance_id)
            case commands.DrainInstance(instance_id, _):
                assert instance_id not in self.routes, "drained while requests are routed to it"
                self.draining.add(instance_id)
                self.pending.append(events.InstanceDrained(instance_id))
            case commands.KeepInstance(instance_id):
                self.draining.discard(instance_id)
                self.pending = [e for e in self.pending if e != events.InstanceDrained(instance_id)]
            case commands.RetireInstance(instance_id) if instance_id in self.retired:
                pass  # it is on its way out already
            case commands.RetireInstance(instance_id):
                self.pending = [e for e in self.pending if not _is_replacement(e, instance_id)]
                self.retired.add(instance_id)
                self.draining.discard(instance_id)
                self._end_process(instance_id, is_asked_for=True)
                self.pending.append(events.InstanceRetired(instance_id, is_clean=True))
                self.placed.pop(instance_id, None)
            case commands.ForgetInstance(instance_id):
                assert instance_id not in self.processes
                self.routes.pop(instance_id, None)
            case commands.ReshapeGang(plan):
                self._reshape(plan.train)
            case commands.KeepPlan():
                self.kept_plans.append(command)
            case commands.WritePlan(plan):
                self.plan_in_force = plan
            case commands.WriteReconfiguration():
                self.reconfigurations.append(command)
            case commands.ReportReconfiguration(ended):
                self.pending.append(ended)
            case commands.RetireVersions(pinned):
                self.pinned.append(pinned)

    def _reshape(self, train: TrainPlacement) -> None:
        """The gang ends, and another one reads the newest checkpoint."""
        self.pending = [e for e in self.pending if not isinstance(e, _OF_GANG)]
        self.train = train
        self._check_slots()
        self.publishing = None
        self.gang_is_busy = False
        self.start_gang()

    def _check_slots(self) -> None:
        used = [*self.train.slots, *(s for it in self.placed.values() for s in it.slots)]
        assert len(used) == len(set(used)), "a slot has two owners"

    def _work(self, said) -> None:
        """Rank 0 is busy until it says so."""
        assert not self.gang_is_busy, "the ranks were given work while they had some"
        self.gang_is_busy = True
        self._rank_says(said)

    def _rank_says(self, said) -> None:
        self.pending.append(events.RankSaid(self.attempt, said))

    def _ends_work(self, said) -> bool:
        match said:
            case StepTrained(metrics=metrics):
                return metrics is not None
            case WeightsExported() | WeightsOffered() | CheckpointSaved():
                return True
            case _:
                return False

    def _probe(self, instance_id: InstanceId) -> tuple[float, ...]:
        first, second = probe_logprobs(self.processes[instance_id].version)
        return (first, second - self._probe_error_of(instance_id))

    def _judge(self, request: ReloadRequest, acks: tuple[ReloadAck, ...]) -> AcksJudged:
        return judge_acks(
            request,
            acks,
            trainer_probe_logprobs=probe_logprobs(request.policy_version),
            probe_tolerance=1e-3,
        )

    def _train(self, step, groups) -> None:
        assert self.gang_version is not None
        consumed_at = self.gang_version
        assert step == consumed_at + 1
        lags = [consumed_at - t.oldest_version for g in groups for t in g.trajectories]
        self.trained.append((self.attempt, step, max(lags)))
        self.gang_version = PolicyVersion(step)
        if self.publishing is not None:
            self.trained_while_publishing.append(step)
        self._work(StepTrained(0, step, METRICS))
        self._rank_says(StepTrained(1, step, None))

    def _reload(self, instance_id, incarnation, request: ReloadRequest) -> None:
        process = self.processes.get(instance_id)
        if process is None or process.incarnation != incarnation:
            self.pending.append(
                events.ReloadAnswered(instance_id, incarnation, request.nonce, None, "reset")
            )
            return
        if self._reload_method == "restart":
            self._supersede(instance_id)
            self.pending.append(_Replace(instance_id, incarnation, request))
            return
        if not request.force:
            assert process.version is None or process.version < request.policy_version
        if instance_id in self.loads_to_fail:
            self.loads_to_fail.remove(instance_id)
            process.version = process.manifest_hash = None
            self._acknowledge(instance_id, incarnation, request, error="loading failed")
            return
        process.version = request.policy_version
        process.manifest_hash = request.manifest_hash
        self._acknowledge(instance_id, incarnation, request)

    def _supersede(self, instance_id: InstanceId) -> None:
        """The newest request decides what the next process starts from."""
        for wanted in list(self.pending):
            if isinstance(wanted, _Replace) and wanted.instance_id == instance_id:
                self.pending.remove(wanted)
                answer = events.ReloadAnswered(
                    instance_id, wanted.incarnation, wanted.request.nonce, None, "superseded"
                )
                self.pending.append(answer)

    def replace_for_reload(self, wanted: "_Replace", *, is_asked_for: bool = True) -> None:
        """End the process and start another from the version, which acknowledges."""
        instance_id, request = wanted.instance_id, wanted.request
        # Whatever runs there by now: an earlier batch may have replaced what this one asked for.
        self._end_process(instance_id, is_asked_for=is_asked_for)
        self.start_process(instance_id, request.policy_version, request.manifest_hash)
        self._acknowledge(instance_id, wanted.incarnation, request)

    def _acknowledge(
        self,
        instance_id: InstanceId,
        asked: Incarnation,
        request: ReloadRequest,
        *,
        error: str | None = None,
        **changes: object,
    ) -> None:
        ack = ReloadAck(
            instance_id=instance_id,
            incarnation=self.processes[instance_id].incarnation,
            run_id=request.run_id,
            nonce=request.nonce,
            policy_version=self.processes[instance_id].version,
            method=self._reload_method,
            strategy=request.strategy,
            lock_wait_s=0.0,
            process_stop_s=0.0,
            model_load_s=0.1,
            total_s=0.2,
            manifest_hash=request.manifest_hash,
            verified=("manifest", "files", "load", "probe"),
            probe_logprobs=self._probe(instance_id),
            error=error,
        )
        ack = msgspec.structs.replace(ack, **changes)
        self.pending.append(events.ReloadAnswered(instance_id, asked, request.nonce, ack, ""))

    def _answer(self, instance_id, incarnation) -> None:
        process = self.processes[instance_id]
        if process.incarnation != incarnation:
            return
        state = InstanceState(
            instance_id=instance_id,
            incarnation=self.answers_as.pop(instance_id, incarnation),
            run_id=RUN,
            policy_version=process.version,
            is_paused=False,
            manifest_hash=process.manifest_hash,
        )
        self.pending.append(
            events.InstanceAnswered(instance_id, incarnation, "http://x", state, None)
        )

    def _sample(self, group: AdmittedGroup, index: int) -> None:
        """The sample's end waits in `pending` behind its start, as a closure over the routes."""
        self.pending.append(_Generate(group, index))

    def _drop_samples(self, groups: set[GroupId]) -> None:
        self.pending = [e for e in self.pending if getattr(e, "group_id", None) not in groups]
        for group_id in groups:
            self.open_groups.pop(group_id, None)

    def _is_of(self, event, incarnation: Incarnation) -> bool:
        is_under_way = isinstance(event, _Replace)
        return not is_under_way and getattr(event, "incarnation", None) == incarnation


def _is_replacement(event, instance_id) -> bool:
    return isinstance(event, _Replace) and event.instance_id == instance_id


_OF_GANG = (events.RankSaid, events.GangReady, events.ExportChecked)


class _Generate(msgspec.Struct, frozen=True):
    """Not an event: a sample that is about to be answered by whoever is routed to."""

    group: AdmittedGroup
    index: int

    @property
    def group_id(self) -> GroupId:
        return self.group.group_id


class _Replace(msgspec.Struct, frozen=True):
    """Not an event: a process that is about to be replaced by a reload."""

    instance_id: InstanceId
    incarnation: Incarnation
    request: ReloadRequest


class RandomWorld(World):
    """Samples are answered by a routed engine, with the version it holds at that moment."""

    failure_chance = 0.0

    hopeless: frozenset[str] = frozenset()
    """Prompts whose every sample is without a reward."""

    is_disk_stuck = False
    """Checkpoints are begun and do not get done."""

    is_evaluation_stuck = False
    """Answers for evaluations do not come."""

    @staticmethod
    def is_held(event: object) -> bool:
        """Replace it to keep events of a kind from happening."""
        del event
        return False

    def step(self, rng: Random) -> bool:
        if self.ended is not None or not self.pending:
            return False
        ready = [i for i, e in enumerate(self.pending) if self._can_happen(e)]
        if not ready:
            return False
        self.happen(self.pending.pop(rng.choice(ready)), rng)
        return True

    def happen(self, event: object, rng: Random) -> None:
        if isinstance(event, _Replace):
            self.replace_for_reload(event)
            return
        if not isinstance(event, _Generate):
            self.post(event)
            return
        group, index = event.group, event.index
        if group.prompt.prompt_id in self.hopeless:
            failed = SampleFailed("reward", "returned None")
            self.post(events.SampleGaveUp(group.group_id, index, failed))
        elif rng.random() < self.failure_chance:
            failed = SampleFailed("engine", "connection reset")
            self.post(events.SampleGaveUp(group.group_id, index, failed))
        else:
            version = self.routes[rng.choice(sorted(self.routes))]
            done = trajectory(group, index, version, float(rng.random() < 0.5))
            self.post(events.SampleFinished(done))

    def _can_happen(self, event: object) -> bool:
        if isinstance(event, events.RankSaid) and isinstance(event.event, CheckpointSaved):
            return not self.is_disk_stuck
        if self.is_held(event):
            return False
        if not isinstance(event, _Generate):
            return True
        if self.is_evaluation_stuck and is_evaluated(event.group_id):
            return False
        has_started = not any(
            isinstance(e, events.SampleStarted)
            and (e.group_id, e.sample_index) == (event.group.group_id, event.index)
            for e in self.pending
        )
        return has_started and bool(self.routes)
