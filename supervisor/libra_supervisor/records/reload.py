"""One line of reloads.jsonl: a whole batch of reloads, every ACK in it."""

import msgspec

from libra.ids import InstanceId, PolicyVersion
from libra.wire.instance import ReloadAck


class RefusedAck(msgspec.Struct, frozen=True):
    """Duplicate, foreign, or of an earlier try: it changed nothing."""

    ack: ReloadAck
    reason: str


class StrayAck(msgspec.Struct, frozen=True, kw_only=True):
    """An ACK that came when no batch was open: a line of its own, with the names of a batch's."""

    policy_version: PolicyVersion | None
    nonce: str
    refused_acks: tuple[RefusedAck, ...]
    outcome: str = "no batch"
    wall_time_ns: int


class ReloadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How the engines came to one version, as the trainer judged it."""

    policy_version: PolicyVersion
    nonce: str
    attempt: int
    is_catch_up: bool
    """True for an instance that joined after the version was committed."""

    method: str
    strategy: str
    manifest_hash: str
    acks: tuple[ReloadAck, ...]
    """Every one that was taken in, also when it reports a failure."""

    accepted: tuple[InstanceId, ...]
    refused: dict[InstanceId, str]
    """By the trainer, and why."""

    refused_acks: tuple[RefusedAck, ...]
    quarantined: dict[InstanceId, str]
    """Instances that were taken out of routing in the course of the batch, and why."""

    outcome: str
    """`committed`, `failed: ...`, or `cancelled: ...` by a newer version, the gang's loss or
    the end of the run."""

    slowest_instance: InstanceId | None
    slowest_total_s: float
    probe_difference: float
    """Largest |trainer - engine| logprob of the probe over the accepted instances."""

    total_s: float
    wall_time_ns: int
