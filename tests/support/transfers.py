"""Real transfers: ranks behind FakeSupervisor on one side, RealServers on the other."""

import os
import signal
import time
from contextlib import suppress
from typing import NamedTuple

import anyio
import anyio.to_thread

from libra.errors import PeerError
from libra.weights.transfer_group import transfer_group
from libra.wire.instance import ReloadAck, ReloadRequest, WeightsTransfer
from libra.wire.rank import (
    AcksJudged,
    JudgeAcks,
    OfferWeights,
    SendWeights,
    WeightsOffered,
    WeightsSent,
)

RUN_ID = "run-1"
PROBE = (5, 6, 7, 8, 9, 10, 11, 12)


class Transferred(NamedTuple):
    request: ReloadRequest
    offered: WeightsOffered
    sent: WeightsSent
    acks: dict[str, ReloadAck]


class Bed:
    """Brings what the ranks hold to servers, as the control plane does."""

    def __init__(self, supervisor, *, bucket_bytes=1 << 19, timeout_s=60.0, stall_s=20.0) -> None:
        self.supervisor = supervisor
        self.limits = {"bucket_bytes": bucket_bytes, "timeout_s": timeout_s, "stall_s": stall_s}
        self._num_batches = 0

    def offer(self, version: int) -> WeightsOffered:
        self.supervisor.send(OfferWeights(RUN_ID, version, PROBE))
        return self.supervisor.links[0].expect(WeightsOffered)

    def request(self, version, offered, workers_of, group_id, **limits) -> ReloadRequest:
        """For servers with so many workers each; another nonce every time."""
        self._num_batches += 1
        group = transfer_group(workers_of)
        transfer = WeightsTransfer(
            group_id=group_id,
            store_host=offered.store_host,
            store_port=offered.store_port,
            world_size=group.world_size,
            rank_offset_of=group.rank_offset_of,
            tied_embeddings=offered.tied_embeddings,
            tensors=offered.tensors,
            **self.limits | limits,
        )
        return ReloadRequest(
            run_id=RUN_ID,
            policy_version=version,
            nonce=f"batch-{self._num_batches}",
            weights_directory="",
            manifest_hash=offered.offer_hash,
            pause_mode="keep",
            probe_token_ids=PROBE,
            force=True,
            transfer=transfer,
        )

    async def transfer(self, version, servers, *, group_id="group-1", **limits) -> Transferred:
        """`servers` are pairs of a RealServer and its number of workers."""
        offered = self.offer(version)
        workers_of = {server.name: tp for server, tp in servers}
        request = self.request(version, offered, workers_of, group_id, **limits)
        self.supervisor.send(SendWeights(version, request.nonce, request.transfer))
        acks: dict[str, ReloadAck] = {}
        async with anyio.create_task_group() as tasks:
            for server, _ in servers:
                tasks.start_soon(ask, server, request, acks)
        return Transferred(request, offered, await self.until_sent(), acks)

    async def until_sent(self) -> WeightsSent:
        link = self.supervisor.links[0]
        return await anyio.to_thread.run_sync(lambda: link.expect(WeightsSent))

    def judge(self, done: Transferred) -> AcksJudged:
        link = self.supervisor.links[0]
        link.send(JudgeAcks(done.request, tuple(done.acks.values())))
        return link.expect(AcksJudged)


async def ask(server, request: ReloadRequest, acks: dict[str, ReloadAck]) -> None:
    """A server that is killed meanwhile has no ACK."""
    async with server.client() as client:
        with suppress(PeerError):
            acks[server.name] = await client.reload(request, timeout_s=120.0)


async def stop_when_ready(server, request: ReloadRequest, *, num_workers: int) -> None:
    """Stop the server's processes (SIGSTOP) when that many workers are about to receive.

    Whoever sends to it then stands still in the middle of the data.
    """
    await anyio.to_thread.run_sync(_until_ready, request, num_workers)
    os.killpg(server.process.pid, signal.SIGSTOP)


def go_on(server) -> None:
    os.killpg(server.process.pid, signal.SIGCONT)


def _until_ready(request: ReloadRequest, num_workers: int) -> None:
    # Torch takes seconds, and not everybody who transfers needs it here.
    from libra.transfer.group import Signals, connect_store  # noqa: PLC0415

    transfer = request.transfer
    assert transfer is not None
    store = connect_store(transfer.store_host, transfer.store_port)
    signals = Signals(store, transfer.group_id)
    while signals.count(f"ready/{request.nonce}") < num_workers:
        signals.check()
        time.sleep(0.001)
