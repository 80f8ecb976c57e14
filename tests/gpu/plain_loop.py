"""The peer of main_job.py: vLLM, then a transformers and torch trainer, one after the other.

    plain_loop.py OUT --shape 0.5b [--steps 8] [--tokens 256] [--trajectories 256]

What one would write without a framework: vLLM's own server on one GPU answers a batch, the
trainer on the other (the same where CUDA_VISIBLE_DEVICES is `0,0`) takes one GRPO step (bfloat16
autocast over float32 weights, fused AdamW, padded micro-batches), saves bfloat16 weights, and the
server loads them from disk. Prints one JSON object with medians. `--device cpu --shape tiny` runs
the same on two CPU cores.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from main_job import KV_CACHE_BYTES, gpus, make_model  # noqa: E402

from libra.rewards.case import RewardCase  # noqa: E402
from libra.rewards.character_class import character_class  # noqa: E402
from real_servers import free_port  # noqa: E402

GROUP = 8
WARM_UP_STEPS = 2
READY_S = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=lambda text: Path(text).resolve())
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    quickstart = options.out / "quickstart"
    subprocess.run([sys.executable, ROOT / "scripts/make_quickstart.py", quickstart], check=True)
    model = quickstart / "model"
    trains_on, serves_on = gpus()[:2]
    os.environ["CUDA_VISIBLE_DEVICES"] = trains_on
    options.shared = trains_on == serves_on
    if options.shape != "tiny":
        model = make_model(options.out / f"model-{options.shape}", model, options.shape)
    port = free_port()
    with (options.out / "plain_loop.log").open("wb") as log:
        server = subprocess.Popen(
            serve_command(model, port, options),
            env=serve_environment(options, serves_on),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        trainer = Trainer(model, options)
        rows = [json.loads(r) for r in (quickstart / "train.jsonl").read_text().splitlines()]
        print(json.dumps(asyncio.run(loop(trainer, rows, f"http://127.0.0.1:{port}", options))))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def serve_command(model: Path, port: int, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--port", str(port), "--max-model-len", str(options.tokens + 128)]
    command += ["--max-num-seqs", str(options.trajectories), "--served-model-name", "policy"]
    command += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
    if options.device == "cpu":
        return [*command, "--kv-cache-memory-bytes", "64M", "--enforce-eager"]
    if options.shared:
        command += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        command += ["--gpu-memory-utilization", "0.4"]
    return [*command, "--dtype", "bfloat16"]


def serve_environment(options: argparse.Namespace, device: str) -> dict[str, str]:
    more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if options.device == "cuda":
        more["CUDA_VISIBLE_DEVICES"] = device
    else:
        more |= {"TORCHDYNAMO_DISABLE": "1"}
    return dict(os.environ) | more


class Trainer:
    def __init__(self, model: Path, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.options, self.torch = options, torch
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model.to(options.device).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-6, fused=options.device == "cuda"
        )

    def prompt_ids(self, row: dict) -> list[int]:
        return self.tokenizer.encode(row["prompt"])

    def reward(self, token_ids: list[int], row: dict) -> float:
        return character_class(
            RewardCase(
                prompt_id="",
                prompt_text=row["prompt"],
                response_text=self.tokenizer.decode(token_ids, skip_special_tokens=True),
                answer=row["answer"],
                extras={},
                finish_reason="length",
                num_response_tokens=len(token_ids),
                num_turns=1,
            )
        )

    def train(self, samples: list[tuple[list[int], list[int], list[float], float]]) -> float:
        """Of (prompt, answer, the engine's logprobs, advantage); returns the loss."""
        total = sum(len(answer) for _, answer, _, _ in samples)
        whole = 0.0
        for at in range(0, len(samples), self.options.micro):
            loss = self._loss(samples[at : at + self.options.micro]) / total
            loss.backward()
            whole += float(loss.detach())
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return whole

    def _loss(self, samples):
        torch, device = self.torch, self.options.device
        width = max(len(prompt) + len(answer) for prompt, answer, _, _ in samples)
        ids = torch.zeros(len(samples), width, dtype=torch.long)
        old = torch.zeros(len(samples), width - 1)
        mask = torch.zeros(len(samples), width - 1)
        real = torch.zeros(len(samples), width, dtype=torch.long)
        for row, (prompt, answer, logprobs, _) in enumerate(samples):
            first, end = len(prompt), len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            real[row, :end] = 1
            old[row, first - 1 : end - 1] = torch.tensor(logprobs)
            mask[row, first - 1 : end - 1] = 1
        ids, old, mask, real = (part.to(device) for part in (ids, old, mask, real))
        advantage = torch.tensor([sample[3] for sample in samples], device=device)[:, None]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = self.model(ids, attention_mask=real, use_cache=False).logits[:, :-1]
        rows = [
            -torch.nn.functional.cross_entropy(part.float(), targets, reduction="none")
            for part, targets in zip(logits, ids[:, 1:], strict=True)
        ]
        ratio = (torch.stack(rows) - old).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -(gain * mask).sum()

    def save(self, directory: Path) -> None:
        self.model.save_pretrained(
            directory,
            state_dict={
                name: tensor.to(self.torch.bfloat16)
                for name, tensor in self.model.state_dict().items()
            },
        )


async def loop(trainer: Trainer, rows: list[dict], url: str, options: argparse.Namespace) -> dict:
    parts: dict[str, list[float]] = {}
    draw = random.Random(0)
    async with aiohttp.ClientSession(
        url,
        timeout=aiohttp.ClientTimeout(None),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    ) as session:
        await until_ready(session)
        rewards = []
        for step in range(1, options.steps + 1):
            began_at = time.perf_counter()
            prompts = draw.choices(rows, k=options.trajectories // GROUP)
            groups = await asyncio.gather(
                *(
                    ask(session, trainer, row, options, 1000 * step + k)
                    for k, row in enumerate(prompts)
                )
            )
            samples = [sample for group, _ in groups for sample in group]
            rewards.append(statistics.mean(r for _, given in groups for r in given))
            rolled_out_at = time.perf_counter()
            trainer.train(samples)
            if options.device == "cuda":
                trainer.torch.cuda.synchronize()
            trained_at = time.perf_counter()
            directory = options.out / f"plain-weights-{step % 2}"
            trainer.save(directory)
            saved_at = time.perf_counter()
            await load(session, directory)
            ended_at = time.perf_counter()
            for name, value in {
                "rollout_s": rolled_out_at - began_at,
                "train_s": trained_at - rolled_out_at,
                "save_s": saved_at - trained_at,
                "load_s": ended_at - saved_at,
                "step_s": ended_at - began_at,
                "response_tokens": sum(len(s[1]) for s in samples),
            }.items():
                parts.setdefault(name, []).append(value)
            print({name: round(values[-1], 3) for name, values in parts.items()}, file=sys.stderr)

    def late(name: str) -> float:
        return statistics.median(parts[name][WARM_UP_STEPS:])

    return {
        "peer": "plain loop",
        "shape": options.shape,
        "steps": options.steps,
        "reward_first_last": [rewards[0], rewards[-1]],
        "median": {name: round(late(name), 3) for name in parts},
        "samples_per_s": round(options.trajectories / late("step_s"), 2),
        "response_tokens_per_s": round(late("response_tokens") / late("step_s")),
        "rollout_tokens_per_s": round(late("response_tokens") / late("rollout_s")),
    }


async def ask(session, trainer: Trainer, row: dict, options, seed: int):
    """One group as (samples with their advantages, rewards)."""
    prompt = trainer.prompt_ids(row)
    body = {"model": "policy", "prompt": prompt, "n": GROUP, "max_tokens": options.tokens}
    body |= {"temperature": 1.0, "seed": seed, "logprobs": 0, "return_token_ids": True}
    async with session.post("/v1/completions", json=body) as response:
        choices = (await response.json())["choices"]
    rewards = [trainer.reward(choice["token_ids"], row) for choice in choices]
    mean, scatter = statistics.mean(rewards), statistics.pstdev(rewards)
    return [
        (
            prompt,
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            (reward - mean) / (scatter + 1e-6),
        )
        for choice, reward in zip(choices, rewards, strict=True)
    ], rewards


async def load(session, directory: Path) -> None:
    for path, body in (
        ("/pause?mode=wait", None),
        (
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}},
        ),
        ("/reset_prefix_cache", None),
        ("/resume", None),
    ):
        async with session.post(path, json=body) as response:
            if response.status != 200:
                raise SystemExit(f"{path}: {response.status} {await response.text()}")


async def until_ready(session) -> None:
    end_at = time.monotonic() + READY_S
    while True:
        try:
            async with session.get("/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            await asyncio.sleep(0.5)
        if time.monotonic() > end_at:
            raise SystemExit("the server did not start; see plain_loop.log")


if __name__ == "__main__":
    main()
