"""From the ranks' written weights to every engine's judged ACK. Pure.

A publication is: export, check of the directory, one reload batch over the engines that answer,
rank 0's verdict, commit. An engine that joins later catches up with a batch of its own, judged
against the probe logprobs that the trainer sent along with the export.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from libra.config.weights import WeightsConfig
from libra.errors import InvariantError
from libra.ids import Incarnation, InstanceId, NodeRank, PolicyVersion, RunId
from libra.pools.member import MemberState
from libra.pools.pool import COMING, RolloutPool
from libra.weights import reload as batches
from libra.weights.judge import STOP_FACTOR, judge_acks
from libra.weights.reload import Member, ReloadBatch
from libra.wire.instance import ReloadAck, ReloadRequest, WeightsReceipt, WeightsTransfer
from libra.wire.rank import (
    AbortTransfer,
    AcksJudged,
    JudgeAcks,
    OfferWeights,
    SendWeights,
    WeightsExported,
    WeightsOffered,
    WeightsSent,
)
from libra_supervisor.loop.commands import (
    CheckExport,
    Command,
    EndRun,
    PrepareExport,
    ReplaceInstance,
    RetireVersions,
    RouteTo,
    Say,
    SendReload,
    TellRanks,
    TellRankZero,
    Unroute,
    WriteReload,
    WriteStrayAck,
)
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.open_batch import OpenBatch, ReloadCounts, disagreement
from libra_supervisor.loop.reload_orders import ReloadOrders
from libra_supervisor.loop.second_chances import SecondChances
from libra_supervisor.loop.transfer_desk import TransferDesk
from libra_supervisor.records.reload import RefusedAck, StrayAck

LEADER: Final = NodeRank(0)
SUPERSEDED: Final = "a batch with a newer version has taken the place of that one"
MAX_FAILED_BATCHES = 3
"""In a row, for one version: by then it is the weights or the site, not a process that died."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change during a run."""

    run_id: RunId
    weights: WeightsConfig
    min_rollout_gpus: int
    probe_token_ids: tuple[int, ...]
    probe_tolerance: float
    rank_heartbeat_timeout_s: float = math.inf

    @property
    def transfers(self) -> bool:
        """Weights go through a process group, not over a disk."""
        return self.weights.rollout_weight_sync_mode == "nccl"


class Publication:
    """How the newest version gets to the engines. `pool` is changed by what happens here."""

    def __init__(self, terms: Terms, pool: RolloutPool) -> None:
        self._terms = terms
        self._pool = pool
        self._exported: WeightsExported | None = None
        self._receipt_of: dict[NodeRank, WeightsReceipt] = {}
        self._is_being_checked = False
        self._open: OpenBatch | None = None
        self._desk = TransferDesk(
            terms.weights, rank_heartbeat_timeout_s=terms.rank_heartbeat_timeout_s
        )
        self._orders = ReloadOrders(terms.run_id, terms.weights, terms.probe_token_ids)
        self._second_chances = SecondChances(max_aborts=MAX_FAILED_BATCHES)
        self._superseded: set[tuple[InstanceId, str]] = set()
        """Requests, by nonce, whose batch gave way to a newer version before they were answered."""

        self._committed: PolicyVersion | None = None
        self.counts = ReloadCounts()
        self._num_failed_in_a_row = 0
        self._is_retry_due = False
        self._attempt = 0
        self.just_committed: PolicyVersion | None = None
        """Set by the call that commits a version; the caller takes it and sets it to None."""

    @property
    def committed(self) -> PolicyVersion | None:
        return self._committed

    @property
    def manifest_hash(self) -> str | None:
        """Of the newest export that was found complete."""
        return None if self._exported is None else self._exported.manifest_hash

    @property
    def waiting_for(self) -> tuple[InstanceId, ...]:
        """Engines whose ACK is outstanding, or that have to come back for another try."""
        if self._is_retry_due:
            coming = self._pool.ids_in(*COMING)
            return tuple(sorted(coming))
        return () if self._open is None else tuple(sorted(self._open.batch.in_flight))

    @property
    def is_idle(self) -> bool:
        """No batch is open or due, and rank 0 sends nothing."""
        return self._open is None and not self._is_retry_due and not self._desk.is_sending

    def is_replacing(self, instance_id: InstanceId, incarnation: Incarnation) -> bool:
        """Whether that process ends because of a reload by restart."""
        return self._open is not None and self._open.batch.is_replacing(instance_id, incarnation)

    @property
    def is_being_checked(self) -> bool:
        """The newest export is written, and nobody knows yet whether it is right."""
        return self._is_being_checked

    def begin(self, version: PolicyVersion, *, attempt: int) -> tuple[Command, ...]:
        self._attempt = attempt
        if not self._terms.transfers:
            return (PrepareExport(attempt, version),)
        terms = self._terms
        offer = OfferWeights(terms.run_id, version, terms.probe_token_ids)
        return (TellRanks(attempt, offer),)

    def on_offered(self, offered: WeightsOffered, *, at: Moment) -> tuple[Command, ...]:
        """The ranks hold these weights until they are committed."""
        if offered.error:
            reason = f"the trainer's weights v{offered.policy_version} are broken: {offered.error}"
            return (EndRun(4, reason),)
        self._desk.on_offered(offered)
        self._exported = WeightsExported(
            policy_version=offered.policy_version,
            directory="",
            manifest_hash=offered.offer_hash,
            probe_logprobs=offered.probe_logprobs,
            export_s=offered.offer_s,
        )
        return self.reload(at=at)

    def on_sent(self, sent: WeightsSent) -> tuple[Command, ...]:
        """Rank 0 is through with a transfer; a member's ACK says what became of it there."""
        self._desk.on_sent(sent)
        if not sent.error:
            return ()
        fields: dict[str, object] = {"version": sent.policy_version, "why": sent.error}
        return (Say("transfer_broken_off", fields, is_warning=True),)

    def on_exported(self, exported: WeightsExported) -> tuple[Command, ...]:
        self._exported, self._receipt_of = exported, {}
        self._is_being_checked = True
        nodes = {member.node for member in self._pool.members} - {LEADER}
        check = CheckExport(
            exported.policy_version,
            exported.directory,
            exported.manifest_hash,
            tuple(sorted(nodes)),
        )
        return (check,)

    def on_checked(self, receipt_of: dict[NodeRank, WeightsReceipt]) -> None:
        """Every byte of the export is right; a node's receipt spares its servers reading it."""
        self._receipt_of = receipt_of
        self._is_being_checked = False

    def reload(self, *, at: Moment) -> tuple[Command, ...]:
        """Bring every engine that answers to the exported version."""
        # A joiner that was catching up is brought to the newer version with the others.
        if self._open is not None:
            batch = self._open.batch
            self._superseded |= {(asked, batch.request.nonce) for asked in batch.in_flight}
        cancelled = self._cancel("a newer version", at=at)
        self._is_retry_due = False
        members = self._members_in(self._pool.answering_ids)
        return (*cancelled, *self._start(members, is_catch_up=False, at=at))

    def retry(self, at: Moment) -> tuple[Command, ...]:
        """Try a failed batch again once enough engines answer."""
        if not self._is_retry_due:
            return ()
        if self._pool.is_lent_out and not self._desk.is_sending:
            return self.reload(at=at)  # nobody is left to prove it
        # Replacements take their time, which those that can receive again need not wait for. But
        # rank 0 must be through: if it is gone, the gang's loss is what is going on.
        is_early = self._desk.is_sending if self._terms.transfers else not self._pool.is_settled
        if is_early or self._num_gpus_to_reload < self._terms.min_rollout_gpus:
            return ()
        return self.reload(at=at)

    @property
    def _num_gpus_to_reload(self) -> int:
        return sum(self._pool[it].num_gpus for it in self._pool.answering_ids)

    def catch_up(self, *, at: Moment, held: PolicyVersion | None = None) -> tuple[Command, ...]:
        """Bring late engines to the committed version; nothing while a batch is open.

        `held`: what the ranks could send now, if anything; it matters to transfers alone.
        """
        if self._open is not None or not self.can_give(held):
            return ()
        rescued = self._second_chances.take(self._pool)
        members = self._members_in([*self._pool.ids_in(MemberState.STALE), *rescued])
        if not members:
            return ()
        return self._start(members, is_catch_up=True, at=at)

    def can_give(self, held: PolicyVersion | None) -> bool:
        """Whether the committed version is there to be loaded."""
        if self._committed is None or self._exported is None:
            return False
        if self._exported.policy_version != self._committed:
            return False
        if not self._terms.transfers:
            return True
        return held == self._committed and not self._desk.is_sending and not self._is_retry_due

    def refresh(self, at: Moment, *, held: PolicyVersion | None = None) -> tuple[Command, ...]:
        """Load the committed version into every engine that answers, once more."""
        if why := self.why_not_refresh(held):
            return (Say("reload_refused", {"why": why}, is_warning=True),)
        members = self._members_in(self._pool.answering_ids)
        return self._start(members, is_catch_up=True, at=at) if members else ()

    def why_not_refresh(self, held: PolicyVersion | None) -> str:
        """Why `refresh` would do nothing now; empty when it would load the committed version."""
        if self._open is not None:
            return "a reload is on its way"
        if self._pool.is_lent_out:
            return "nothing serves"
        if self._committed is None or self._exported is None:
            return "no published version is served"
        if self._exported.policy_version != self._committed:
            # It may not even have been checked yet.
            return f"v{self._exported.policy_version} is on its way"
        if not self.can_give(held):
            return "the ranks do not hold the served version any more, or are busy"
        return ""

    def on_ack(
        self, ack: ReloadAck, *, asked: InstanceId, nonce: str, at: Moment
    ) -> tuple[Command, ...]:
        """Take what the server `asked` answered to the request with `nonce`.

        It answers once: when that is refused, nothing is left to wait for.
        """
        if ack.instance_id != asked:
            reason = f"{asked} was asked and answered as {ack.instance_id}"
            refused = self._refuse(ack, reason, at=at)
            return (*refused, *self.on_undelivered(asked, nonce, reason, at=at))
        if self._was_superseded(asked, nonce) and ack.nonce == nonce:
            return self._refuse(ack, SUPERSEDED, is_warning=False, at=at)
        if self._open is None:
            return self._refuse(ack, "no reload batch is open", at=at)
        batch = self._open.batch
        commands = batch.on_ack(ack, now=at.now)
        reason = "; ".join(it.reason for it in commands if isinstance(it, batches.RefuseAck))
        if not reason:
            self._open.acks.append(ack)
        done = self._apply(commands, at=at)
        if not reason or nonce != batch.request.nonce or asked not in batch.in_flight:
            return done
        return (*done, *self.on_undelivered(asked, nonce, reason, at=at))

    def on_undelivered(
        self, instance_id: InstanceId, nonce: str, error: str, *, at: Moment
    ) -> tuple[Command, ...]:
        """The request did not reach the engine, or its answer did not reach us."""
        fields: dict[str, object] = {"instance": instance_id, "why": error}
        is_warning = not self._was_superseded(instance_id, nonce)
        said = Say("reload_undelivered", fields, is_warning=is_warning)
        if self._open is None or self._open.batch.request.nonce != nonce:
            return (said,)
        commands = self._open.batch.on_undelivered(instance_id, error, now=at.now)
        return (said, *self._apply(commands, at=at))

    def on_lost(
        self, instance_id: InstanceId, incarnation: Incarnation, *, at: Moment
    ) -> tuple[Command, ...]:
        if self._open is None:
            return ()
        commands = self._open.batch.on_lost(instance_id, incarnation, now=at.now)
        return self._apply(commands, at=at)

    def on_leaving(self, instance_id: InstanceId, *, at: Moment) -> tuple[Command, ...]:
        """Its process is about to be replaced on purpose: nobody waits for its ACK."""
        if self._open is None:
            return ()
        is_receiving = instance_id in self._open.batch.in_flight
        broken = self._break_off(instance_id, "it is leaving") if is_receiving else ()
        return (*broken, *self._apply(self._open.batch.on_left(instance_id, now=at.now), at=at))

    def on_judged(self, verdict: AcksJudged, *, at: Moment) -> tuple[Command, ...]:
        """Rank 0's verdict; one on a batch that was given up meanwhile says nothing any more."""
        if self._open is None or verdict.nonce != self._open.batch.request.nonce:
            return ()
        return self._judged(self._open, verdict, at=at)

    def on_tick(self, *, at: Moment) -> tuple[Command, ...]:
        if self._open is None:
            return ()
        return self._apply(self._open.batch.on_tick(now=at.now), at=at)

    def on_rewound(self, *, at: Moment) -> tuple[Command, ...]:
        """The trainer went back: what the engines hold is no longer anybody's policy."""
        cancelled = self._cancel("the gang was lost", at=at)
        self._is_retry_due = False
        self._exported, self._receipt_of = None, {}
        self._is_being_checked = False
        self._committed = None
        self._desk.on_gang_lost()
        return (*cancelled, *self._replace_unrescued())

    def on_run_ended(self, *, at: Moment) -> tuple[Command, ...]:
        """What a batch that is open has come to is written down, too."""
        return self._cancel("the run ended", at=at)

    def on_reshaped(self, *, attempt: int) -> None:
        """Another attempt has taken the place of the ranks, at the step they were at.

        What was written stays; what the ranks held for a transfer is gone until they offer again.
        """
        self._attempt = attempt
        if self._terms.transfers:
            self._desk.on_gang_lost()
            self._exported = None

    def forget(self, instance_id: InstanceId) -> None:
        """It is no member of the pool any more."""
        self._second_chances.forget(instance_id)

    def keep_base(self, version: PolicyVersion) -> None:
        """Engines keep what they started with (`rollout_weight_sync_mode: none`)."""
        self._committed = version

    # Steps of a batch

    def _start(
        self, members: Sequence[Member], *, is_catch_up: bool, at: Moment
    ) -> tuple[Command, ...]:
        exported = self._exported
        if exported is None:
            return ()
        nonce = self._orders.next_nonce(attempt=self._attempt, at=at)
        transfer: WeightsTransfer | None = None
        told: tuple[Command, ...] = ()
        if self._terms.transfers and members:
            transfer = self._desk.transfer(members, nonce=nonce)
            send = SendWeights(exported.policy_version, nonce, transfer)
            told = (TellRanks(self._attempt, send),)
        request = self._orders.request(
            exported,
            nonce=nonce,
            is_catch_up=is_catch_up,
            receipt=next(iter(self._receipt_of.values()), None),
            transfer=transfer,
        )
        batch = ReloadBatch(
            request,
            members,
            method=self._terms.weights.rollout_weight_reload_method,
            strategy=self._terms.weights.rollout_weight_reload_strategy,
            ack_timeout_s=self._terms.weights.rollout_weight_ack_timeout_s,
            min_rollout_gpus=0 if is_catch_up else self._terms.min_rollout_gpus,
            receipt_of=self._receipt_of,
        )
        self._open = OpenBatch(
            batch=batch,
            is_catch_up=is_catch_up,
            attempt=self._attempt,
            begun_at=at.now,
            trainer_probe_logprobs=exported.probe_logprobs,
        )
        return (*told, *self._apply(batch.start(now=at.now), at=at))

    def _apply(self, commands: Iterable[batches.Command], *, at: Moment) -> tuple[Command, ...]:
        done: list[Command] = []
        for command in commands:
            match command:
                case batches.SendReload(member, request):
                    self._pool.on_reload_begun(member.instance_id, now=at.now)
                    done.append(Unroute(member.instance_id, is_draining=True))
                    done.append(SendReload(member.instance_id, member.incarnation, request))
                case batches.RefuseAck(ack, reason):
                    done += self._refuse(ack, reason, at=at)
                case batches.Quarantine(instance_id, reason):
                    done += self._break_off(instance_id, reason)
                    done += self._quarantine(instance_id, reason, at=at)
                case batches.JudgeBatch(request, acks):
                    done += self._judge(request, acks, at=at)
                case batches.CommitVersion(version, incarnation_of):
                    done += self._commit(version, incarnation_of, at=at)
                case batches.FailBatch(_, reason):
                    done += self._fail(reason, at=at)
        return tuple(done)

    def _break_off(self, instance_id: InstanceId, reason: str) -> tuple[Command, ...]:
        """A transfer that one member lost cannot end well for those that are still in it."""
        group_id = self._desk.group_to_abort()
        if group_id is None:
            return ()
        abort = AbortTransfer(group_id, f"{instance_id}: {reason}")
        return (TellRankZero(self._attempt, abort),)

    def _judges_itself(self, open_batch: OpenBatch) -> bool:
        """Late engines' ACKs are judged here, unless only rank 0 knows what was sent."""
        return open_batch.is_catch_up and open_batch.batch.request.transfer is None

    def _judge(
        self, request: ReloadRequest, acks: tuple[ReloadAck, ...], *, at: Moment
    ) -> tuple[Command, ...]:
        open_batch = self._open
        if open_batch is None:
            return ()
        if not self._judges_itself(open_batch):
            return (TellRankZero(self._attempt, JudgeAcks(request, acks)),)
        verdict = judge_acks(
            request,
            acks,
            trainer_probe_logprobs=open_batch.trainer_probe_logprobs,
            probe_tolerance=self._terms.probe_tolerance,
        )
        return self._judged(open_batch, verdict, at=at)

    def _judged(
        self, open_batch: OpenBatch, verdict: AcksJudged, *, at: Moment
    ) -> tuple[Command, ...]:
        open_batch.verdict = verdict
        said: list[Command] = []
        tolerance = self._terms.probe_tolerance
        if verdict.probe_difference > STOP_FACTOR * tolerance:
            # Not one broken engine: what they loaded is another policy than the trainer's, and
            # every trajectory from here on would be off-policy without anyone knowing.
            text = disagreement(verdict, tolerance)
            written = self._written(f"failed: {text}", at=at)
            self._open = None
            return (written, EndRun(6, text))
        if verdict.probe_difference > tolerance:
            said.append(
                Say(
                    "probe_difference_high",
                    {"version": verdict.policy_version, "difference": verdict.probe_difference},
                    is_warning=True,
                )
            )
        commands = open_batch.batch.on_judged(verdict)
        return (*said, *self._apply(commands, at=at))

    def _commit(
        self,
        version: PolicyVersion,
        incarnation_of: dict[InstanceId, Incarnation],
        *,
        at: Moment,
    ) -> tuple[Command, ...]:
        done: list[Command] = [self._written("committed", at=at)]
        self._committed = version
        self._num_failed_in_a_row = 0
        for instance_id, incarnation in incarnation_of.items():
            serves = self._pool.on_version_confirmed(
                instance_id, incarnation, version, committed=version, now=at.now
            )
            if serves:
                done.append(RouteTo(instance_id, incarnation, version))
            self._second_chances.on_proved(incarnation)
        self._desk_on_batch_ended()
        if self._open is not None and not self._open.is_catch_up:
            self.just_committed = version
            in_use = {m.version for m in self._pool.members if m.version is not None}
            done.append(RetireVersions(frozenset(in_use | {version})))
        self._open = None
        return (*done, *self.catch_up(at=at))

    def _was_superseded(self, asked: InstanceId, nonce: str) -> bool:
        """Whether this is what is left of a batch that a newer one took the place of."""
        request = (asked, nonce)
        is_known = request in self._superseded
        self._superseded.discard(request)
        return is_known

    def _refuse(
        self, ack: ReloadAck, reason: str, *, is_warning: bool = True, at: Moment
    ) -> tuple[Command, ...]:
        self.counts.num_refused_acks += 1
        fields: dict[str, object] = {"instance": ack.instance_id, "nonce": ack.nonce, "why": reason}
        said = Say("ack_refused", fields, is_warning=is_warning)
        refused = RefusedAck(ack, reason)
        if self._open is not None:
            self._open.refused_acks.append(refused)
            return (said,)
        stray = StrayAck(
            policy_version=ack.policy_version,
            nonce=ack.nonce,
            refused_acks=(refused,),
            wall_time_ns=at.wall_ns,
        )
        return (said, WriteStrayAck(stray))

    def _quarantine(
        self, instance_id: InstanceId, reason: str, *, at: Moment
    ) -> tuple[Command, ...]:
        """Out of routing. A process that told of its failure gets one more try before it ends."""
        open_batch, incarnation = self._open, self._pool[instance_id].incarnation
        done: list[Command] = [Unroute(instance_id)]
        if open_batch is not None:
            open_batch.quarantined[instance_id] = reason
        if self._second_chances.may_receive_again(open_batch, instance_id, incarnation):
            self._pool.on_reload_aborted(instance_id, reason, now=at.now)
            return tuple(done)
        self._pool.on_reload_failed(instance_id, reason, now=at.now)
        if incarnation is None:
            # Its process is gone and will be followed by another; to ask would end that one.
            return tuple(done)
        if self._second_chances.keep(open_batch, instance_id, incarnation):
            fields: dict[str, object] = {"instance": instance_id, "why": reason}
            return (*done, Say("reload_tried_again_later", fields, is_warning=True))
        return (*done, ReplaceInstance(instance_id, reason))

    def _replace_unrescued(self) -> tuple[Command, ...]:
        """No version is committed that they could be tried with."""
        doomed = self._second_chances.take(self._pool)
        return tuple(ReplaceInstance(it, "its reload failed") for it in doomed)

    def _desk_on_batch_ended(self) -> None:
        """A group goes on only when every member of it came through."""
        if self._open is not None and not self._open.is_whole:
            self._desk.leave_group()

    def _cancel(self, why: str, *, at: Moment) -> tuple[Command, ...]:
        if self._open is None:
            return ()
        self._open.batch.cancel()
        self._desk.leave_group()
        written = self._written(f"cancelled: {why}", at=at)
        self._open = None
        return (written,)

    def _fail(self, reason: str, *, at: Moment) -> tuple[Command, ...]:
        """Too few engines proved the version: once more with their replacements, a few times."""
        written = self._written(f"failed: {reason}", at=at)
        is_catch_up = self._open is not None and self._open.is_catch_up
        self._desk.leave_group()
        self._open = None
        if is_catch_up:
            return (written,)
        self._num_failed_in_a_row += 1
        may_recover = self._pool.num_possible_gpus >= self._terms.min_rollout_gpus
        if not may_recover or self._num_failed_in_a_row >= MAX_FAILED_BATCHES:
            times = f", {self._num_failed_in_a_row} batches in a row"
            return (written, EndRun(4, f"{reason}{times}"))
        self._is_retry_due = True
        said = Say("reload_failed", {"why": reason}, is_warning=True)
        if self._terms.transfers and self._num_gpus_to_reload >= self._terms.min_rollout_gpus:
            # Who failed by its own fault is tried again once the others have proved the version.
            return (written, said)
        return (written, said, *self._replace_unrescued())

    def _written(self, outcome: str, *, at: Moment) -> WriteReload:
        open_batch, terms = self._open, self._terms
        if open_batch is None:
            raise InvariantError("a reload batch ended that was not open")
        record = open_batch.record(outcome, terms.weights, at=at)
        self.counts.on_written(record)
        return WriteReload(record)

    def _members_in(self, ids: Iterable[InstanceId]) -> list[Member]:
        members = (self._pool[instance_id] for instance_id in ids)
        return [
            Member(m.instance_id, m.incarnation, m.node, m.num_gpus)
            for m in members
            if m.incarnation is not None and not m.is_leaving
        ]
