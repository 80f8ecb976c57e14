"""Everything that can happen, one frozen struct each. Pure.

`at` is seconds on the event loop's clock.
"""

from typing import Literal, TypeAlias

import msgspec

from libra.ids import (
    ChildId,
    GroupId,
    Incarnation,
    InstanceId,
    NodeRank,
    PolicyVersion,
    ReplicaId,
)
from libra.planner.plan import Plan, Slot
from libra.pools.reconfiguration import Cause
from libra.rollouts.trajectory import SampleFailed, Trajectory
from libra.wire.instance import InstanceState, ReloadAck, WeightsReceipt
from libra.wire.rank import RankEvent


class ChildStarted(msgspec.Struct, frozen=True, tag=True):
    """The process exists; it is not ready yet."""

    child_id: ChildId
    pid: int
    """0: a server that somebody else runs."""

    start_ticks: int
    """With the pid and the boot id it proves who the process is."""

    incarnation: Incarnation
    at: float
    is_adopted: bool = False
    facts: dict[str, str] = {}
    """What a later supervisor needs to take the process over, besides who it is."""

    boot_id: str = ""
    """Of the machine it runs on; empty: this one."""


class ChildWaiting(msgspec.Struct, frozen=True, tag=True):
    """A start is put off (a device is still busy). Costs nothing of the restart budget."""

    child_id: ChildId
    reason: str
    at: float


class ChildReady(msgspec.Struct, frozen=True, tag=True):
    child_id: ChildId
    incarnation: Incarnation
    start_s: float
    """From spawn to ready; 0 for an adopted process."""

    at: float


class ChildSuspected(msgspec.Struct, frozen=True, tag=True):
    """The process runs but does not do its work (start deadline missed, hang); it will be ended."""

    child_id: ChildId
    incarnation: Incarnation
    reason: str
    at: float


class ChildExited(msgspec.Struct, frozen=True, tag=True):
    """The process and all its descendants are gone, or named in a ChildUnkillable before this."""

    child_id: ChildId
    incarnation: Incarnation
    exit_code: int | None
    signal: int | None
    """Both None: the process was adopted, so its status went to another parent."""

    asked_for: bool
    """False is a failure, exit code 0 included."""

    reason: str
    """A sentence: `exited with code 1`, `killed by SIGKILL (out of memory)`, ..."""

    last_lines: tuple[str, ...]
    at: float


class ChildRestartScheduled(msgspec.Struct, frozen=True, tag=True):
    child_id: ChildId
    delay_s: float
    num_recent_restarts: int
    """Restarts within the intensity window, this one included."""

    at: float


class ChildGaveUp(msgspec.Struct, frozen=True, tag=True):
    """The restart budget is spent; the child stays down."""

    child_id: ChildId
    reason: str
    first_cause: str
    num_failures: int
    last_lines: tuple[str, ...]
    at: float


class ChildUnkillable(msgspec.Struct, frozen=True, tag=True):
    """Processes that outlived SIGKILL; what they hold (devices, ports) must not be used again."""

    child_id: ChildId
    incarnation: Incarnation
    pids: tuple[int, ...]
    detail: str
    at: float


class LogSinkFailing(msgspec.Struct, frozen=True, tag=True):
    """A child's log cannot be written; the child goes on and what it prints is dropped."""

    child_id: ChildId
    reason: str
    dropped_bytes: int
    at: float


class LogSinkRecovered(msgspec.Struct, frozen=True, tag=True):
    child_id: ChildId
    dropped_bytes: int
    """Bytes lost since the sink began to fail; the log file says so too."""

    at: float


ChildEvent: TypeAlias = (
    ChildStarted
    | ChildWaiting
    | ChildReady
    | ChildSuspected
    | ChildExited
    | ChildRestartScheduled
    | ChildGaveUp
    | ChildUnkillable
    | LogSinkFailing
    | LogSinkRecovered
)


# The torchrun gang


class CheckpointChosen(msgspec.Struct, frozen=True, tag=True):
    """What gang `attempt` starts from; its ranks are being started."""

    attempt: int
    step: int
    """0: from the base model."""

    rollout_state: bytes | None
    """As it was saved with the checkpoint; None when there is no checkpoint."""


class GangReady(msgspec.Struct, frozen=True, tag=True):
    """Every rank of `attempt` has built its model."""

    attempt: int
    step: int
    num_parameters: int


class ProbeJudged(msgspec.Struct, frozen=True, tag=True):
    """What follows from the recompute probe of `attempt`."""

    attempt: int
    verdict: Literal["kept", "replaced", "impossible", "refused"]
    """The plan holds; another one is ready; there is none; a forced layout does not fit."""

    message: str


class RankSaid(msgspec.Struct, frozen=True, tag=True):
    """One rank's message; those of an attempt that has ended are ignored."""

    attempt: int
    event: RankEvent


class GangLost(msgspec.Struct, frozen=True, tag=True):
    """All ranks of `attempt` are gone unasked; another attempt follows."""

    attempt: int
    reason: str


class GangGaveUp(msgspec.Struct, frozen=True, tag=True):
    """No further attempt."""

    exit_code: int
    """The run's exit code that the first cause asks for."""

    reason: str


# Engines


class InstanceAnswered(msgspec.Struct, frozen=True, tag=True):
    """A server that came up said what it holds."""

    instance_id: InstanceId
    incarnation: Incarnation
    base_url: str
    state: InstanceState
    kv_capacity_tokens: int | None


class InstanceDrained(msgspec.Struct, frozen=True, tag=True):
    """Nothing is in flight at a server to which nothing new is sent."""

    instance_id: InstanceId


class InstanceWarmed(msgspec.Struct, frozen=True, tag=True):
    """A server without devices has come as far as it can."""

    instance_id: InstanceId


class InstanceAsleep(msgspec.Struct, frozen=True, tag=True):
    """A server has given its devices back and is there for later."""

    instance_id: InstanceId
    incarnation: Incarnation


class InstanceWoken(msgspec.Struct, frozen=True, tag=True):
    """A server has its devices again; its weights are still to be loaded."""

    instance_id: InstanceId
    incarnation: Incarnation


class InstanceRetired(msgspec.Struct, frozen=True, tag=True):
    """A server has ended for good."""

    instance_id: InstanceId
    is_clean: bool
    """False: something of it outlived SIGKILL and may hold its devices."""


class InstanceDoubted(msgspec.Struct, frozen=True, tag=True):
    """Its metrics seem to come from another process than the one that is routed to."""

    instance_id: InstanceId


class ExportChecked(msgspec.Struct, frozen=True, tag=True):
    """The published directory was compared with its manifest; `error` is empty when it holds."""

    version: PolicyVersion
    manifest_hash: str
    """As announced: tells the export of an earlier attempt apart."""

    error: str
    receipt_of: dict[NodeRank, WeightsReceipt] = {}
    """For the servers on each node; lacks those where the check did not end well, or where the file
    system allows none."""


class ReloadAnswered(msgspec.Struct, frozen=True, tag=True):
    """One instance's answer to a reload request, or why there is none."""

    instance_id: InstanceId
    incarnation: Incarnation
    nonce: str
    ack: ReloadAck | None
    error: str


# Rollouts


class SampleStarted(msgspec.Struct, frozen=True, tag=True):
    group_id: GroupId
    sample_index: int


class SampleProgressed(msgspec.Struct, frozen=True, tag=True):
    """A sign of life of a running sample."""

    group_id: GroupId
    sample_index: int


class SampleFinished(msgspec.Struct, frozen=True, tag=True):
    """A scored trajectory."""

    trajectory: Trajectory


class SampleGaveUp(msgspec.Struct, frozen=True, tag=True):
    """A sample without a trajectory."""

    group_id: GroupId
    sample_index: int
    failure: SampleFailed


# The plan


class ReconfigurationWanted(msgspec.Struct, frozen=True, tag=True):
    """The run should go on with `plan`, which is matched with the one in force."""

    decision_id: int
    plan: Plan
    reason: str


class HybridWarmed(msgspec.Struct, frozen=True, tag=True):
    """A replica without devices has come as far as it can."""

    replica_id: ReplicaId


class HybridJoined(msgspec.Struct, frozen=True, tag=True):
    """A replica holds what the core holds, bit for bit, and contributes from the next step on."""

    replica_id: ReplicaId


class HybridLost(msgspec.Struct, frozen=True, tag=True):
    """A replica is gone unasked, or cannot join; its devices are free but for `lost`."""

    replica_id: ReplicaId
    why: str
    lost: frozenset[Slot] = frozenset()
    """What processes of it hold that do not end."""


class HybridLeft(msgspec.Struct, frozen=True, tag=True):
    """A replica that was asked to leave is gone; its devices are free but for `lost`."""

    replica_id: ReplicaId
    lost: frozenset[Slot] = frozenset()
    """What processes of it hold that do not end."""


class ReplicaReady(msgspec.Struct, frozen=True, tag=True):
    """Every rank of a replica has built its model."""

    replica_id: ReplicaId


class ReplicaSaid(msgspec.Struct, frozen=True, tag=True):
    """One message of a replica's rank."""

    replica_id: ReplicaId
    event: RankEvent


class ReplicaDown(msgspec.Struct, frozen=True, tag=True):
    """All processes of a replica are gone but those that do not end; no others follow."""

    replica_id: ReplicaId
    reason: str
    is_clean: bool = True
    """False: some do not end, and keep its devices."""


class ReconfigurationEnded(msgspec.Struct, frozen=True, tag=True):
    """What became of a plan that was wanted; the line in reconfigurations.jsonl says more."""

    decision_id: int
    outcome: Literal["done", "rolled_back", "refused", "failed"]
    stalled_s: float
    """The trainer stood still at a step boundary for it."""

    phases: dict[str, float]
    """Seconds by kind of transition."""

    reason: str
    cause: Cause = "decision"


# Nodes


class NodeJoined(msgspec.Struct, frozen=True, tag=True):
    """A machine of the run is there, with nothing on it that was not taken over."""

    node: NodeRank


class NodeLost(msgspec.Struct, frozen=True, tag=True):
    """A machine has let go of everything it had, for certain."""

    node: NodeRank
    reason: str


# The run


class StopRequested(msgspec.Struct, frozen=True, tag=True):
    reason: str
    now: bool
    """True: do not finish the step that is being trained."""

    exit_code: int = 0
    """Of the run after a clean save: 0 for SIGTERM and the API, 130 for Ctrl-C."""


class DrainRequested(msgspec.Struct, frozen=True, tag=True):
    instance_id: InstanceId
    drain: bool


class RestartRequested(msgspec.Struct, frozen=True, tag=True):
    instance_id: InstanceId


class ReloadRequested(msgspec.Struct, frozen=True, tag=True):
    """Load the committed version into every engine once more."""


class Ticked(msgspec.Struct, frozen=True, tag=True):
    """Time passed; deadlines are looked at."""


Event: TypeAlias = (
    ChildEvent
    | CheckpointChosen
    | GangReady
    | RankSaid
    | ProbeJudged
    | GangLost
    | GangGaveUp
    | InstanceAnswered
    | InstanceDoubted
    | InstanceDrained
    | InstanceWarmed
    | InstanceAsleep
    | InstanceWoken
    | InstanceRetired
    | ExportChecked
    | ReloadAnswered
    | SampleStarted
    | SampleProgressed
    | SampleFinished
    | SampleGaveUp
    | ReplicaReady
    | ReplicaSaid
    | ReplicaDown
    | HybridWarmed
    | HybridJoined
    | HybridLost
    | HybridLeft
    | ReconfigurationWanted
    | ReconfigurationEnded
    | NodeJoined
    | NodeLost
    | StopRequested
    | DrainRequested
    | RestartRequested
    | ReloadRequested
    | Ticked
)
