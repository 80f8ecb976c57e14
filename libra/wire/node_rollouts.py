"""What leader and followers say to each other about trajectories, inside the link of `wire.node`.

A *job* is some samples of one group, given to one node; its number is never used again. Whatever
is said of a job that was taken back meanwhile is dropped.
"""

from typing import Final, TypeAlias

import msgspec

from libra.ids import Incarnation, InstanceId, PolicyVersion, PromptId

MAX_TRAJECTORY_BYTES: Final = 64 << 20
"""A sample whose trajectory is longer fails; a million tokens with logprobs take 15 MiB."""


class ServerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One server as the leader routes to it."""

    instance_id: InstanceId
    incarnation: Incarnation
    url: str
    tp: int
    is_planned: bool
    """The process continues what the one before it was known for."""

    kv_capacity_tokens: int | None = None
    """None: not known yet."""

    version: PolicyVersion | None = None
    """None: it has proved none to this leader."""

    is_ready: bool = False
    is_draining: bool = False


# Commands


class Servers(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What has changed about the servers of the run."""

    revision: int
    """Of the roster with these changes in it."""

    wanted: PolicyVersion | None
    """The version that requests are to be answered with at least."""

    changed: tuple[ServerEntry, ...]
    gone: tuple[InstanceId, ...] = ()


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """Place anew what is in flight on a server, which has been taken out of routing."""

    instance_id: InstanceId


class TakePart(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Get ready to make trajectories. CanMake or CannotMake."""

    token_file: str
    """Holds the bearer token of the servers' guarded routes."""

    kv_capacity_by_tp: dict[int, int]
    """Estimates in tokens per TP degree, until a server's own figure is known."""

    servers: Servers
    """All of them."""

    reads_anew: bool = False
    """The data that the node has read are not the leader's: it looks again."""


class MakeSamples(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Make these samples of a group, each to its end."""

    job: int
    prompt_id: PromptId
    row: int
    epoch: int
    attempt: int
    n_samples: int
    """Of the group."""

    samples: tuple[int, ...]


class MakeAgain(msgspec.Struct, frozen=True, tag=True):
    """Begin these samples of a job anew, but for those that have just ended."""

    job: int
    samples: tuple[int, ...]


class DropJob(msgspec.Struct, frozen=True, tag=True):
    """Nobody wants the rest of it."""

    job: int


RolloutOrder: TypeAlias = TakePart | Servers | GiveBack | MakeSamples | MakeAgain | DropJob


# Events


class CanMake(msgspec.Struct, frozen=True, tag=True):
    """Answer of TakePart."""

    fingerprints: tuple[str, ...]
    """Of the data here: for training, and for evaluations if there is any."""


class CannotMake(msgspec.Struct, frozen=True, tag=True):
    """Nothing is made here, or not any more, until TakePart is said again."""

    reason: str


class StoppedMaking(msgspec.Struct, frozen=True, tag=True):
    """The lease has ended and with it every job; the node is ready to take part again."""

    reason: str


class SampleBegun(msgspec.Struct, frozen=True, tag=True):
    job: int
    sample: int


class SampleAlive(msgspec.Struct, frozen=True, tag=True):
    """A sign of life: an engine works on a request of it, or a reward came."""

    job: int
    sample: int


class SampleGone(msgspec.Struct, frozen=True, tag=True):
    """It ended without a trajectory."""

    job: int
    sample: int
    kind: str
    """`libra.rollouts.trajectory.FailureKind`."""

    message: str


class TrajectoryPiece(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The next bytes of a sample's trajectory, msgpack; with the last the sample has ended."""

    job: int
    sample: int
    data: bytes
    is_last: bool


class InUse(msgspec.Struct, frozen=True, tag=True):
    """What this node has in flight, having read the roster up to `revision`."""

    revision: int
    num_requests: dict[InstanceId, int]
    """Servers without any are left out."""


SampleWord: TypeAlias = SampleBegun | SampleAlive | SampleGone | TrajectoryPiece
RolloutWord: TypeAlias = CanMake | CannotMake | StoppedMaking | SampleWord | InUse
