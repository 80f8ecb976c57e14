"""The world of `control_world` where weights go through a group instead of over a disk.

Nobody notices a lost member by himself here: whoever is in a transfer with one waits until the
control plane has it ended. In reality connections break, which is only earlier.
"""

from random import Random

import msgspec

from control_parts import PROBE, RUN, probe_logprobs
from control_world import RandomWorld
from libra.ids import Incarnation, InstanceId
from libra.weights.judge import judge_acks
from libra.wire.instance import ReloadAck, ReloadRequest, TransferTensor
from libra.wire.rank import (
    AbortTransfer,
    AcksJudged,
    OfferWeights,
    SendWeights,
    StepTrained,
    WeightsOffered,
    WeightsSent,
)
from libra_supervisor import events
from libra_supervisor.loop import commands

TENSORS = (TransferTensor("x", "F32", (4, 4)),)
VERIFIED = ("tensors", "checksum", "load", "probe")


class Sending(msgspec.Struct, kw_only=True):
    """What the ranks are at."""

    command: SendWeights
    arrived: set[InstanceId] = set()
    received: set[InstanceId] = set()
    why_aborted: str = ""

    @property
    def members(self) -> set[InstanceId]:
        return set(self.command.transfer.rank_offset_of)

    @property
    def can_end(self) -> bool:
        return bool(self.why_aborted) or self.received == self.members


class TransferWorld(RandomWorld):
    def __init__(self, **knobs) -> None:
        super().__init__(sync_mode="nccl", **knobs)
        self.sending: Sending | None = None
        self.transferred: list[SendWeights] = []
        self._processes_of: dict[str, frozenset[Incarnation]] = {}
        """By group; a broken one is not in it any more."""

        self._groups_seen: set[str] = set()

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.TellRanks(attempt, OfferWeights(run_id, version, probe)):
                assert (attempt, run_id, probe) == (self.attempt, RUN, PROBE)
                assert version == self.gang_version
                assert self.publishing is None, "two publications at once"
                self.publishing = version
                self.published.append((attempt, version))
                self._work(self._offered(version))
            case commands.TellRanks(attempt, SendWeights() as send):
                assert attempt == self.attempt
                self._begin(send)
            case commands.TellRankZero(attempt, AbortTransfer(group_id, reason)):
                if self.sending is not None:
                    assert group_id == self.sending.command.transfer.group_id
                    self._break(reason)
            case commands.SendReload(instance_id, incarnation, request):
                assert request.transfer is not None
                self._arrive(instance_id, incarnation, request)
            case commands.PrepareExport() | commands.CheckExport():
                raise AssertionError("weights are written although they are transferred")
            case _:
                super()._carry_out(command)

    def _offered(self, version) -> WeightsOffered:
        return WeightsOffered(
            policy_version=version,
            offer_hash=f"offer-{self.attempt}-{len(self.published)}",
            tied_embeddings=False,
            tensors=TENSORS,
            store_host="127.0.0.1",
            store_port=1,
            probe_logprobs=probe_logprobs(version),
            offer_s=0.1,
        )

    def _begin(self, send: SendWeights) -> None:
        assert self.sending is None, "two transfers at once"
        assert not self.gang_is_busy, "the ranks do something else"
        assert send.policy_version == self.gang_version, "the ranks hold another version"
        group_id = send.transfer.group_id
        self._expected = frozenset(
            self.control.pool[it].incarnation for it in send.transfer.rank_offset_of
        )
        if group_id in self._groups_seen:
            assert self._processes_of.get(group_id) == self._expected, "a broken or other group"
        self._groups_seen.add(group_id)
        self._processes_of[group_id] = self._expected
        self.sending = Sending(command=send)
        self.transferred.append(send)
        self.pending.append(_SendDone(send.nonce))

    def _break(self, reason: str) -> None:
        if self.sending is not None and not self.sending.why_aborted:
            self.sending.why_aborted = reason
            self._processes_of.pop(self.sending.command.transfer.group_id, None)

    def _arrive(self, instance_id, incarnation, request: ReloadRequest) -> None:
        process = self.processes.get(instance_id)
        if process is None or process.incarnation != incarnation:
            lost = events.ReloadAnswered(instance_id, incarnation, request.nonce, None, "reset")
            self.pending.append(lost)
            return
        if not request.force:
            assert process.version is None or process.version < request.policy_version
        self.pending.append(Receive(instance_id, incarnation, request))
        if self._is_of_sending(request):
            self.sending.arrived.add(instance_id)

    def _is_of_sending(self, request: ReloadRequest) -> bool:
        return self.sending is not None and self.sending.command.nonce == request.nonce

    def _receive(self, event: "Receive") -> None:
        process = self.processes[event.instance_id]
        is_alive = self._is_of_sending(event.request) and not self.sending.why_aborted
        if is_alive and event.instance_id not in self.loads_to_fail:
            self.sending.received.add(event.instance_id)
            process.version = event.request.policy_version
            process.manifest_hash = event.request.manifest_hash
            sum_ = f"sum-{event.request.nonce}"
            self._acknowledge(
                event.instance_id,
                event.incarnation,
                event.request,
                verified=VERIFIED,
                checksum=sum_,
            )
            return
        process.version = process.manifest_hash = None
        if is_alive:
            self.loads_to_fail.remove(event.instance_id)
            self._break("loading failed")
        self._acknowledge(
            event.instance_id,
            event.incarnation,
            event.request,
            error="loading failed" if is_alive else "broken off",
            was_aborted=not is_alive,
        )

    def _is_next(self, event: "Receive") -> bool:
        """A server obeys one request after the other."""
        waiting = (e for e in self.pending if isinstance(e, Receive))
        return next(e for e in waiting if e.instance_id == event.instance_id) is event

    def _end_sending(self) -> None:
        sending, self.sending = self.sending, None
        assert sending is not None
        self._rank_says(
            WeightsSent(
                policy_version=sending.command.policy_version,
                nonce=sending.command.nonce,
                checksum="" if sending.why_aborted else f"sum-{sending.command.nonce}",
                num_bytes=64,
                send_s=0.1,
                error=sending.why_aborted,
            )
        )

    def _judge(self, request: ReloadRequest, acks: tuple[ReloadAck, ...]) -> AcksJudged:
        return judge_acks(
            request,
            acks,
            trainer_probe_logprobs=probe_logprobs(request.policy_version),
            probe_tolerance=1e-3,
            checksum=f"sum-{request.nonce}",
        )

    def lose_gang(self) -> None:
        self._break("rank 0 is gone")
        self.sending = None
        self._processes_of.clear()
        self.pending = [e for e in self.pending if not isinstance(e, _SendDone)]
        super().lose_gang()

    def happen(self, event: object, rng: Random) -> None:
        match event:
            case _SendDone():
                self._end_sending()
            case Receive():
                self._receive(event)
            case _:
                super().happen(event, rng)

    def _can_happen(self, event: object) -> bool:
        if self.is_held(event):
            return False
        match event:
            case _SendDone():
                return self.sending is not None and self.sending.can_end
            case Receive() if not self._is_next(event):
                return False
            case Receive(request=request) if self._is_of_sending(request):
                sending = self.sending
                return bool(sending.why_aborted) or sending.arrived == sending.members
            case events.RankSaid(event=StepTrained()) if self.sending is not None:
                return False
            case _:
                return super()._can_happen(event)


class Receive(msgspec.Struct, frozen=True):
    """Not an event: a server that has been asked and waits for data."""

    instance_id: InstanceId
    incarnation: Incarnation
    request: ReloadRequest


class _SendDone(msgspec.Struct, frozen=True):
    """Not an event: the ranks' end of a transfer."""

    nonce: str
