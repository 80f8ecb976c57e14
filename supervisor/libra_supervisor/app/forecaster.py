"""Each step beside what the cost model expected of it, and what is learned for the next plan."""

from collections.abc import Callable, Sequence

import structlog
from msgspec.structs import replace

from libra.config.run import RunConfig
from libra.planner.applied import planned_config
from libra.planner.calibration import Calibration, Observation, observe
from libra.planner.forecast import (
    RunningPlan,
    StepSeen,
    error_fraction,
    forecast_of,
    observations_of,
)
from libra.planner.plan import Plan
from libra.planner.pricing import layout_of
from libra.planner.replan_candidates import replica_gpus, with_replicas
from libra.planner.train_layout import TrainLayout
from libra.rollouts.group import CompleteGroup
from libra_supervisor.instances.serving_meter import ServingMeter
from libra_supervisor.loop.commands import WriteStep
from libra_supervisor.records.calibration import CalibrationStore
from libra_supervisor.records.step import StepRecord

_log = structlog.get_logger()


class Forecaster:
    """`libra_supervisor.loop.execute.Judge` of a run whose hardware and model are described.

    `latest` is the newest completed record: written by the thread that completes it, read by the
    metrics page.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        *,
        book: Calibration | None,
        store: CalibrationStore | None,
        meter: ServingMeter,
    ) -> None:
        """`book` is None when nothing can be predicted; `store` None when nothing is kept."""
        self.latest: StepRecord | None = None
        self.book = book
        self._store = store
        self._meter = meter
        self._device = config.control.device
        self._longest_tokens = 0
        self._is_store_broken = False
        self._running = RunningPlan(
            config=config,
            layout=_layout(config, plan),
            tps=tuple(instance.tp for instance in plan.instances),
        )

    def follow(self, plan: Plan) -> None:
        """Expect of the next steps what this plan would do."""
        config = planned_config(self._running.config, plan)
        self._running = RunningPlan(
            config=config,
            layout=_layout(config, plan),
            tps=tuple(instance.tp for instance in plan.instances),
        )

    def __call__(self, command: WriteStep) -> Callable[[], StepRecord]:
        """Take what belongs to the step; the rest is done where what this returns is called."""
        serving = self._meter.take()

        def complete() -> StepRecord:
            record = command.record
            if self.book is not None:
                batch = lengths_of(command.groups)
                self._longest_tokens = max(self._longest_tokens, max(map(sum, batch), default=0))
                seen = StepSeen(
                    batch=batch,
                    finished=command.finished,
                    recompute_s=record.recompute_s,
                    update_s=record.train_s,
                    rollout_s=record.rollout_s,
                    export_s=record.export_s,
                    sync_s=record.reload_s,
                    peak_bytes=self._peak_bytes(record),
                    longest_tokens=self._longest_tokens,
                    serving=serving,
                )
                record = self._completed(record, self.book, seen)
                self.book = self._learned(
                    self.book, observations_of(self._running, self.book, seen)
                )
            self.latest = record
            return record

        return complete

    def _completed(self, record: StepRecord, book: Calibration, seen: StepSeen) -> StepRecord:
        expected = forecast_of(self._running, book, seen)
        return replace(
            record,
            train_predicted_s=expected.train_s,
            train_error_fraction=error_fraction(
                predicted=expected.train_s, measured=seen.recompute_s + seen.update_s
            ),
            rollout_predicted_s=expected.rollout_s,
            rollout_error_fraction=error_fraction(
                predicted=expected.rollout_s, measured=seen.rollout_s
            ),
            memory_predicted_bytes=expected.peak_bytes,
            memory_error_fraction=error_fraction(
                predicted=expected.peak_bytes, measured=seen.peak_bytes
            ),
        )

    def learn(self, observation: Observation) -> None:
        """Take in what was measured outside of a step."""
        if self.book is not None:
            self.book = self._learned(self.book, (observation,))

    def _learned(self, book: Calibration, observations: Sequence[Observation]) -> Calibration:
        if self._store is not None and not self._is_store_broken:
            try:
                return self._store.add(
                    Calibration(hardware=book.hardware, model=book.model), observations
                )
            except OSError as error:
                self._is_store_broken = True
                _log.warning("calibration_not_stored", why=str(error))
        for observation in observations:
            book = observe(book, observation)
        return book

    def _peak_bytes(self, record: StepRecord) -> int | None:
        """On the CPU the process's own memory hides what tensors take."""
        return record.trainer_peak_memory_bytes if self._device == "cuda" else None


def lengths_of(groups: Sequence[CompleteGroup]) -> tuple[tuple[int, int], ...]:
    """(tokens given, tokens sampled) of every trajectory."""
    return tuple(
        (len(trajectory.token_ids) - sampled, sampled)
        for group in groups
        for trajectory in group.trajectories
        for sampled in (trajectory.num_response_tokens,)
    )


def _layout(config: RunConfig, plan: Plan) -> TrainLayout:
    """The core with its hybrid replicas, which are more data parallelism."""
    core = layout_of(plan.train, micro_batch_size=config.training.micro_batch_size)
    return with_replicas(core, len(plan.hybrids), replica_gpus(core))
