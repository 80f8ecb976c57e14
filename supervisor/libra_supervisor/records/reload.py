"""One line of reloads.jsonl: a whole batch of reloads, every ACK in it."""

import msgspec

from libra.ids import InstanceId, PolicyVersion
from libra.wire.instance import ReloadAck


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
    accepted: tuple[InstanceId, ...]
    refused: dict[InstanceId, str]
    outcome: str
    """`committed`, or `failed: ...`."""

    slowest_instance: InstanceId | None
    slowest_total_s: float
    probe_difference: float
    """Largest |trainer - engine| logprob of the probe over the accepted instances."""

    total_s: float
    wall_time_ns: int
