"""A reload batch on its way, with everything that its line in reloads.jsonl will say. Pure."""

import msgspec

from libra.config.weights import WeightsConfig
from libra.ids import InstanceId
from libra.weights.judge import STOP_FACTOR
from libra.weights.reload import ReloadBatch
from libra.wire.instance import ReloadAck
from libra.wire.rank import AcksJudged
from libra_supervisor.loop.moment import Moment
from libra_supervisor.records.reload import RefusedAck, ReloadRecord


class OpenBatch(msgspec.Struct, kw_only=True):
    """The machine, and what came in the course of it."""

    batch: ReloadBatch
    is_catch_up: bool
    attempt: int
    begun_at: float
    trainer_probe_logprobs: tuple[float, ...]
    """Under the batch's version: a newer one may be exported while it is open."""

    verdict: AcksJudged | None = None
    acks: list[ReloadAck] = []
    """That were taken in, in the order of coming; those that report a failure too."""

    refused_acks: list[RefusedAck] = []
    quarantined: dict[InstanceId, str] = {}

    @property
    def is_whole(self) -> bool:
        """Whether every member has proved the version."""
        return all(state == "acked" for state in self.batch.state_of.values())

    def has_failed(self, instance_id: InstanceId) -> bool:
        """Whether it told of its failure itself, so that its process lives."""
        return any(ack.instance_id == instance_id and ack.error is not None for ack in self.acks)

    def was_aborted(self, instance_id: InstanceId) -> bool:
        """Whether its transfer was broken off by another member."""
        return any(ack.instance_id == instance_id and ack.was_aborted for ack in self.acks)

    def record(self, outcome: str, weights: WeightsConfig, *, at: Moment) -> ReloadRecord:
        request, verdict = self.batch.request, self.verdict
        return ReloadRecord(
            policy_version=request.policy_version,
            nonce=request.nonce,
            attempt=self.attempt,
            is_catch_up=self.is_catch_up,
            method=weights.rollout_weight_reload_method,
            strategy=weights.rollout_weight_reload_strategy,
            manifest_hash=request.manifest_hash,
            acks=tuple(self.acks),
            accepted=() if verdict is None else verdict.accepted,
            refused={} if verdict is None else verdict.refused,
            refused_acks=tuple(self.refused_acks),
            quarantined=dict(self.quarantined),
            outcome=outcome,
            slowest_instance=None if verdict is None else verdict.slowest_instance,
            slowest_total_s=0.0 if verdict is None else verdict.slowest_total_s,
            probe_difference=0.0 if verdict is None else verdict.probe_difference,
            total_s=at.now - self.begun_at,
            wall_time_ns=at.wall_ns,
        )


class ReloadCounts:
    """Of all batches since the process began, for /metrics."""

    def __init__(self) -> None:
        self.num_batches = {"committed": 0, "caught_up": 0, "failed": 0, "cancelled": 0}
        self.num_refused_acks = 0
        self.num_quarantined = 0
        self.last: ReloadRecord | None = None
        """The newest committed batch of the whole fleet."""

    def on_written(self, record: ReloadRecord) -> None:
        outcome = record.outcome.partition(":")[0]
        is_committed = outcome == "committed"
        self.num_batches["caught_up" if is_committed and record.is_catch_up else outcome] += 1
        self.num_quarantined += len(record.quarantined)
        if is_committed and not record.is_catch_up:
            self.last = record


def disagreement(verdict: AcksJudged, tolerance: float) -> str:
    """In words: engine and trainer do not compute the same policy."""
    refused = "; ".join(f"{instance}: {why}" for instance, why in verdict.refused.items())
    return (
        f"engine and trainer disagree at v{verdict.policy_version}: the probe's logprobs differ by "
        f"{verdict.probe_difference:.3g} (tolerated {tolerance:.3g}, the run stops above "
        f"{STOP_FACTOR * tolerance:.3g}); {refused or 'nobody refused'}"
    )
