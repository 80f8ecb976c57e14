"""A run over followers that are fake: versions that reach every node, and nodes that die.

The control state, the loop, the executor, the links and the HTTP to servers are real; the trainer,
trajectories, reading and loading of weights cost nothing. So what is measured is the protocol's.
"""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream
from bench_reload import publish_tiny
from reload_bed import ATTEMPT, RUN, Bed

from libra import clock
from libra.config.weights import WeightsConfig
from libra.ids import ChildId, Incarnation, InstanceId, NodeRank, PolicyVersion
from libra.rollouts.group import AdmittedGroup
from libra.wire.instance import (
    INCARNATION_HEADER,
    INSTANCE_HEADER,
    InstanceState,
    ReloadAck,
    ReloadRequest,
    WeightsReceipt,
)
from libra_supervisor.events import (
    CheckpointChosen,
    ChildExited,
    ChildGaveUp,
    ChildReady,
    ChildStarted,
    GangLost,
    GangReady,
)
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.nodes.remote import RemoteNode

HOST = "127.0.0.1"
NUM_VERSIONS = 5
MAX_HEAD_BYTES = 1 << 16


def instance_of(node: int) -> InstanceId:
    return InstanceId(f"vllm-{node}")


def incarnation_of(instance_id: InstanceId) -> Incarnation:
    return Incarnation(f"{instance_id}-first")


class FakeServer:
    """The guarded routes of the server on one follower; a load takes no time."""

    def __init__(self, node: int) -> None:
        self._instance_id = instance_of(node)
        self._version = PolicyVersion(0)
        self.port = 0

    async def run(self) -> None:
        listener = await anyio.create_tcp_listener(local_host=HOST)
        address = listener.extra_attributes[anyio.abc.SocketAttribute.local_port]
        self.port = address()
        await listener.serve(self._serve)

    async def _serve(self, stream: anyio.abc.SocketStream) -> None:
        with suppress(anyio.IncompleteRead, anyio.BrokenResourceError):
            async with stream:
                await self._answer_all(BufferedByteReceiveStream(stream), stream)

    async def _answer_all(
        self, requests: BufferedByteReceiveStream, answers: anyio.abc.SocketStream
    ) -> None:
        who = (
            f"{INSTANCE_HEADER}: {self._instance_id}\r\n"
            f"{INCARNATION_HEADER}: {incarnation_of(self._instance_id)}\r\n"
        ).encode()
        while True:
            head = (await requests.receive_until(b"\r\n\r\n", MAX_HEAD_BYTES)).lower()
            _, _, length = head.partition(b"content-length:")
            num_bytes = int(length.split(b"\r\n")[0] or 0)
            answer = msgspec.json.encode(self._answer(await requests.receive_exactly(num_bytes)))
            await answers.send(
                b"HTTP/1.1 200 OK\r\n%bContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (who, len(answer), answer)
            )

    def _answer(self, body: bytes) -> ReloadAck | InstanceState:
        """A request without a body asks for the state."""
        if not body:
            return state_of(self._instance_id, self._version)
        request = msgspec.json.decode(body, type=ReloadRequest)
        self._version = request.policy_version
        return ReloadAck(
            instance_id=self._instance_id,
            incarnation=incarnation_of(self._instance_id),
            run_id=request.run_id,
            nonce=request.nonce,
            policy_version=request.policy_version,
            method="inplace",
            strategy=request.strategy,
            lock_wait_s=0.0,
            process_stop_s=0.0,
            model_load_s=0.0,
            total_s=0.0,
            manifest_hash=request.manifest_hash,
            verified=("manifest", "files", "load", "probe"),
            probe_logprobs=tuple(-1.0 for _ in request.probe_token_ids[1:]),
        )


def state_of(instance_id: InstanceId, version: PolicyVersion) -> InstanceState:
    return InstanceState(
        instance_id=instance_id,
        incarnation=incarnation_of(instance_id),
        run_id=RUN,
        policy_version=version,
        is_paused=False,
        manifest_hash=None,
    )


class HttpEngines:
    """`libra_supervisor.ports.Engines` over the followers' fake servers."""

    def __init__(self, clients: Mapping[InstanceId, InstanceClient]) -> None:
        self._clients = clients

    async def ask_state(self, instance_id: InstanceId) -> InstanceState:
        return await self._clients[instance_id].state()

    async def ask_kv_capacity(self, instance_id: InstanceId) -> int | None:
        del instance_id

    async def reload(self, instance_id: InstanceId, request: ReloadRequest) -> ReloadAck:
        return await self._clients[instance_id].reload(request, timeout_s=60.0)

    def url_of(self, instance_id: InstanceId) -> str:
        return f"http://{instance_id}"

    def loading_directories(self) -> frozenset[Path]:
        return frozenset()

    def replace(self, instance_id: InstanceId, reason: str) -> None:
        """Nothing comes in its place."""


class LinkReaders:
    """`libra_supervisor.ports.Readers` over the links."""

    def __init__(self, nodes: Mapping[NodeRank, RemoteNode]) -> None:
        self._nodes = nodes

    async def read_weights(
        self, node: NodeRank, directory: str, manifest_hash: str
    ) -> WeightsReceipt | None:
        return await self._nodes[node].read_weights(directory, manifest_hash)


class WatchedRouting:
    """When an instance was last taken out of routing."""

    def __init__(self) -> None:
        self.withdrawn_at: dict[InstanceId, float] = {}

    def know(self, *_what: object, is_planned: bool = False) -> None: ...

    def serve(self, *_what: object) -> None: ...

    def withdraw(self, instance_id: InstanceId, *_what: object, is_draining: bool) -> None:
        del is_draining
        self.withdrawn_at[instance_id] = clock.now()


class HeldRollouts:
    """Trajectories that never end; when the newest group was begun."""

    def __init__(self) -> None:
        self.began_at: float | None = None

    def start(self, group: AdmittedGroup) -> None:
        del group
        self.began_at = clock.now()

    def cancel(self, group_id: object) -> None: ...

    def cancel_all(self, reason: str) -> None: ...


async def clients_of(
    nodes: Mapping[NodeRank, RemoteNode], stack: AsyncExitStack
) -> dict[InstanceId, InstanceClient]:
    """Ask every follower for its server's port; the clients live as long as `stack`."""
    clients: dict[InstanceId, InstanceClient] = {}
    for rank, node in nodes.items():
        instance_id, port = instance_of(rank), await node.hold_port(HOST, 0)
        client = InstanceClient(instance_id, f"http://{HOST}:{port}", token="bench")  # noqa: S106
        clients[instance_id] = await stack.enter_async_context(client)
    return clients


async def bed_of(
    root: Path, nodes: Mapping[NodeRank, RemoteNode], *, num_batches: int, min_gpus: int
) -> Bed:
    """Every server has started and answers."""
    node_of = {instance_of(rank): rank for rank in nodes}
    bed = Bed(
        root, WeightsConfig(), [(it, 1) for it in node_of], publish_tiny,
        num_batches=num_batches, node_of=node_of, readers=LinkReaders(nodes),
        min_rollout_gpus=min_gpus,
    )  # fmt: skip
    for number, instance_id in enumerate(node_of):
        child, incarnation = ChildId(instance_id), incarnation_of(instance_id)
        await bed.inbox.post(ChildStarted(child, number + 1, 1, incarnation, 0.0))
        await bed.inbox.post(ChildReady(child, incarnation, 0.0, 0.0))
    return bed


async def publications(
    nodes: Mapping[NodeRank, RemoteNode], clients: Mapping[InstanceId, InstanceClient]
) -> dict[str, Any]:
    """Versions from the trainer's word that they are written to every node's server."""
    with tempfile.TemporaryDirectory(prefix="libra-bench-") as root:
        bed = await bed_of(Path(root), nodes, num_batches=NUM_VERSIONS, min_gpus=len(nodes))
        batches = await bed.run(HttpEngines(clients))
    if {batch.record.outcome for batch in batches} != {"committed"}:
        raise RuntimeError(f"a batch failed: {[batch.record.outcome for batch in batches]}")
    took_s = [batch.since_export_s for batch in batches]
    return {
        "export_to_all_nodes_s": {"median": round(median(took_s), 3), "max": round(max(took_s), 3)},
        "of_it_reloads_s": round(median(batch.record.total_s for batch in batches), 3),
    }


async def losses(
    nodes: Mapping[NodeRank, RemoteNode],
    clients: Mapping[InstanceId, InstanceClient],
    kill: Callable[[], list[NodeRank]],
    lost_at: Mapping[NodeRank, float],
) -> dict[str, Any]:
    """Nodes die while they make trajectories; their ranks are the trainer's, which starts anew.

    What would wait for the nodes is played as if they were given up: the servers that are left get
    the version of the new attempt. `kill` returns who dies; `lost_at` is filled by the links.
    """
    with tempfile.TemporaryDirectory(prefix="libra-bench-") as root:
        bed = await bed_of(Path(root), nodes, num_batches=100, min_gpus=1)
        rollouts, routing = HeldRollouts(), WatchedRouting()
        bed.rollouts, bed.routing = lambda _tasks: rollouts, routing
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bed.run, HttpEngines(clients))
            await until(lambda: rollouts.began_at is not None)
            rollouts.began_at = None
            doomed, died_at = kill(), clock.now()
            await until(lambda: len(lost_at) == len(doomed))
            await bed.inbox.post(GangLost(ATTEMPT, "its nodes were lost"))
            for node in doomed:
                child = ChildId(instance_of(node))
                await bed.inbox.post(exited(child))
                await bed.inbox.post(ChildGaveUp(child, "lost", "lost", 1, (), 0.0))
            await bed.inbox.post(CheckpointChosen(ATTEMPT + 1, 0, None))
            await bed.inbox.post(GangReady(ATTEMPT + 1, 0, 1))
            await until(lambda: rollouts.began_at is not None)
            tasks.cancel_scope.cancel()
    last = max(lost_at.values())
    unrouted_at = max(routing.withdrawn_at[instance_of(node)] for node in doomed)
    return {
        "num_killed": len(doomed),
        "death_to_lost_s_min": round(min(lost_at.values()) - died_at, 2),
        "death_to_lost_s_max": round(last - died_at, 2),
        "lost_to_unrouted_ms": round(1e3 * (unrouted_at - last), 1),
        "lost_to_reissued_s": round((rollouts.began_at or 0.0) - last, 3),
        "death_to_reissued_s": round((rollouts.began_at or 0.0) - died_at, 2),
    }


def exited(child: ChildId) -> ChildExited:
    incarnation = incarnation_of(InstanceId(child))
    return ChildExited(child, incarnation, None, None, False, "lost", (), 0.0)


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await clock.sleep(0.002)
