"""Trainer rank 0's end of weight transfers: the store, the group, and the buckets on their way."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from libra.errors import InvariantError
from libra.transfer.group import LOOPBACK, Beat, Group, Place, Signals, join, open_store
from libra.transfer.outcome import TransferAbortedError
from libra.transfer.packing import Checksum, buckets_of, checksum_text, packed
from libra.wire.instance import TransferTensor, WeightsTransfer

MOST_UNDER_WAY = 2
"""Buckets that are being sent while the next one is filled."""

Named = Iterator[tuple[str, torch.Tensor]]


class Sender:
    """Keeps its group from one transfer to the next until another one is asked for."""

    def __init__(
        self,
        device: torch.device,
        *,
        beat: Beat,
        abort_reason: Callable[[str], str | None],
        host: str = LOOPBACK,
    ) -> None:
        """`beat` is called while waiting; `abort_reason` says why a group is to be given up.

        `host` is where the servers reach this machine.
        """
        self._device = device
        self._beat = beat
        self._abort_reason = abort_reason
        self._store, self.port = open_store(host)
        self.host = host
        self._group: Group | None = None
        self._group_id = ""

    def send(
        self,
        transfer: WeightsTransfer,
        nonce: str,
        gather: Callable[[], Named],
        *,
        on_summed: Callable[[str], None],
    ) -> None:
        """Send what `gather` yields, run to its end once it is begun.

        `on_summed` is told the checksum before any member can have it. Raises
        TransferAbortedError, at all members; then the next transfer needs another group.
        """
        try:
            group = self._ready_group(transfer, nonce)
            tensors = gather()
            try:
                self._stream(group, transfer, tensors, on_summed)
            finally:
                # Other ranks gather with us, whatever became of the group.
                deque(tensors, maxlen=0)
        except TransferAbortedError as aborted:
            self.leave(str(aborted))
            raise

    def leave(self, reason: str) -> None:
        """Leave the group, and have all members leave it."""
        group, self._group = self._group, None
        if self._group_id:
            Signals(self._store, self._group_id).abort(reason)
        if group is not None:
            group.close()

    def _ready_group(self, transfer: WeightsTransfer, nonce: str) -> Group:
        """The group with every member ready to receive; other ranks are told whether it is."""
        signals = Signals(self._store, transfer.group_id)
        word = "no"
        try:
            group = self._joined(transfer, signals)
            signals.wait(
                lambda: signals.count(f"ready/{nonce}") >= transfer.world_size - 1,
                timeout_s=transfer.timeout_s,
                what="waiting for all servers to be ready",
                beat=partial(self._look, transfer.group_id),
            )
            word = "yes"
        finally:
            signals.say(f"go/{nonce}", word)
        return group

    def _joined(self, transfer: WeightsTransfer, signals: Signals) -> Group:
        if self._group is None or transfer.group_id != self._group_id:
            self.leave("another group follows")
            self._group_id = transfer.group_id
            self._group = join(
                signals,
                Place(0, transfer.world_size, self._device, self.host),
                timeout_s=transfer.timeout_s,
                stall_s=transfer.stall_s,
                beat=partial(self._look, transfer.group_id),
            )
        return self._group

    def _stream(
        self,
        group: Group,
        transfer: WeightsTransfer,
        tensors: Named,
        on_summed: Callable[[str], None],
    ) -> None:
        look = partial(self._look, transfer.group_id)
        under_way: deque[tuple[Any, torch.Tensor]] = deque()
        planned = iter(transfer.tensors)
        summed = Checksum(self._device)
        for bucket in buckets_of(transfer.tensors, bucket_bytes=transfer.bucket_bytes):
            of_bucket = list(islice(planned, len(bucket.offsets)))
            buffer = packed(bucket, _as_planned(of_bucket, tensors), device=self._device)
            summed.add(buffer)
            under_way.append((group.broadcast(buffer), buffer))
            look()
            if len(under_way) >= MOST_UNDER_WAY:
                group.wait(under_way.popleft()[0], stall_s=transfer.stall_s, beat=look)
        if next(tensors, None) is not None:
            raise InvariantError("more tensors were gathered than were planned")
        on_summed(checksum_text(summed.value))
        last = summed.value.view(torch.uint8).clone()
        under_way.append((group.broadcast(last), last))
        for work, _ in under_way:
            group.wait(work, stall_s=transfer.stall_s, beat=look)

    def _look(self, group_id: str) -> None:
        """Say that we live. Raises TransferAbortedError when the group was given up."""
        self._beat()
        if (reason := self._abort_reason(group_id)) is not None:
            raise TransferAbortedError(reason)


def _as_planned(planned: Sequence[TransferTensor], tensors: Named) -> Named:
    """As many tensors as are planned, which must be those."""
    for wanted in planned:
        name, tensor = next(tensors)
        if name != wanted.name or tuple(tensor.shape) != wanted.shape:
            raise InvariantError(f"gathered {name} where {wanted.name} was planned")
        yield name, tensor
