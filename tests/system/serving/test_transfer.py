"""Weights from Megatron ranks with TP 2 to real vLLM servers, through one group."""

import anyio
import pytest

from libra.wire.instance import ReloadRequest, Sampling
from libra.wire.rank import (
    AbortTransfer,
    ExportWeights,
    ModelReady,
    SendWeights,
    Shutdown,
    StepTrained,
    WeightsExported,
)
from real_servers import RUN_ID, RealServer, RunFiles
from trainer_gang import FakeSupervisor
from trainer_ranks import make_samples, run_config, train_step
from transfers import PROBE, Bed, ask, go_on, stop_when_ready

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(600)]

PROMPT = [(7 * k) % 400 + 10 for k in range(60)]


@pytest.fixture
def trainer(files, tmp_path):
    """Two ranks that hold a slice each of what `files` has as the base model."""
    config = run_config(files.base, train_tp_size=2, micro_batch_size=8)
    with FakeSupervisor(config, tmp_path / "trainer", 2) as supervisor:
        supervisor.accept_all()
        for link in supervisor.links.values():
            link.expect(ModelReady)
        yield supervisor


def train(supervisor, step: int) -> None:
    samples = make_samples(step, 16, 500)
    supervisor.send(train_step(step, [samples], dp_rank=0, dp_size=1))
    for link in supervisor.links.values():
        link.expect(StepTrained)


async def answers(server):
    """Greedy tokens with their logprobs, and the prompt's."""
    async with server.client() as client:
        sampling = Sampling(max_new_tokens=24, temperature=0.0)
        done = await client.complete(PROMPT, sampling, request_id=f"greedy-{server.name}")
        scored = await client.prompt_logprobs(PROMPT, request_id=f"scored-{server.name}")
    return done.token_ids, done.logprobs, scored


async def reload_from_disk(supervisor, files, server, version: int) -> None:
    directory = files.weights / f"transferred-{version}"
    supervisor.send(ExportWeights(RUN_ID, version, str(directory), PROBE))
    exported = supervisor.links[0].expect(WeightsExported)
    request = ReloadRequest(
        run_id=RUN_ID,
        policy_version=version,
        nonce=f"disk-{version}",
        weights_directory=str(directory),
        manifest_hash=exported.manifest_hash,
        pause_mode="keep",
        probe_token_ids=PROBE,
        force=True,
    )
    async with server.client() as client:
        ack = await client.reload(request, timeout_s=120.0)
    assert ack.error is None


@pytest.mark.case("T-B71")
async def test_servers_answer_with_what_the_ranks_hold(trainer, files, servers):
    bed, pairs = Bed(trainer), [(server, 1) for server in servers]
    seen = []
    # A trained version, so that it is nobody's base model; the second goes through the same group.
    for version in (11, 12):
        train(trainer, version - 10)
        done = await bed.transfer(version, pairs)
        assert done.sent.error == ""
        assert {ack.error for ack in done.acks.values()} == {None}
        assert {ack.checksum for ack in done.acks.values()} == {done.sent.checksum}
        verdict = bed.judge(done)
        assert set(verdict.accepted) == {server.name for server in servers}
        assert verdict.probe_difference < 1e-4
        by_transfer = [await answers(server) for server in servers]
        assert by_transfer[0] == by_transfer[1]
        seen.append(by_transfer[0])
    await reload_from_disk(trainer, files, servers[0], 12)
    assert await answers(servers[0]) == seen[1]
    assert seen[0] != seen[1]


async def test_a_transfer_that_is_broken_off_leaves_servers_that_can_receive_again(
    trainer, servers
):
    """One stands still in the middle of it, until the control plane gives it up."""
    bed, pairs = Bed(trainer), [(server, 1) for server in servers]
    train(trainer, 1)
    offered = bed.offer(21)
    workers_of = {server.name: 1 for server in servers}
    request = bed.request(21, offered, workers_of, "broken", bucket_bytes=1 << 12)
    acks = {}
    async with anyio.create_task_group() as tasks:
        for server in servers:
            tasks.start_soon(ask, server, request, acks)
        trainer.send(SendWeights(21, request.nonce, request.transfer))
        await stop_when_ready(servers[1], request, num_workers=2)
        trainer.links[0].send(AbortTransfer("broken", "vllm-b: no ACK within 600 s"))
        sent = await bed.until_sent()
        go_on(servers[1])
    assert sent.error == "vllm-b: no ACK within 600 s"
    assert {ack.was_aborted for ack in acks.values()} == {True}
    assert {ack.policy_version for ack in acks.values()} == {None}
    done = await bed.transfer(22, pairs, group_id="next")
    assert set(bed.judge(done).accepted) == set(workers_of)
    first, second = [await answers(server) for server in servers]
    assert first == second
    train(trainer, 2)
    trainer.send(Shutdown("done"))
    assert await anyio.to_thread.run_sync(trainer.process.wait) == 0


@pytest.mark.long
async def test_a_server_that_is_killed_meanwhile_costs_the_other_nothing(tmp_path):
    """TP 1 and TP 2 beside each other; the ranks go on, the survivor gets the version."""
    files = RunFiles(tmp_path)
    small = RealServer(files, "vllm-small", core=0)
    large = RealServer(files, "vllm-large", core=0, tp=2)
    config = run_config(files.base, train_tp_size=2, micro_batch_size=8)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(small.until_ready)
            tasks.start_soon(large.until_ready)
        with FakeSupervisor(config, tmp_path / "trainer", 2) as trainer:
            trainer.accept_all()
            for link in trainer.links.values():
                link.expect(ModelReady)
            await receive_and_lose(trainer, files, small, large)
    finally:
        small.kill()
        large.kill()


async def receive_and_lose(trainer, files, small, large) -> None:
    bed = Bed(trainer)
    train(trainer, 1)
    done = await bed.transfer(1, [(small, 1), (large, 2)])
    assert done.request.transfer.rank_offset_of == {"vllm-small": 1, "vllm-large": 2}
    assert set(bed.judge(done).accepted) == {"vllm-small", "vllm-large"}
    first, second = await answers(small), await answers(large)
    assert first[0] == second[0]
    assert first[2] == pytest.approx(second[2], abs=1e-4)
    train(trainer, 2)
    offered = bed.offer(2)
    request = bed.request(
        2, offered, {"vllm-small": 1, "vllm-large": 2}, "lost", bucket_bytes=1 << 12
    )
    acks = {}
    async with anyio.create_task_group() as tasks:
        for server in (small, large):
            tasks.start_soon(ask, server, request, acks)
        trainer.send(SendWeights(2, request.nonce, request.transfer))
        await stop_when_ready(large, request, num_workers=3)
        large.kill()
        # Whether the control plane or the connection is heard first, all are freed.
        trainer.links[0].send(AbortTransfer("lost", "vllm-large: its process was lost"))
    sent = await bed.until_sent()
    assert sent.error
    assert list(acks) == ["vllm-small"]
    assert acks["vllm-small"].was_aborted
    done = await bed.transfer(2, [(small, 1)], group_id="survivor")
    assert bed.judge(done).accepted == ("vllm-small",)
    by_transfer = await answers(small)
    await reload_from_disk(trainer, files, small, 2)
    assert await answers(small) == by_transfer
    train(trainer, 3)
    trainer.send(Shutdown("done"))
    assert await anyio.to_thread.run_sync(trainer.process.wait) == 0
