"""What the supervisor and the ranks say to each other about hybrid replicas."""

import msgspec

from libra.ids import ReplicaId, RunId


class LaneAddress(msgspec.Struct, frozen=True):
    """Where the head of one lane listens."""

    unix: str = ""
    """Name of an abstract Unix socket on its node, without the leading zero; else empty."""

    host: str = ""
    port: int = 0
    """For TCP, when `unix` is empty."""


class MemberShare(msgspec.Struct, frozen=True):
    """One member of a step and what it contributes to each mini-batch."""

    replica_id: ReplicaId
    num_tokens: tuple[int, ...]
    """Sampled tokens of its shards, by mini-batch."""

    num_sequences: tuple[int, ...]
    """Sequences with at least one sampled token, by mini-batch."""


class HybridStep(msgspec.Struct, frozen=True):
    """The membership of one step, frozen in its TrainStep. The same for core and members."""

    epoch: int
    members: tuple[MemberShare, ...] = ()
    joiners: tuple[ReplicaId, ...] = ()
    """Follow the step without contributing: the heads keep its reduced gradients for them."""


class OpenLanes(msgspec.Struct, frozen=True, tag=True):
    """To the core: every head listens and answers with LaneOpened; a second one changes nothing."""

    run_id: RunId
    key: bytes
    """The secret of the run's lanes."""

    replica_size: int
    """Ranks of one hybrid replica, which is as many lanes."""

    hosts: tuple[str, ...] = ()
    """By rank: an address of its node to listen on besides. Empty: members are on this node."""


class JoinCore(msgspec.Struct, frozen=True, tag=True):
    """To a replica: load a snapshot of the core and connect to the heads."""

    run_id: RunId
    replica_id: ReplicaId
    key: bytes
    lanes: tuple[LaneAddress, ...]
    """By the replica's rank."""

    snapshot: str
    """Directory of a complete checkpoint of the core."""


class FollowStep(msgspec.Struct, frozen=True, tag=True):
    """To a replica that is catching up: take a step with the core's reduced gradients alone."""

    step: int
    mini_batches: tuple[int, ...]
    """Indices of those that have a token to train."""

    epoch: int


class LaneOpened(msgspec.Struct, frozen=True, tag=True):
    """Sent by each head."""

    rank: int
    lane: int
    unix: LaneAddress
    tcp: LaneAddress | None


class CoreJoined(msgspec.Struct, frozen=True, tag=True):
    """Sent by every rank of a replica that holds the snapshot and was let in."""

    rank: int
    step: int
    """Of the snapshot."""

    restore_s: float
    connect_s: float


class StepFollowed(msgspec.Struct, frozen=True, tag=True):
    """Sent by every rank of a replica that took a step with the core's gradients alone."""

    rank: int
    step: int
