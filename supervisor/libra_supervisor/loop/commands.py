"""Everything the loop asks the world for, one frozen struct each."""

from typing import TypeAlias

import msgspec

from libra.ids import GroupId, Incarnation, InstanceId, NodeRank, PolicyVersion, ReplicaId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, TrainPlacement
from libra.pools.hybrid import BegunStep
from libra.rollouts.group import AdmittedGroup, CompleteGroup
from libra.rollouts.trajectory import Trajectory
from libra.wire.instance import ReloadRequest
from libra.wire.rank import RankCommand, RecomputeProbed
from libra_supervisor.events import ReconfigurationEnded
from libra_supervisor.loop.plan_memory import PlanMemory
from libra_supervisor.loop.rollout_state import RolloutState
from libra_supervisor.records.evaluation import EvaluationRecord
from libra_supervisor.records.reconfiguration import Line
from libra_supervisor.records.reload import ReloadRecord, StrayAck
from libra_supervisor.records.step import StepRecord


class PrepareExport(msgspec.Struct, frozen=True, tag=True):
    """Clear the place where `version` is going to be written, then have the ranks write it."""

    attempt: int
    version: PolicyVersion


class CheckExport(msgspec.Struct, frozen=True, tag=True):
    """Compare the published directory with its manifest, once on every node that has servers."""

    version: PolicyVersion
    directory: str
    manifest_hash: str
    nodes: tuple[NodeRank, ...] = ()
    """Besides this one."""


class TellRanks(msgspec.Struct, frozen=True, tag=True):
    """Say the same to every rank."""

    attempt: int
    command: RankCommand


class TellRankZero(msgspec.Struct, frozen=True, tag=True):
    attempt: int
    command: RankCommand


class SendBatch(msgspec.Struct, frozen=True, tag=True):
    """Compute advantages and shards in a thread, then send each rank its own."""

    attempt: int
    step: int
    groups: tuple[CompleteGroup, ...]
    hybrids: BegunStep | None = None
    """Replicas that have to do with the step."""

    replica_data: int = 1
    """Shards of each member."""


class TakeSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Have the ranks write their state for replicas, as a checkpoint of `step` in `directory`."""

    attempt: int
    step: int
    directory: str


class DropSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Delete a snapshot that nobody loads any more."""

    directory: str


class StartReplica(msgspec.Struct, frozen=True, tag=True):
    placement: HybridPlacement
    has_devices: bool = True
    """False: as far as it comes without; TakeDevice lets its ranks go on."""


class StopReplica(msgspec.Struct, frozen=True, tag=True):
    replica_id: ReplicaId
    in_a_hurry: bool = False
    """It fell out: what it does is of no use to anybody."""


class TellReplica(msgspec.Struct, frozen=True, tag=True):
    """Say the same to every rank of a replica, in order with its batches."""

    replica_id: ReplicaId
    command: RankCommand


class SaveRun(msgspec.Struct, frozen=True, tag=True):
    """Have the ranks write the checkpoint of `step` together with `rollout_state`.

    A batch that is sent after this is trained after the ranks have taken the state of `step`.
    """

    attempt: int
    step: int
    rollout_state: RolloutState


class SendReload(msgspec.Struct, frozen=True, tag=True):
    instance_id: InstanceId
    incarnation: Incarnation
    request: ReloadRequest


class AskInstance(msgspec.Struct, frozen=True, tag=True):
    """Read what a server that came up holds."""

    instance_id: InstanceId
    incarnation: Incarnation


class KnowInstance(msgspec.Struct, frozen=True, tag=True):
    """Tell the scheduler about a process that answers; it is not routed to yet."""

    instance_id: InstanceId
    incarnation: Incarnation
    base_url: str
    kv_capacity_tokens: int | None
    is_planned: bool
    """It took the place of another in a reload, so the instance keeps its prompts."""


class RouteTo(msgspec.Struct, frozen=True, tag=True):
    """The instance serves `version` from now on."""

    instance_id: InstanceId
    incarnation: Incarnation
    version: PolicyVersion


class Unroute(msgspec.Struct, frozen=True, tag=True):
    """No new requests to the instance."""

    instance_id: InstanceId
    is_draining: bool = False
    """The instance works and will be back; else its state is not known."""


class ReplaceInstance(msgspec.Struct, frozen=True, tag=True):
    """End the process and start another."""

    instance_id: InstanceId
    reason: str


class AddInstance(msgspec.Struct, frozen=True, tag=True):
    """Start a server that the plan has gained, or let one that waits have its devices."""

    placement: InstancePlacement
    has_devices: bool


class DrainInstance(msgspec.Struct, frozen=True, tag=True):
    """Say when nothing is in flight there."""

    instance_id: InstanceId
    gives_back: bool
    """What is in flight goes back to the queue."""


class KeepInstance(msgspec.Struct, frozen=True, tag=True):
    """It need not be drained after all."""

    instance_id: InstanceId


class RetireInstance(msgspec.Struct, frozen=True, tag=True):
    """End a server for good."""

    instance_id: InstanceId


class SleepInstance(msgspec.Struct, frozen=True, tag=True):
    """Have a server give its devices back and stay."""

    instance_id: InstanceId


class WakeInstance(msgspec.Struct, frozen=True, tag=True):
    """Have a sleeping server take its devices again."""

    instance_id: InstanceId


class ForgetInstance(msgspec.Struct, frozen=True, tag=True):
    """It serves nothing any more: requests are routed without it."""

    instance_id: InstanceId


class ReshapeGang(msgspec.Struct, frozen=True, tag=True):
    """Write the configuration of `plan`, then start the gang anew as its core."""

    plan: Plan
    probes: bool = False
    """Its ranks run the recompute probe, whatever they restore."""


class KeepPlan(msgspec.Struct, frozen=True, tag=True):
    """Write down what a later supervisor has to know of the plan; a new one replaces it."""

    memory: PlanMemory


class WritePlan(msgspec.Struct, frozen=True, tag=True):
    """The plan is in force: plan.json and the resolved configuration follow it."""

    plan: Plan


class StartGroup(msgspec.Struct, frozen=True, tag=True):
    group: AdmittedGroup


class AskAgain(msgspec.Struct, frozen=True, tag=True):
    """Begin these running samples anew; what the group has finished stays."""

    group_id: GroupId
    sample_indices: tuple[int, ...]


class SayMissing(msgspec.Struct, frozen=True, tag=True):
    """One line of the control log, completed by where the requests of these groups are."""

    fields: dict[str, object]
    group_ids: tuple[GroupId, ...]


class CancelGroup(msgspec.Struct, frozen=True, tag=True):
    group_id: GroupId


class CancelAllGroups(msgspec.Struct, frozen=True, tag=True):
    reason: str


class StartEvaluated(msgspec.Struct, frozen=True, tag=True):
    """Make a trajectory of an evaluation: `group` is of the evaluation's data."""

    group: AdmittedGroup


class CancelEvaluated(msgspec.Struct, frozen=True, tag=True):
    group_id: GroupId


class WriteEvaluation(msgspec.Struct, frozen=True, tag=True):
    """A line of evaluations.jsonl and the evaluation's trajectories."""

    record: EvaluationRecord
    trajectories: tuple[Trajectory, ...]


class WriteStep(msgspec.Struct, frozen=True, tag=True):
    """A line of metrics.jsonl and the step's trajectories."""

    record: StepRecord
    groups: tuple[CompleteGroup, ...]
    finished: tuple[tuple[int, int], ...] = ()
    """(tokens given, tokens sampled) of every trajectory that ended in the step."""


class WriteReload(msgspec.Struct, frozen=True, tag=True):
    record: ReloadRecord


class WriteStrayAck(msgspec.Struct, frozen=True, tag=True):
    record: StrayAck


class WriteReconfiguration(msgspec.Struct, frozen=True, tag=True):
    """A line of reconfigurations.jsonl."""

    record: Line


class ReportReconfiguration(msgspec.Struct, frozen=True, tag=True):
    """Have everybody who listens to events hear how a change of the plan ended."""

    ended: ReconfigurationEnded


class RetireVersions(msgspec.Struct, frozen=True, tag=True):
    """Delete published versions that nobody needs any more."""

    pinned: frozenset[PolicyVersion]


class JudgeProbe(msgspec.Struct, frozen=True, tag=True):
    """Compare the recompute probe with the plan, in a thread; plan anew when it does not fit."""

    attempt: int
    probes: tuple[RecomputeProbed, ...]
    forced: TrainPlacement | None = None
    """The core that was probed, if it is not the one that was planned at first."""


class ChangePlan(msgspec.Struct, frozen=True, tag=True):
    """End everything that was started; the run begins anew with the plan that was made."""

    reason: str


class Say(msgspec.Struct, frozen=True, tag=True):
    """One line of the control log, with fields."""

    event: str
    fields: dict[str, object]
    is_warning: bool = False


class EndRun(msgspec.Struct, frozen=True, tag=True):
    """Stop everything and leave."""

    exit_code: int
    reason: str


Command: TypeAlias = (
    PrepareExport
    | CheckExport
    | TellRanks
    | TellRankZero
    | SendBatch
    | TakeSnapshot
    | DropSnapshot
    | StartReplica
    | StopReplica
    | TellReplica
    | SaveRun
    | SendReload
    | AskInstance
    | KnowInstance
    | RouteTo
    | Unroute
    | ReplaceInstance
    | AddInstance
    | DrainInstance
    | KeepInstance
    | RetireInstance
    | SleepInstance
    | WakeInstance
    | ForgetInstance
    | ReshapeGang
    | KeepPlan
    | WritePlan
    | StartGroup
    | AskAgain
    | SayMissing
    | CancelGroup
    | CancelAllGroups
    | StartEvaluated
    | CancelEvaluated
    | WriteEvaluation
    | WriteStep
    | WriteReload
    | WriteStrayAck
    | WriteReconfiguration
    | ReportReconfiguration
    | RetireVersions
    | JudgeProbe
    | ChangePlan
    | Say
    | EndRun
)
