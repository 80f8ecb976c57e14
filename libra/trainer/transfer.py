"""Weights of the current policy to the engines' workers, bucket by bucket, without a disk.

Every rank gathers, as for an export, while rank 0 sends what was gathered before. Data flows only
once all engines are paused and ready, so that no rank waits in a collective for an engine: until
then ranks other than 0 look at rank 0's store.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import torch

from libra import clock
from libra.errors import DataError, InvariantError
from libra.trainer.assembly import Trainer
from libra.trainer.probe import Probe, probe_logprobs
from libra.trainer.publish import SAFETENSORS_DTYPE
from libra.trainer.world import sum_over_world
from libra.transfer.group import Signals, connect_store
from libra.transfer.outcome import TransferAbortedError
from libra.transfer.packing import buckets_of
from libra.transfer.sender import Sender
from libra.wire.instance import TransferTensor
from libra.wire.rank import OfferWeights, SendWeights, WeightsOffered, WeightsSent

POLL_S = 0.01


class Sent(msgspec.Struct, frozen=True):
    """What a reload batch by transfer is judged by."""

    probe: Probe
    checksum: str


class Transfers:
    """One rank's part in transfers. `abort_reason` says why a group is to be given up."""

    def __init__(
        self, trainer: Trainer, *, abort_reason: Callable[[str], str | None], host: str
    ) -> None:
        """`host` is where rank 0 listens."""
        self._trainer = trainer
        self._host = host
        self._abort_reason = abort_reason
        self._beat = partial(trainer.learner.beat, "transfer")
        self._sender: Sender | None = None
        self._rank_0_store: Any = None
        self._probe: Probe | None = None
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
        self._beat()
        num_broken = 0.0 if trainer.backend.has_finite_weights() else 1.0
        is_broken = sum_over_world(trainer.world, [num_broken])[0] > 0
        probe = Probe(
            token_ids=command.probe_token_ids,
            logprobs=probe_logprobs(trainer, command.probe_token_ids),
        )
        if trainer.world.at.rank:
            return None
        self._probe = probe
        if self._sender is None:
            self._sender = Sender(
                trainer.world.device,
                beat=self._beat,
                abort_reason=self._abort_reason,
                host=self._host,
            )
        dtype = SAFETENSORS_DTYPE[trainer.backend.export_dtype]
        return WeightsOffered(
            policy_version=command.policy_version,
            offer_hash=uuid.uuid4().hex,
            tied_embeddings=trainer.backend.has_tied_embeddings,
            tensors=tuple(
                TransferTensor(name, dtype, shape) for name, shape in trainer.backend.export_plan
            ),
            store_host=self._sender.host,
            store_port=self._sender.port,
            probe_logprobs=probe.logprobs,
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
        if self._sender is None or self._probe is None:
            raise InvariantError("weights are to be sent that were not offered")
        probe, checksum, error = self._probe, "", ""

        def keep(summed: str) -> None:
            self._sent = {command.nonce: Sent(probe, summed)}

        try:
            self._sender.send(command.transfer, command.nonce, self._gathered, on_summed=keep)
            checksum = self.sent(command.nonce).checksum
        except TransferAbortedError as aborted:
            error = str(aborted)
        plan = buckets_of(command.transfer.tensors, bucket_bytes=command.transfer.bucket_bytes)
        return WeightsSent(
            policy_version=command.policy_version,
            nonce=command.nonce,
            checksum=checksum,
            num_bytes=sum(bucket.num_bytes for bucket in plan),
            send_s=clock.monotonic() - began_at,
            error=error,
        )

    def close(self) -> None:
        if self._sender is not None:
            self._sender.leave("the trainer is leaving")

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._trainer.backend.hf_tensors(beat=self._beat, to_cpu=False)

    def _gather_for_rank_0(self, command: SendWeights) -> None:
        """On the other ranks: wait for rank 0's word outside of any collective, then gather."""
        transfer = command.transfer
        if self._rank_0_store is None:
            self._rank_0_store = connect_store(transfer.store_host, transfer.store_port)
        signals = Signals(self._rank_0_store, transfer.group_id)
        while (word := signals.heard(f"go/{command.nonce}")) is None:
            self._beat()
            time.sleep(POLL_S)
        if word == "yes":
            for _ in self._gathered():
                raise InvariantError("only rank 0 may be given whole tensors")
