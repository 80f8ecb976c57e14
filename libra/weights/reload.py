"""One reload batch: a fixed set of instances brought to one policy version, then committed.

The rules, in the order in which an instance meets them:

* Membership is frozen when the batch is made. Who joins later catches up with a batch of its own.
* `parallel` asks everybody at once; `serial` asks one instance at a time on each node.
* From being asked, an instance has `ack_timeout_s`. No ACK, a failed one, one that does not prove
  the load, or the loss of the process: quarantined. A planned leave only removes it.
* When all are settled, rank 0 judges the ACKs. Who is refused there is quarantined too.
* The version is committed with the rest if their GPUs reach `min_rollout_gpus`, or, when the
  batch began with fewer, if nobody was lost. Otherwise the batch fails (exit code 4).

Identity is run id, nonce, instance and incarnation: anything else is refused and changes nothing.
Pure: events in, commands out, time as an argument.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from libra.config.weights import ReloadMethod, ReloadStrategy
from libra.ids import Incarnation, InstanceId, NodeRank, PolicyVersion
from libra.weights.judge import ack_problems
from libra.wire.instance import ReloadAck, ReloadRequest, WeightsReceipt
from libra.wire.rank import AcksJudged

EMPTY: Final[Mapping[NodeRank, WeightsReceipt]] = {}


class Member(msgspec.Struct, frozen=True):
    instance_id: InstanceId
    incarnation: Incarnation
    """The process that is asked; with the method `restart`, the one to be replaced."""

    node: NodeRank
    num_gpus: int


class SendReload(msgspec.Struct, frozen=True, tag=True):
    member: Member
    request: ReloadRequest


class RefuseAck(msgspec.Struct, frozen=True, tag=True):
    """To be logged; the batch is as it was."""

    ack: ReloadAck
    reason: str


class Quarantine(msgspec.Struct, frozen=True, tag=True):
    """Out of routing until it has been reloaded from a good version or replaced."""

    instance_id: InstanceId
    reason: str


class JudgeBatch(msgspec.Struct, frozen=True, tag=True):
    """Ask rank 0 (`libra.wire.rank.JudgeAcks`) and bring the verdict to `on_judged`."""

    request: ReloadRequest
    acks: tuple[ReloadAck, ...]


class CommitVersion(msgspec.Struct, frozen=True, tag=True):
    """These processes, and only these, answer with `policy_version`."""

    policy_version: PolicyVersion
    incarnation_of: dict[InstanceId, Incarnation]


class FailBatch(msgspec.Struct, frozen=True, tag=True):
    policy_version: PolicyVersion
    reason: str


Command: TypeAlias = SendReload | RefuseAck | Quarantine | JudgeBatch | CommitVersion | FailBatch

State: TypeAlias = Literal["new", "reloading", "judging", "committed", "failed", "cancelled"]
MemberState: TypeAlias = Literal["waiting", "asked", "acked", "quarantined", "left"]

REASON_TO_REFUSE: dict[MemberState, str] = {
    "waiting": "the instance was not asked yet",
    "acked": "the instance has answered already",
    "quarantined": "it came too late: the instance is quarantined",
    "left": "the instance has left",
}


class ReloadBatch:
    """The state machine of one batch; a new try is a new batch with another nonce."""

    def __init__(  # noqa: PLR0913 - what a batch is made of
        self,
        request: ReloadRequest,
        members: Sequence[Member],
        *,
        method: ReloadMethod,
        strategy: ReloadStrategy,
        ack_timeout_s: float,
        min_rollout_gpus: int,
        receipt_of: Mapping[NodeRank, WeightsReceipt] = EMPTY,
    ) -> None:
        """`receipt_of` has the nodes where every byte was read; `request` says if there are any."""
        self.request = request
        self._receipt_of = receipt_of
        self._method = method
        self._strategy = strategy
        self._ack_timeout_s = ack_timeout_s
        self._min_rollout_gpus = min_rollout_gpus
        self._members = {member.instance_id: member for member in members}
        if len(self._members) != len(members):
            raise ValueError("an instance is in the batch twice")
        self._state: State = "new"
        self._state_of: dict[InstanceId, MemberState] = dict.fromkeys(self._members, "waiting")
        # Apart from the states, so that an ACK costs the same however many members there are.
        self._waiting = dict(self._members)
        self._deadline_of: dict[InstanceId, float] = {}
        self._ack_of: dict[InstanceId, ReloadAck] = {}

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_settled(self) -> bool:
        return self._state in {"committed", "failed", "cancelled"}

    @property
    def state_of(self) -> dict[InstanceId, MemberState]:
        """A copy: where every member stands."""
        return dict(self._state_of)

    @property
    def in_flight(self) -> frozenset[InstanceId]:
        return frozenset(self._deadline_of)

    @property
    def acks(self) -> tuple[ReloadAck, ...]:
        """Proofs of the members that still count, in the order of membership."""
        return tuple(self._ack_of[i] for i in self._members if i in self._ack_of)

    def is_replacing(self, instance: InstanceId, incarnation: Incarnation) -> bool:
        """Whether that process is to end because the batch replaces it by one with the version."""
        return (
            self._method == "restart"
            and self._state_of.get(instance) == "asked"
            and self._members[instance].incarnation == incarnation
        )

    def next_deadline(self) -> float | None:
        return min(self._deadline_of.values(), default=None)

    def start(self, *, now: float) -> tuple[Command, ...]:
        if self._state != "new":
            raise ValueError("the batch was started already")
        self._state = "reloading"
        return self._advance(now)

    def on_ack(self, ack: ReloadAck, *, now: float) -> tuple[Command, ...]:
        reason = self._reason_to_refuse(ack)
        if reason is not None:
            return (RefuseAck(ack, reason),)
        instance = ack.instance_id
        del self._deadline_of[instance]
        problems = ack_problems(self._request_for(self._members[instance]), ack)
        if problems:
            return (self._quarantine(instance, "; ".join(problems)), *self._advance(now))
        self._state_of[instance] = "acked"
        self._ack_of[instance] = ack
        return self._advance(now)

    def on_lost(
        self, instance: InstanceId, incarnation: Incarnation, *, now: float
    ) -> tuple[Command, ...]:
        """Take note that a process ended unasked."""
        if self.is_settled or not self._concerns(instance, incarnation):
            return ()
        return (self._quarantine(instance, "its process was lost"), *self._advance(now))

    def on_undelivered(
        self, instance: InstanceId, reason: str, *, now: float
    ) -> tuple[Command, ...]:
        """Take note that no ACK will come: the request or its answer did not get through."""
        if self.is_settled or self._state_of.get(instance) != "asked":
            return ()
        return (self._quarantine(instance, reason), *self._advance(now))

    def on_left(self, instance: InstanceId, *, now: float) -> tuple[Command, ...]:
        """Take note of a planned removal: drained or stopped by our own decision."""
        if self.is_settled or self._state_of.get(instance) not in {"waiting", "asked", "acked"}:
            return ()
        self._settle(instance, "left")
        return self._advance(now)

    def on_tick(self, *, now: float) -> tuple[Command, ...]:
        late = sorted(i for i, deadline in self._deadline_of.items() if deadline <= now)
        if self.is_settled or not late:
            return ()
        reason = f"no ACK within {self._ack_timeout_s:g} s"
        return (*[self._quarantine(i, reason) for i in late], *self._advance(now))

    def on_judged(self, verdict: AcksJudged) -> tuple[Command, ...]:
        """Rank 0's answer to JudgeBatch; a verdict on another batch is ignored."""
        if self._state != "judging" or verdict.nonce != self.request.nonce:
            return ()
        refusals = [
            self._quarantine(i, verdict.refused.get(i, "rank 0 did not accept its ACK"))
            for i in self._members
            if i in self._ack_of and i not in verdict.accepted
        ]
        return (*refusals, self._conclude())

    def cancel(self) -> None:
        """Give the batch up, as when the trainer that published it is gone. Answers are refused.

        The instances asked may hold the new version: read it back from them.
        """
        if not self.is_settled:
            self._state = "cancelled"
            self._deadline_of.clear()

    def _reason_to_refuse(self, ack: ReloadAck) -> str | None:
        if ack.run_id != self.request.run_id or ack.nonce != self.request.nonce:
            return "it belongs to another run or an earlier try"
        if self.is_settled:
            return f"the batch is {self._state} already"
        state = self._state_of.get(ack.instance_id)
        if state is None:
            return "the instance is not in the batch"
        if state != "asked":
            return REASON_TO_REFUSE[state]
        return self._wrong_process(ack)

    def _wrong_process(self, ack: ReloadAck) -> str | None:
        member = self._members[ack.instance_id]
        is_same_process = ack.incarnation == member.incarnation
        if ack.method != self._method or ack.strategy != self._strategy:
            return f"it reports {ack.method}/{ack.strategy}, not what was asked"
        if is_same_process != (self._method == "inplace"):
            return f"it comes from the incarnation {ack.incarnation}"
        return None

    def _concerns(self, instance: InstanceId, incarnation: Incarnation) -> bool:
        """Whether the end of that process matters to the batch."""
        state = self._state_of.get(instance)
        if state == "acked":
            return incarnation == self._ack_of[instance].incarnation
        is_first_process = instance in self._members and (
            incarnation == self._members[instance].incarnation
        )
        if state == "asked":
            # A restart ends the first process on purpose; in place there is no other.
            return is_first_process == (self._method == "inplace")
        return state == "waiting" and is_first_process

    def _settle(self, instance: InstanceId, state: MemberState) -> None:
        self._deadline_of.pop(instance, None)
        self._ack_of.pop(instance, None)
        self._waiting.pop(instance, None)
        self._state_of[instance] = state

    def _quarantine(self, instance: InstanceId, reason: str) -> Quarantine:
        self._settle(instance, "quarantined")
        return Quarantine(instance, reason)

    def _advance(self, now: float) -> tuple[Command, ...]:
        if self._state != "reloading":
            # A loss while rank 0 judges: its verdict will be applied to who is left.
            return ()
        sends = tuple(self._ask(member, now) for member in self._next_wave())
        if sends or self._deadline_of:
            return sends
        if not self._ack_of:
            return (self._conclude(),)
        self._state = "judging"
        return (JudgeBatch(self.request, self.acks),)

    def _next_wave(self) -> tuple[Member, ...]:
        if self._strategy == "parallel":
            return tuple(self._waiting.values())
        busy = {self._members[i].node for i in self._deadline_of}
        first_of_node: dict[NodeRank, Member] = {}
        for member in self._waiting.values():
            if member.node not in busy:
                first_of_node.setdefault(member.node, member)
        return tuple(first_of_node.values())

    def _ask(self, member: Member, now: float) -> SendReload:
        del self._waiting[member.instance_id]
        self._state_of[member.instance_id] = "asked"
        self._deadline_of[member.instance_id] = now + self._ack_timeout_s
        return SendReload(member, self._request_for(member))

    def _request_for(self, member: Member) -> ReloadRequest:
        """With the receipt of its node: what was read elsewhere says nothing about its disk."""
        receipt = self._receipt_of.get(member.node)
        if receipt == self.request.receipt:
            return self.request
        return msgspec.structs.replace(self.request, receipt=receipt)

    def _conclude(self) -> CommitVersion | FailBatch:
        version = self.request.policy_version
        committed = [m for i, m in self._members.items() if self._state_of[i] == "acked"]
        stayed = [m for i, m in self._members.items() if self._state_of[i] != "left"]
        num_gpus = sum(member.num_gpus for member in committed)
        # A batch that began below the minimum (others are restarting) is not failed for that.
        num_needed = min(self._min_rollout_gpus, sum(member.num_gpus for member in stayed))
        if num_gpus < num_needed:
            self._state = "failed"
            return FailBatch(
                version,
                f"v{version} reached {num_gpus} rollout GPUs; {num_needed} are needed: "
                f"{sum(s == 'quarantined' for s in self._state_of.values())} instances failed",
            )
        self._state = "committed"
        return CommitVersion(
            version,
            {m.instance_id: self._ack_of[m.instance_id].incarnation for m in committed},
        )
