"""What the loop's effects need of the world. `app` puts the real parts behind them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from libra.ids import GroupId, Incarnation, InstanceId, NodeRank, ReplicaId
from libra.planner.plan import HybridPlacement, InstancePlacement, TrainPlacement
from libra.rollouts.group import AdmittedGroup
from libra.wire.instance import InstanceState, ReloadAck, ReloadRequest, WeightsReceipt
from libra.wire.rank import MiniBatch, RankCommand, TrainStep

Shards: TypeAlias = Sequence[tuple[MiniBatch, ...]]
"""Each data-parallel rank's mini-batches."""


class Ranks(Protocol):
    """The gang. A message for an attempt that is over is dropped: it would confuse the next."""

    def tell_all(self, attempt: int, command: RankCommand) -> None:
        """Queue one message for every rank."""

    def tell_rank_zero(self, attempt: int, command: RankCommand) -> None: ...

    def train(self, attempt: int, command: TrainStep, shards: Shards) -> None:
        """Queue `command` for every rank, each with the shard of its data-parallel rank."""


class Replicas(Protocol):
    """The gangs of hybrid replicas. A message for one that has ended is dropped."""

    def start(self, placement: HybridPlacement, *, has_devices: bool) -> None:
        """ReplicaReady says when it has its model, ReplicaDown when all of it is gone.

        Without devices its ranks wait for TakeDevice, which HybridWarmed says.
        """

    def stop(self, replica_id: ReplicaId, *, in_a_hurry: bool) -> None:
        """End its processes; in a hurry without waiting for what they do."""

    def tell(self, replica_id: ReplicaId, command: RankCommand) -> None:
        """Queue one message for every rank of it."""

    def train(self, replica_id: ReplicaId, command: TrainStep, shards: Shards) -> None:
        """Queue `command` for every rank of it, each with its own shard."""


class Trainers(Protocol):
    """The gang's place and layout."""

    def reshape(self, placement: TrainPlacement, *, probes: bool) -> None:
        """End the gang and start another attempt as `placement`, at no cost to its budget.

        With `probes` its ranks run the recompute probe, whatever they restore.
        """


class Readers(Protocol):
    """Whoever reads published weights on the other nodes, so that each of them does it once."""

    async def read_weights(
        self, node: NodeRank, directory: str, manifest_hash: str
    ) -> WeightsReceipt | None:
        """Read every byte there; None where the file system allows no receipt.

        Raises PeerError when the node is lost, or does not find the bytes as they were announced.
        """


class Engines(Protocol):
    """The vLLM servers' processes and their HTTP."""

    async def ask_state(self, instance_id: InstanceId) -> InstanceState:
        """Raises PeerError."""

    async def ask_kv_capacity(self, instance_id: InstanceId) -> int | None:
        """Tokens that the server's KV cache holds; None when it does not say."""

    async def reload(self, instance_id: InstanceId, request: ReloadRequest) -> ReloadAck:
        """Raises PeerError when there is no answer."""

    def url_of(self, instance_id: InstanceId) -> str: ...

    def loading_directories(self) -> frozenset[Path]:
        """Published versions that processes are starting from: they must not be deleted."""

    def replace(self, instance_id: InstanceId, reason: str) -> None:
        """End the process and start another, without waiting for either."""

    def add(self, placement: InstancePlacement, *, has_devices: bool) -> None:
        """Start a server, or let one go on that waits for its devices.

        InstanceWarmed says when one without devices has come as far as it can.
        """

    def drain(self, instance_id: InstanceId, *, gives_back: bool) -> None:
        """Have InstanceDrained posted when nothing is in flight there.

        With `gives_back` what is in flight goes back to the queue.
        """

    def keep(self, instance_id: InstanceId) -> None:
        """Forget about a drain that was asked for."""

    def retire(self, instance_id: InstanceId) -> None:
        """End a server for good; InstanceRetired says when its devices are free."""

    def sleep(self, instance_id: InstanceId) -> None:
        """Have an idle server give its devices back: InstanceAsleep says when it has.

        One that does not within the time of a stall is retired.
        """

    def wake(self, instance_id: InstanceId) -> None:
        """Have it take them again: InstanceWoken says when it has.

        One that does not is replaced by a new process.
        """


class Rollouts(Protocol):
    """The tasks that make trajectories."""

    def start(self, group: AdmittedGroup) -> None: ...

    def cancel(self, group_id: GroupId) -> None: ...

    def ask_again(self, group_id: GroupId, sample_indices: Sequence[int]) -> None:
        """Begin these samples of a running group anew, but for those that have just ended."""

    def cancel_all(self, reason: str) -> None: ...


class Routing(Protocol):
    """The scheduler, seen from the loop."""

    def know(
        self,
        instance_id: InstanceId,
        incarnation: Incarnation,
        kv_capacity_tokens: int | None,
        *,
        is_planned: bool,
    ) -> None:
        """Tell of a process; a planned one continues what its predecessor was known for."""

    def serve(self, instance_id: InstanceId, version: int) -> None: ...

    def places_of(self, group_ids: Sequence[GroupId]) -> dict[str, str]:
        """By request of these groups: the instance it is at, or that it waits for a place."""

    def forget(self, instance_id: InstanceId) -> None:
        """Its server has ended and does not come back."""

    def withdraw(self, instance_id: InstanceId, *, is_draining: bool) -> None: ...
