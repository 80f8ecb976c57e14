"""Which group the next weight transfer goes through, and what rank 0 is sending. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from libra.config.weights import WeightsConfig
from libra.errors import InvariantError
from libra.weights.buckets import BUCKET_BYTES
from libra.weights.reload import Member
from libra.weights.transfer_group import transfer_group
from libra.wire.instance import WeightsTransfer
from libra.wire.rank import WeightsOffered, WeightsSent

if TYPE_CHECKING:
    from libra.ids import Incarnation, InstanceId

STALL_S: Final = 60.0
"""Longest time without a bucket while data flows."""


class TransferDesk:
    """Keeps a group while its processes stay the same and nothing breaks it."""

    def __init__(self, weights: WeightsConfig, *, rank_heartbeat_timeout_s: float) -> None:
        self._timeout_s = weights.rollout_weight_ack_timeout_s
        # Ranks that wait for rank 0 in a collective meanwhile must not be taken for hung.
        self._stall_s = min(STALL_S, rank_heartbeat_timeout_s / 2)
        self._offered: WeightsOffered | None = None
        self._group_id = ""
        self._processes: frozenset[tuple[InstanceId, Incarnation]] = frozenset()
        self._sending: str | None = None
        self._is_aborted = False

    @property
    def is_sending(self) -> bool:
        """Rank 0 has not said yet what became of the transfer before."""
        return self._sending is not None

    def on_offered(self, offered: WeightsOffered) -> None:
        self._offered = offered

    def transfer(self, members: Sequence[Member], *, nonce: str) -> WeightsTransfer:
        """Begin to bring what was offered to `members`."""
        offered = self._offered
        if offered is None:
            raise InvariantError("a transfer of weights that were not offered")
        processes = frozenset((member.instance_id, member.incarnation) for member in members)
        if processes != self._processes:
            self._processes, self._group_id = processes, nonce
        self._sending, self._is_aborted = nonce, False
        group = transfer_group({member.instance_id: member.num_gpus for member in members})
        return WeightsTransfer(
            group_id=self._group_id,
            store_host=offered.store_host,
            store_port=offered.store_port,
            world_size=group.world_size,
            rank_offset_of=group.rank_offset_of,
            tied_embeddings=offered.tied_embeddings,
            tensors=offered.tensors,
            bucket_bytes=BUCKET_BYTES,
            timeout_s=self._timeout_s,
            stall_s=self._stall_s,
        )

    def group_to_abort(self) -> str | None:
        """The group of the transfer under way, once; None when rank 0 is through with it."""
        if self._is_aborted or self._sending is None:
            return None
        self._is_aborted = True
        group_id = self._group_id
        self.leave_group()
        return group_id

    def leave_group(self) -> None:
        """The next transfer has another group: one of this one's members is lost, or failed."""
        self._processes = frozenset()

    def on_sent(self, sent: WeightsSent) -> None:
        if sent.nonce == self._sending:
            self._sending = None
        if sent.error:
            self.leave_group()

    def on_gang_lost(self) -> None:
        self._offered = self._sending = None
        self.leave_group()
