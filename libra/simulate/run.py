"""One run on virtual time: the real buffer, staleness law and scheduler on a simulated fleet.

Prompts are admitted as staleness allows, groups complete in any order, a batch trains for as long
as the cost model says for its real lengths, then the weights are exported and every instance
reloads (libra.simulate.reload) while the trainer goes on; the next export waits for the last one's
reload.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from libra.config.run import RunConfig
from libra.data.cursor import PromptRef
from libra.errors import ConfigError, InvariantError
from libra.ids import GroupId, InstanceId, PolicyVersion, PromptId, TrajectoryId
from libra.planner.cost_models import CostModels
from libra.planner.demand import Demand
from libra.planner.matching import matched, next_number_after
from libra.planner.plan import Plan
from libra.planner.pricing import layout_of, train_work
from libra.planner.replan_candidates import replica_gpus, with_replicas
from libra.planner.replan_observed import StepObserved
from libra.planner.report import Estimate
from libra.planner.search import format_tps
from libra.planner.train_layout import TrainLayout
from libra.rollouts.accounts import BufferLimits
from libra.rollouts.buffer import RolloutBuffer
from libra.rollouts.group import AdmittedGroup, CompleteGroup
from libra.rollouts.staleness import staleness
from libra.rollouts.trajectory import Trajectory
from libra.simulate.engine import EngineRequest
from libra.simulate.fleet import Fleet, FleetEvents, FleetShape, LengthBound
from libra.simulate.lengths import LengthSource
from libra.simulate.meter import RunMeter
from libra.simulate.reconfiguration import PlanChange, Reconfiguration, SwitchTimes
from libra.simulate.reload import Reload, reload_times
from libra.simulate.result import SimulationResult, StepRecord
from libra.simulate.timeline import Timeline
from libra.wire.instance import VersionSpan

_FEWEST_STEPS = 2
_ASK_AGAIN_S = 1.0
"""When a request that was turned away is tried again."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate. `config` has the plan's split written into it."""

    name: str
    config: RunConfig
    plan: Plan
    models: CostModels
    num_gpus: int
    estimate: Estimate | None = None
    """What the planner expected."""

    length_bounds: tuple[LengthBound, ...] = ()
    """Not empty: a router that knows lengths, instead of the real one."""

    more_degrees: frozenset[int] = frozenset()
    """TP degrees that instances may get later."""

    switch_s: float = 0.0
    """Colocated runs: time to hand the GPUs from rollout to training and back, once per step."""

    @property
    def layout(self) -> TrainLayout:
        return self.layout_of(self.plan)

    def layout_of(self, plan: Plan) -> TrainLayout:
        """Replicas are more of the core's data parallelism."""
        core = layout_of(plan.train, micro_batch_size=self.config.training.micro_batch_size)
        return with_replicas(core, len(plan.hybrids), replica_gpus(core))


class Steward(Protocol):
    """Who may change the plan while the run goes on."""

    @property
    def times(self) -> SwitchTimes: ...

    def on_step(self, seen: StepObserved, plan: Plan, now: float) -> Plan | None:
        """The plan to go over to after this step; None to stay. Not asked during a change."""
        ...

    def on_changed(self, stalled_s: float, now: float) -> None:
        """The change has ended; training was held for `stalled_s`."""
        ...


def simulate(
    scenario: Scenario,
    lengths: LengthSource,
    *,
    num_steps: int,
    seed: int,
    steward: Steward | None = None,
) -> SimulationResult:
    """Run `num_steps` training steps. Equal arguments give equal results.

    Raises ConfigError for fewer than two steps: rates need one to warm up and one to measure.
    Raises InvariantError when the run stops making progress, which is a bug.
    """
    if num_steps < _FEWEST_STEPS:
        raise ConfigError(f"a simulation needs at least {_FEWEST_STEPS} steps, not {num_steps}")
    run = _Run(scenario, lengths, num_steps=num_steps, seed=seed)
    run.steward = steward
    return run.result()


class _Run:
    """The state of one simulated run; it is the only writer of it."""

    def __init__(
        self, scenario: Scenario, lengths: LengthSource, *, num_steps: int, seed: int
    ) -> None:
        config = scenario.config
        self._scenario, self._lengths, self._seed = scenario, lengths, seed
        self._rng = np.random.default_rng(seed)
        self._timeline = Timeline()
        self._buffer = RolloutBuffer(
            BufferLimits(
                n_samples=config.algorithm.n_samples,
                batch_size=config.training.batch_size,
                max_concurrent=config.rollout.max_concurrent_rollouts,
                max_head_offpolicyness=config.rollout.max_head_offpolicyness,
            )
        )
        degrees = {instance.tp for instance in scenario.plan.instances} | scenario.more_degrees
        memory = scenario.models.rollout_memory
        self._fleet = Fleet(
            self._timeline,
            FleetShape(
                placements=scenario.plan.instances,
                cost_of={tp: scenario.models.instance.cost(tp) for tp in degrees},
                kv_capacity_of={tp: memory.kv_capacity_tokens(tp) for tp in degrees},
                max_new_tokens=config.rollout.max_new_tokens,
                length_bounds=scenario.length_bounds,
            ),
            scheduling=config.heterogeneous_rollout.scheduling,
            events=FleetEvents(on_finished=self._on_finished, on_refused=self._on_refused),
        )
        self._meter = RunMeter(
            self._fleet, max_head_offpolicyness=config.rollout.max_head_offpolicyness
        )
        self._times = reload_times(scenario.models.publish, degrees)
        self._num_steps = num_steps
        self._num_groups = 0
        self._num_refused = 0
        self._trained = PolicyVersion(0)
        self._served = PolicyVersion(0)
        self._is_training = False
        self._idle_since = 0.0
        self._group_of: dict[TrajectoryId, tuple[AdmittedGroup, int]] = {}
        self._num_left: dict[GroupId, int] = {}
        self._num_complete = 0
        self._waits_for_version = False
        self._is_publishing = False
        self._waiting_export: StepRecord | None = None
        self._steps: list[StepRecord] = []
        self.steward: Steward | None = None
        self._plan, self._layout = scenario.plan, scenario.layout
        self._change: Reconfiguration | None = None
        self._next_number = next_number_after(scenario.plan)
        self._is_held = False

    def result(self) -> SimulationResult:
        self._admit()
        if not self._timeline.run(until=lambda: len(self._steps) == self._num_steps):
            raise InvariantError(
                f"simulated run {self._scenario.name!r} stands still after step {self._trained}: "
                f"{self._buffer.counts}"
            )
        bound = self._scenario.config.rollout.max_head_offpolicyness
        warm_up = min(self._num_steps - 1, 1 + int(min(bound, self._num_steps)))
        return SimulationResult(
            name=self._scenario.name,
            train=str(self._layout),
            rollout=format_tps([instance.tp for instance in self._plan.instances]),
            num_gpus=self._scenario.num_gpus,
            seed=self._seed,
            steps=tuple(self._steps),
            num_warm_up_steps=max(1, warm_up),
            uses=self._meter.uses(elapsed_s=self._timeline.now),
            num_stale_dropped=self._buffer.dropped_by_reason.get("stale", 0),
            num_refused=self._num_refused,
        )

    def _admit(self) -> None:
        for _ in range(self._buffer.num_admissible(serving_version=self._served)):
            group = self._buffer.admit_pending() or self._new_group()
            self._start(group)
        # The buffer counts by looking at every group, so it is asked again only after something
        # has changed that kept prompts back: concurrency, or else version and batch.
        free = self._scenario.config.rollout.max_concurrent_rollouts - len(self._group_of)
        self._waits_for_version = free >= self._scenario.config.algorithm.n_samples

    def _new_group(self) -> AdmittedGroup:
        self._num_groups += 1
        name = PromptId(f"p{self._num_groups}")
        group = self._buffer.admit(PromptRef(prompt_id=name, row=self._num_groups, epoch=0))
        if group is None:
            raise InvariantError(f"the new prompt {name} is quarantined")
        return group

    def _start(self, group: AdmittedGroup) -> None:
        self._num_left[group.group_id] = group.n_samples
        drawn = self._lengths.group(group.prompt.row, step=self._trained, n_samples=group.n_samples)
        for index, response_tokens in enumerate(drawn.response_tokens):
            request = EngineRequest(
                trajectory_id=group.trajectory_id(index),
                prompt_id=group.prompt.prompt_id,
                prompt_tokens=drawn.prompt_tokens,
                response_tokens=response_tokens,
            )
            self._group_of[request.trajectory_id] = (group, index)
            self._buffer.on_started(group.group_id, index, now=self._timeline.now)
            self._fleet.submit(request)

    def _on_refused(self, request: EngineRequest, _reason: str) -> None:
        self._num_refused += 1
        self._timeline.at(self._timeline.now + _ASK_AGAIN_S, lambda: self._fleet.submit(request))

    def _on_finished(self, request: EngineRequest, instance_id: InstanceId) -> None:
        group, index = self._group_of.pop(request.trajectory_id)
        self._buffer.on_finished(self._trajectory(group, index, request, instance_id))
        self._meter.on_ended(
            prompt_tokens=request.prompt_tokens, response_tokens=request.response_tokens
        )
        self._num_left[group.group_id] -= 1
        if self._num_left[group.group_id]:
            return
        del self._num_left[group.group_id]
        self._num_complete += group.n_samples
        if not self._waits_for_version:
            self._admit()
        self._train_if_possible()

    def _trajectory(
        self, group: AdmittedGroup, index: int, request: EngineRequest, instance_id: InstanceId
    ) -> Trajectory:
        if request.oldest_version is None:
            raise InvariantError(f"{request.trajectory_id} finished without a first token")
        return Trajectory(
            trajectory_id=request.trajectory_id,
            prompt_id=request.prompt_id,
            group_id=group.group_id,
            sample_index=index,
            # Nobody reads the tokens here; their number stands in the span.
            token_ids=(),
            loss_mask=(),
            rollout_logprobs=(),
            version_spans=(VersionSpan(request.oldest_version, 0, request.response_tokens),),
            num_prompt_tokens=request.prompt_tokens,
            finish_reason="stop",
            # Two samples in three: hardly any group is flat.
            reward=float(self._rng.random() < 2 / 3),
            instance_ids=(instance_id,),
        )

    def _train_if_possible(self) -> None:
        if (
            self._is_training
            or self._is_held
            or self._num_complete < self._scenario.config.training.batch_size
        ):
            return
        batch = self._buffer.take_batch(version=self._trained)
        # Stale groups left as well.
        self._num_complete = self._buffer.num_complete
        if batch is None:
            self._admit()
            return
        self._is_training = True
        self._admit()
        started_at = self._timeline.now
        trajectories = [t for group in batch for t in group.trajectories]
        demand = Demand(
            prompt_tokens=tuple(t.num_prompt_tokens for t in trajectories),
            response_tokens=tuple(t.version_spans[-1].end for t in trajectories),
            source="simulated batch",
        )
        work = train_work(self._scenario.config, demand)
        took_s = self._scenario.models.train.cost(self._layout, work).total_s
        ends_at = started_at + self._scenario.switch_s + took_s
        record = _record(self._trained, batch, demand, started_at=started_at, ended_at=ends_at)
        waited_s = started_at - self._idle_since
        self._timeline.at(
            ends_at, lambda: self._on_trained(msgspec.structs.replace(record, waited_s=waited_s))
        )

    def _on_trained(self, record: StepRecord) -> None:
        self._trained = PolicyVersion(self._trained + 1)
        weights = self._scenario.config.weights
        if weights.rollout_weight_sync_mode == "none" or self._trained % weights.sync_interval:
            self._end_step(record)
        elif self._is_publishing:
            self._waiting_export = record
        else:
            self._export(record)

    def _export(self, record: StepRecord) -> None:
        self._is_publishing = True
        self._timeline.at(
            self._timeline.now + self._times.export_s, lambda: self._on_exported(record)
        )

    def _on_exported(self, record: StepRecord) -> None:
        version = self._trained
        Reload(
            self._timeline,
            self._fleet,
            weights=self._scenario.config.weights,
            times=self._times,
            version=version,
            on_committed=lambda: self._on_committed(version),
        ).start()
        self._end_step(record)

    def _on_committed(self, version: PolicyVersion) -> None:
        self._served = version
        self._is_publishing = False
        if self._change is not None:
            self._change.on_committed()
        self._admit()
        if (record := self._waiting_export) is not None:
            self._waiting_export = None
            self._export(record)

    def _end_step(self, record: StepRecord) -> None:
        now = self._timeline.now
        self._steps.append(msgspec.structs.replace(record, freed_at=now))
        self._is_training = False
        self._idle_since = now
        self._buffer.drop_stale(version=self._trained)
        self._num_complete = self._buffer.num_complete
        if self._change is not None:
            self._change.on_boundary()
        if self.steward is not None:
            self._look(self.steward)
        self._admit()
        self._train_if_possible()

    def _look(self, steward: Steward) -> None:
        """Show the step that ended, and go over to another plan if that is wanted."""
        seen = self._meter.take_seen(self._steps)
        wanted = steward.on_step(seen, self._plan, self._timeline.now)
        if wanted is None:
            return
        wanted = matched(self._plan, wanted, next_number=self._next_number)
        if self._change is not None:
            raise InvariantError("another plan is wanted while one is being changed")
        planner = self._scenario.config.global_resource_planner

        def done(stalled_s: float) -> None:
            self._change = None
            steward.on_changed(stalled_s, self._timeline.now)

        self._change = Reconfiguration(
            self,
            self._timeline,
            self._fleet,
            PlanChange(
                old=self._plan,
                new=wanted,
                times=steward.times,
                drains=planner.runtime_drain_before_reconfigure,
            ),
            done=done,
        )
        self._next_number = max(self._next_number, next_number_after(wanted))
        self._plan = wanted
        self._change.start()

    # libra.simulate.reconfiguration.ChangingRun

    @property
    def is_publishing(self) -> bool:
        return self._is_publishing

    @property
    def is_training(self) -> bool:
        return self._is_training

    @property
    def served(self) -> PolicyVersion:
        return self._served

    def hold(self, *, is_held: bool) -> None:
        self._is_held = is_held
        if not is_held:
            self._train_if_possible()

    def train_as(self, plan: Plan) -> None:
        self._layout = self._scenario.layout_of(plan)


def _record(
    version: PolicyVersion,
    batch: Sequence[CompleteGroup],
    demand: Demand,
    *,
    started_at: float,
    ended_at: float,
) -> StepRecord:
    ages = [staleness(consumed_at=version, oldest=group.oldest_version) for group in batch]
    return StepRecord(
        step=version + 1,
        started_at=started_at,
        ended_at=ended_at,
        freed_at=ended_at,
        waited_s=0.0,
        num_response_tokens=demand.num_response_tokens,
        num_trajectories=demand.num_sequences,
        mean_staleness=sum(ages) / len(ages),
        max_staleness=max(ages),
    )
