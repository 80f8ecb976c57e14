"""Weights from a Megatron rank on one GPU to vLLM on another, and reloads of the same from disk.

    weight_transfer.py OUT [--shape tiny|0.5b|1.8b] [--versions N] [--device cuda|cpu]

Builds a random Qwen2, trains a step between versions, brings each version to the server by transfer
and then from disk, and compares what the server answers. Then a server is killed in the middle of a
transfer, after which the rank must still train. Prints one JSON object; ends with 1 when something
is off. Not part of CI: it needs CUDA, a vLLM for CUDA and Megatron-Core. With CUDA_VISIBLE_DEVICES
`0,0` both share one GPU, which takes `one_gpu`. `--device cpu` tries its parts without them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "supervisor"), str(ROOT / "tests/support"), str(ROOT)]

import anyio  # noqa: E402 - after the path is set
import anyio.to_thread  # noqa: E402
from main_job import KV_CACHE_BYTES, gpus, make_model  # noqa: E402 - beside this file

from libra.config.model import ModelConfig  # noqa: E402
from libra.config.rollout import RolloutConfig  # noqa: E402
from libra.config.run import RunConfig  # noqa: E402
from libra.config.training import TrainingConfig  # noqa: E402
from libra.config.weights import WeightsConfig  # noqa: E402
from libra.wire.instance import ReloadRequest, Sampling  # noqa: E402
from libra.wire.rank import (  # noqa: E402
    AbortTransfer,
    ExportWeights,
    ModelReady,
    SendWeights,
    Shutdown,
    StepTrained,
    WeightsExported,
)
from real_servers import RealServer, RunFiles  # noqa: E402
from trainer_gang import FakeSupervisor  # noqa: E402
from trainer_ranks import make_samples, run_config, train_step  # noqa: E402
from transfers import PROBE, RUN_ID, Bed, ask, stop_when_ready  # noqa: E402

PROMPT = tuple(range(3, 67))
STANDS_STILL_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=("tiny", "0.5b", "1.8b"), default="0.5b")
    parser.add_argument("--versions", type=int, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    found = anyio.run(measure, options)
    print(json.dumps(found))
    return 0 if found["is_right"] else 1


async def measure(options: argparse.Namespace) -> dict[str, object]:
    began_at = time.monotonic()
    root = options.out / f"transfer-{options.shape}-{time.strftime('%H%M%S')}"
    serves_on, trains_on = gpus()[:2]
    # The rank has its GPU to itself; the server's own is in its placement.
    os.environ["CUDA_VISIBLE_DEVICES"] = trains_on
    files = RunFiles(root, tied=True, base=base_model(options))
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    server = start_server(files, options.device, dtype, serves_on)
    config = run_config(files.base, device=options.device, train_dtype=dtype, micro_batch_size=8)
    try:
        with FakeSupervisor(config, root / "trainer", 1) as supervisor:
            supervisor.accept_all()
            ready = supervisor.links[0].expect(ModelReady, timeout_s=200.0)
            await server.until_ready()
            up_s = time.monotonic() - began_at
            comparison = Comparison(supervisor, server, files)
            versions = [await comparison.measure(version) for version in range(options.versions)]
            lost = await comparison.lose_the_server(options.versions)
            supervisor.send(Shutdown("done"))
            exit_code = supervisor.process.wait(timeout=60)
    except BaseException:
        print(server.last_lines(), file=sys.stderr)
        raise
    finally:
        server.kill()
    is_right = exit_code == 0 and lost["is_right"] and all(v["is_right"] for v in versions)
    return {
        "is_right": is_right,
        "num_parameters": ready.num_parameters,
        "up_s": round(up_s, 1),
        "versions": versions,
        "lost_server": lost,
        "trainer_exit_code": exit_code,
        "wall_s": round(time.monotonic() - began_at, 1),
    }


def base_model(options: argparse.Namespace) -> Path | None:
    if options.device == "cpu":
        return None  # the tiny one of the tests
    quickstart = options.out / "quickstart"
    subprocess.run([sys.executable, ROOT / "scripts/make_quickstart.py", quickstart], check=True)
    if options.shape == "tiny":
        return quickstart / "model"
    return make_model(options.out / f"model-{options.shape}", quickstart / "model", options.shape)


def start_server(files: RunFiles, device: str, dtype: str, gpu: str) -> RealServer:
    if device == "cpu":
        return RealServer(files, "vllm-0", core=0)
    config = RunConfig(
        model=ModelConfig(model_path=str(files.base)),
        rollout=RolloutConfig(
            max_model_len=2048,
            rollout_enforce_eager=True,
            rollout_kv_cache_bytes=KV_CACHE_BYTES,
            gpu_memory_utilization=0.4,
        ),
        training=TrainingConfig(train_dtype=dtype),
        weights=WeightsConfig(rollout_weight_sync_mode="nccl"),
    )
    return RealServer.on_cuda(files, "vllm-0", config, (gpu,))


class Comparison:
    def __init__(self, supervisor, server, files) -> None:
        self.supervisor, self.server, self.files = supervisor, server, files
        self.bed = Bed(supervisor, bucket_bytes=1 << 27)

    async def measure(self, version: int) -> dict[str, object]:
        """One version both ways."""
        if version:
            self.train(version)
        began_at = time.monotonic()
        done = await self.bed.transfer(version, [(self.server, 1)])
        transfer_s = time.monotonic() - began_at
        ack = done.acks["vllm-0"]
        verdict = self.bed.judge(done)
        by_transfer = await self.answers()
        began_at = time.monotonic()
        exported, from_disk = await self.reload_from_disk(version)
        disk_s = time.monotonic() - began_at
        after_disk = await self.answers()
        return {
            "is_right": verdict.accepted == ("vllm-0",) and by_transfer == after_disk,
            "why": ack.error or done.sent.error or str(verdict.refused or ""),
            "answers_are_equal": by_transfer == after_disk,
            "probe_difference": verdict.probe_difference,
            "num_bytes": done.sent.num_bytes,
            "transfer": {
                "offer_s": round(done.offered.offer_s, 4),
                "send_s": round(done.sent.send_s, 4),
                "load_s": round(ack.model_load_s, 4),
                "reload_s": round(ack.total_s, 4),
                "whole_s": round(transfer_s, 4),
            },
            "disk": {
                "export_s": round(exported.export_s, 4),
                "load_s": round(from_disk.model_load_s, 4),
                "reload_s": round(from_disk.total_s, 4),
                "whole_s": round(disk_s, 4),
            },
        }

    def train(self, step: int) -> None:
        samples = make_samples(step, 16, 100)
        self.supervisor.send(train_step(step, [samples], dp_rank=0, dp_size=1))
        self.supervisor.links[0].expect(StepTrained, timeout_s=200.0)

    async def answers(self) -> tuple[object, ...]:
        """Greedy tokens with their logprobs, and the prompt's."""
        async with self.server.client() as client:
            sampling = Sampling(max_new_tokens=64, temperature=0.0)
            answer = await client.complete(PROMPT, sampling, request_id="greedy")
            scored = await client.prompt_logprobs(PROMPT, request_id="scored")
        return (answer.token_ids, answer.logprobs, scored)

    async def reload_from_disk(self, version: int):
        directory = self.files.weights / f"v{version:06d}"
        self.supervisor.send(ExportWeights(RUN_ID, version, str(directory), PROBE))
        exported = self.supervisor.links[0].expect(WeightsExported, timeout_s=120.0)
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
        async with self.server.client() as client:
            ack = await client.reload(request, timeout_s=120.0)
        if ack.error:
            raise RuntimeError(ack.error)
        return exported, ack

    async def lose_the_server(self, version: int) -> dict[str, object]:
        """Have it stand still in the middle of a transfer, then kill it; the rank must train on."""
        offered = self.bed.offer(version)
        request = self.bed.request(version, offered, {"vllm-0": 1}, "group-lost")
        self.supervisor.send(SendWeights(version, request.nonce, request.transfer))
        acks: dict[str, object] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, self.server, request, acks)
            await stop_when_ready(self.server, request, num_workers=1)
            await anyio.sleep(STANDS_STILL_S)
            self.server.kill()
        killed_at = time.monotonic()
        # As the control plane does when a process ends.
        self.supervisor.links[0].send(AbortTransfer("group-lost", "vllm-0: its process was lost"))
        sent = await self.bed.until_sent()
        freed_s = time.monotonic() - killed_at
        self.train(version)
        return {
            "is_right": bool(sent.error) and not acks,
            "error": sent.error,
            "freed_s": round(freed_s, 3),
            "send_s": round(sent.send_s, 3),
        }


if __name__ == "__main__":
    sys.exit(main())
