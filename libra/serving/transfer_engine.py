"""vLLM's weight transfer over a group with the trainer: gloo on CPU, NCCL on CUDA.

Registered with vLLM by the general plug-in, for 0.22 and 0.32, which ask for it in two ways: what
0.22's worker does around `receive_weights` (the layers' part), 0.32's leaves to the engine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from libra.errors import PeerError
from libra.transfer.group import Group, Place, Signals, connect_store, join, own_address
from libra.transfer.packing import Checksum, buckets_of, checksum_text, unpacked
from libra.wire.instance import WeightsTransfer

Load = Callable[[list[tuple[str, torch.Tensor]]], Any]


@dataclass
class JoinInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Which group, and where in it this server's first worker stands."""

    transfer: bytes
    """A WeightsTransfer as msgpack."""

    rank_offset: int


@dataclass
class ReceiveInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which tensors come now."""

    transfer: bytes
    nonce: str


class TransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """One worker's end."""

    init_info_cls = JoinInfo
    update_info_cls = ReceiveInfo

    def __init__(self, config: Any, *of_vllm: Any) -> None:
        """`of_vllm` is what this vLLM gives its engines, the model last."""
        super().__init__(config, *of_vllm)
        # Taken now: while weights are loaded the parameters are on the meta device.
        self._device = next(self.model.parameters()).device
        self._group: Group | None = None
        self.checksum = ""
        """Of the newest transfer that came through."""

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join the group. Raises TransferAbortedError."""
        self.shutdown()
        transfer = _decoded(init_info.transfer)
        store = connect_store(transfer.store_host, transfer.store_port)
        self._group = join(
            Signals(store, transfer.group_id),
            Place(
                init_info.rank_offset + self.parallel_config.rank,
                transfer.world_size,
                self._device,
                own_address(transfer.store_host, transfer.store_port),
            ),
            timeout_s=transfer.timeout_s,
            stall_s=transfer.stall_s,
            beat=_no_beat,
        )

    def start_weight_update(self) -> None:
        """Of vLLM 0.32; the worker of 0.22 does it itself."""
        from vllm.model_executor.model_loader.reload import (  # noqa: PLC0415 - not in every vLLM
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Of vLLM 0.32, as `start_weight_update`."""
        from vllm.model_executor.model_loader.reload import (  # noqa: PLC0415 - not in every vLLM
            finalize_layerwise_reload,
        )

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Of vLLM 0.32: its own waits for a device, which a CPU is not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ReceiveInfo, load_weights: Load | None = None) -> None:
        """Receive and load, bucket by bucket, the next one under way meanwhile.

        Raises TransferAbortedError, or PeerError when the bytes are not those that were sent.
        """
        if self._group is None:
            raise PeerError("this worker is in no transfer group")
        transfer = _decoded(update_info.transfer)
        load = self.model.load_weights if load_weights is None else load_weights
        self._until_go(self._group, transfer, update_info.nonce)
        summed = Checksum(self._device)
        tensors = iter(transfer.tensors)
        plan = buckets_of(transfer.tensors, bucket_bytes=transfer.bucket_bytes)
        buffers = self._received(self._group, [b.num_bytes for b in plan], transfer.stall_s)
        for bucket, buffer in zip(plan, buffers, strict=False):
            summed.add(buffer)
            of_bucket = [next(tensors) for _ in bucket.offsets]
            # vLLM keeps what it is given until a layer is whole: every bucket has its own memory.
            load(list(unpacked(bucket, of_bucket, buffer)))
        sent = next(buffers).view(torch.int64)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.checksum = checksum_text(summed.value)
        if self.checksum != checksum_text(sent):
            raise PeerError(
                f"the weights came with checksum {self.checksum}, sent was {checksum_text(sent)}"
            )

    def abort(self, reason: str) -> None:
        """Leave the group, and have everybody else leave it."""
        if self._group is not None:
            self._group.signals.abort(reason)
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Of vLLM 0.22's interface; trainer ranks have no vLLM and send by themselves."""
        raise NotImplementedError("libra.trainer.transfer sends")

    def _until_go(self, group: Group, transfer: WeightsTransfer, nonce: str) -> None:
        """Say that this worker is ready, and wait until all are."""
        group.signals.count(f"ready/{nonce}", more=1)
        group.signals.wait(
            lambda: group.signals.heard(f"go/{nonce}") is not None,
            timeout_s=transfer.timeout_s,
            what="waiting for all servers to be ready",
            beat=_no_beat,
        )

    def _received(self, group: Group, sizes: list[int], stall_s: float) -> Iterator[torch.Tensor]:
        """Yield the buckets, then the sender's checksum, each received while the last is used."""
        under_way: tuple[torch.Tensor, Any] | None = None
        for size in [*sizes, 8]:
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            begun = (buffer, group.broadcast(buffer))
            if under_way is not None:
                group.wait(under_way[1], stall_s=stall_s, beat=_no_beat)
                yield under_way[0]
            under_way = begun
        if under_way is not None:
            group.wait(under_way[1], stall_s=stall_s, beat=_no_beat)
            yield under_way[0]


def _decoded(content: bytes) -> WeightsTransfer:
    return msgspec.msgpack.decode(content, type=WeightsTransfer)


def _no_beat() -> None:
    """Nobody watches a worker's wait but its server."""
