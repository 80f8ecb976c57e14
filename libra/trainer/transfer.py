"""Weights of the current policy to the engines' workers, bucket by bucket, without a disk.

Every rank gathers, as for an export, while rank 0 sends what was gathered before. Data flows only
once all engines are paused and ready, so that no rank waits in a collective for an engine: until
then ranks other than 0 look at rank 0's store.
"""

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import torch

from libra import clock
from libra.errors import DataError, InvariantError
from libra.trainer.assembly import Trainer
from libra.trainer.probe import Probe, probe_logprobs
from libra.trainer.publish import SAFETENSORS_DTYPE
from libra.trainer.world import sum_over_world
from libra.transfer.group import LOOPBACK, Group, Place, Signals, connect_store, join, open_store
from libra.transfer.outcome import TransferAbortedError
from libra.transfer.packing import Checksum, buckets_of, checksum_text, packed
from libra.weights.buckets import Bucket
from libra.wire.instance import TransferTensor, WeightsTransfer
from libra.wire.rank import OfferWeights, SendWeights, WeightsOffered, WeightsSent

POLL_S = 0.01
MOST_UNDER_WAY = 2
"""Buckets that are being sent while the next one is gathered."""


class Sent(msgspec.Struct, frozen=True):
    """What a reload batch by transfer is judged by."""

    probe: Probe
    checksum: str


class Transfers:
    """One rank's part in transfers. `abort_reason` says why a group's transfers are to be ended."""

    def __init__(self, trainer: Trainer, *, abort_reason: Callable[[str], str | None]) -> None:
        self._trainer = trainer
        self._abort_reason = abort_reason
        self._store: Any = None
        self._store_port = 0
        self._probe: Probe | None = None
        self._group: Group | None = None
        self._group_id = ""
        self._sent: dict[str, Sent] = {}

    def sent(self, nonce: str) -> Sent:
        """What was sent for a batch; from any thread. Raises DataError when nothing was."""
        try:
            return self._sent[nonce]
        except KeyError:
            raise DataError(f"no transfer of the batch {nonce} has been sent") from None

    def offer(self, command: OfferWeights) -> WeightsOffered | None:
        """Look at the weights and say what a transfer brings; every rank takes part.

        Returns what to announce on rank 0, None elsewhere.
        """
        trainer = self._trainer
        began_at = clock.monotonic()
        trainer.learner.beat("offer")
        num_broken = 0.0 if trainer.backend.has_finite_weights() else 1.0
        is_broken = sum_over_world(trainer.world, [num_broken])[0] > 0
        self._probe = Probe(
            token_ids=command.probe_token_ids,
            logprobs=probe_logprobs(trainer, command.probe_token_ids),
        )
        if trainer.world.at.rank:
            return None
        if self._store is None:
            self._store, self._store_port = open_store()
        dtype = SAFETENSORS_DTYPE[trainer.backend.export_dtype]
        return WeightsOffered(
            policy_version=command.policy_version,
            offer_hash=uuid.uuid4().hex,
            tied_embeddings=trainer.backend.has_tied_embeddings,
            tensors=tuple(
                TransferTensor(name, dtype, shape) for name, shape in trainer.backend.export_plan
            ),
            store_host=LOOPBACK,
            store_port=self._store_port,
            probe_logprobs=self._probe.logprobs,
            offer_s=clock.monotonic() - began_at,
            error="a value is NaN or infinite" if is_broken else "",
        )

    def send(self, command: SendWeights) -> WeightsSent | None:
        """Send to the group's members; every rank takes part, and none is hurt by a failure.

        Returns what to announce on rank 0, None elsewhere.
        """
        if self._trainer.world.at.rank:
            self._gather_for_rank_0(command)
            return None
        began_at = clock.monotonic()
        transfer, error = command.transfer, ""
        plan = buckets_of(transfer.tensors, bucket_bytes=transfer.bucket_bytes)
        try:
            self._send(command, plan)
        except TransferAbortedError as aborted:
            error = str(aborted)
            self._leave(error)
        sent = self._sent.get(command.nonce)
        return WeightsSent(
            policy_version=command.policy_version,
            nonce=command.nonce,
            checksum="" if sent is None or error else sent.checksum,
            num_bytes=sum(bucket.num_bytes for bucket in plan),
            send_s=clock.monotonic() - began_at,
            error=error,
        )

    def close(self) -> None:
        self._leave("the trainer is leaving")

    def _send(self, command: SendWeights, plan: Sequence[Bucket]) -> None:
        """On rank 0. Raises TransferAbortedError when the other ranks are through, too."""
        transfer = command.transfer
        signals = Signals(self._store, transfer.group_id)
        beat = partial(self._beat, transfer.group_id)
        try:
            group = self._joined(transfer, signals)
            signals.wait(
                lambda: signals.count(f"ready/{command.nonce}") >= transfer.world_size - 1,
                timeout_s=transfer.timeout_s,
                what="waiting for all servers to be ready",
                beat=beat,
            )
        except TransferAbortedError:
            signals.say(f"go/{command.nonce}", "no")
            raise
        signals.say(f"go/{command.nonce}", "yes")
        tensors = self._gathered()
        try:
            self._stream(group, command, plan, tensors)
        finally:
            # The other ranks gather to the end, whatever became of the group.
            deque(tensors, maxlen=0)

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        beat = partial(self._trainer.learner.beat, "transfer")
        return self._trainer.backend.hf_tensors(beat=beat, to_cpu=False)

    def _stream(
        self,
        group: Group,
        command: SendWeights,
        plan: Sequence[Bucket],
        tensors: Iterator[tuple[str, torch.Tensor]],
    ) -> None:
        device = self._trainer.world.device
        stall_s, beat = command.transfer.stall_s, partial(self._beat, command.transfer.group_id)
        under_way: deque[Any] = deque()
        names = iter(command.transfer.tensors)
        summed = Checksum(device)
        for bucket in plan:
            planned = list(islice(names, len(bucket.offsets)))
            buffer = packed(bucket, _named(planned, tensors), device=device)
            summed.add(buffer)
            under_way.append((group.broadcast(buffer), buffer))
            beat()
            if len(under_way) >= MOST_UNDER_WAY:
                group.wait(under_way.popleft()[0], stall_s=stall_s, beat=beat)
        # Known before it is sent: who has received it may be judged at once.
        probe = self._probe
        if probe is None:
            raise InvariantError("weights are sent that were not offered")
        self._sent = {command.nonce: Sent(probe, checksum_text(summed.value))}
        last = summed.value.view(torch.uint8).clone()
        under_way.append((group.broadcast(last), last))
        for work, _ in under_way:
            group.wait(work, stall_s=stall_s, beat=beat)
        if next(tensors, None) is not None:
            raise InvariantError("more tensors were gathered than were planned")

    def _joined(self, transfer: WeightsTransfer, signals: Signals) -> Group:
        """Keep the group of the transfer before when it is the same."""
        if self._group is None or transfer.group_id != self._group_id:
            self._leave("another group follows")
            self._group_id = transfer.group_id
            self._group = join(
                signals,
                Place(0, transfer.world_size, self._trainer.world.device),
                timeout_s=transfer.timeout_s,
                stall_s=transfer.stall_s,
                beat=partial(self._beat, transfer.group_id),
            )
        return self._group

    def _leave(self, reason: str) -> None:
        group, self._group = self._group, None
        if self._store is not None and self._group_id:
            Signals(self._store, self._group_id).abort(reason)
        if group is not None:
            group.close()

    def _beat(self, group_id: str) -> None:
        """Say that this rank lives. Raises TransferAbortedError when the supervisor gave it up."""
        self._trainer.learner.beat("transfer")
        if (reason := self._abort_reason(group_id)) is not None:
            raise TransferAbortedError(reason)

    def _gather_for_rank_0(self, command: SendWeights) -> None:
        """On the other ranks: wait for rank 0's word, then gather."""
        transfer = command.transfer
        if self._store is None:
            self._store = connect_store(transfer.store_host, transfer.store_port)
        signals, answer = Signals(self._store, transfer.group_id), f"go/{command.nonce}"
        while (word := signals.heard(answer)) is None:
            self._trainer.learner.beat("transfer")
            time.sleep(POLL_S)
        if word == "yes":
            for _ in self._gathered():
                raise InvariantError("only rank 0 may be given whole tensors")


def _named(
    planned: Sequence[TransferTensor], tensors: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """As many tensors as are planned, which must be those."""
    for wanted in planned:
        name, tensor = next(tensors)
        if name != wanted.name or tuple(tensor.shape) != wanted.shape:
            raise InvariantError(f"gathered {name} where {wanted.name} was planned")
        yield name, tensor
