"""Tokens per second of one vLLM server: as a user would drive it, and as Libra starts and asks it.

    engine_rate.py OUT [--shape tiny|0.5b|1.8b] [--users 64 256] [--requests 1024] [--device cpu]

Makes a model with random weights under OUT. The same requests (256 tokens in, 256 to 512 out, with
logprobs and token ids) from as many users as named, each asking again when answered. Prints one
JSON object per server, way of asking and number of users, with the CPU time of each process.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import anyio
import numpy as np
import psutil

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "supervisor"), str(ROOT / "tests/support")]

from main_job import make_model  # noqa: E402

from libra.config.model import ModelConfig  # noqa: E402
from libra.config.rollout import RolloutConfig  # noqa: E402
from libra.config.run import RunConfig  # noqa: E402
from libra.config.training import TrainingConfig  # noqa: E402
from libra.wire.instance import Sampling  # noqa: E402
from libra_supervisor.instances import client as client_module  # noqa: E402
from libra_supervisor.instances.client import InstanceClient  # noqa: E402
from libra_supervisor.instances.vllm import (  # noqa: E402
    InstancePlacement,
    ServingPaths,
    server_spec,
)
from libra_supervisor.process.spec import environment_of  # noqa: E402
from real_servers import free_port  # noqa: E402

PROMPT_TOKENS = 256
READY_S = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--devices", nargs="+", default=["0"], help="more than one: TP over them")
    parser.add_argument("--users", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--answer", type=int, nargs=2, default=(256, 512))
    options = parser.parse_args()
    quickstart = options.out / "quickstart"
    subprocess.run([sys.executable, ROOT / "scripts/make_quickstart.py", quickstart], check=True)
    model = quickstart / "model"
    if options.shape != "tiny":
        model = make_model(options.out / f"model-{options.shape}", model, options.shape)
    anyio.run(measure, options, model)


async def measure(options: argparse.Namespace, model: Path) -> None:
    for kind in ("plain", "guarded"):
        server = Server(options, model, kind)
        try:
            await server.until_ready()
            ways = ("direct",) if kind == "plain" else ("direct", "client")
            for way in ways:
                for users in options.users:
                    await ask(server, way, users, 2 * users, options)
                    result = await ask(server, way, users, options.requests, options)
                    print(json.dumps({"server": kind, "asked": way, "users": users, **result}))
                    sys.stdout.flush()
        finally:
            server.stop()


class Server:
    """`plain` is vLLM's own command with the arguments that Libra gives."""

    def __init__(self, options: argparse.Namespace, model: Path, kind: str) -> None:
        out = options.out
        (out / "weights").mkdir(exist_ok=True)
        (out / "token").write_text("token")
        dtype = "bfloat16" if options.device == "cuda" else "float32"
        config = RunConfig(
            model=ModelConfig(model_path=str(model)),
            rollout=RolloutConfig(
                max_model_len=PROMPT_TOKENS + options.answer[1],
                rollout_max_num_seqs=max(options.users),
            ),
            training=TrainingConfig(train_dtype=dtype),
        )
        placement = InstancePlacement(
            instance_id="vllm-0",
            incarnation="vllm-0-first",
            device_kind=options.device,
            devices=tuple(options.devices),
            host="127.0.0.1",
            port=free_port(),
        )
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        spec = server_spec(
            config,
            placement,
            run_id="run-1",
            paths=ServingPaths(
                python=sys.executable,
                weights_directory=str(out / "weights"),
                token_file=str(out / "token"),
                working_directory=str(out),
                log_path=str(out / f"{kind}.log"),
            ),
            environment=dict(os.environ) | {"PYTHONPATH": path},
            served_directory=None,
        )
        argv = list(spec.argv)
        if kind == "plain":
            arguments = argv[argv.index("--") + 1 :]
            argv = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
        self.url = placement.base_url
        self.log = out / f"{kind}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                argv,
                env=environment_of(spec),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def until_ready(self) -> None:
        with anyio.fail_after(READY_S):
            async with aiohttp.ClientSession() as session:
                while True:
                    if self.process.poll() is not None:
                        raise SystemExit(self.log.read_text(errors="replace")[-3000:])
                    try:
                        async with session.get(f"{self.url}/health") as answer:
                            if answer.status == 200:
                                return
                    except aiohttp.ClientError:
                        await anyio.sleep(0.5)

    def cpu_s(self) -> dict[str, float]:
        root = psutil.Process(self.process.pid)
        found = {}
        for process in [root, *root.children(recursive=True)]:
            times = process.cpu_times()
            name = "api" if process == root else " ".join(process.cmdline())[:24]
            found[f"{name} {process.pid}"] = times.user + times.system
        return found

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


async def ask(
    server: Server, way: str, users: int, num_requests: int, options: argparse.Namespace
) -> dict[str, object]:
    rng = np.random.default_rng(0)
    vocabulary = 100 if options.shape == "tiny" else 50_000
    pending = [
        (rng.integers(5, vocabulary, PROMPT_TOKENS).tolist(), int(rng.integers(*options.answer)))
        for _ in range(num_requests)
    ]
    num_tokens = 0
    before, began_at = server.cpu_s(), time.perf_counter()
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=None) as session,
        InstanceClient("vllm-0", server.url, token="token") as client,
        anyio.create_task_group() as tasks,
    ):

        async def user() -> None:
            nonlocal num_tokens
            while pending:
                number = len(pending)
                prompt, length = pending.pop()
                sampling = Sampling(max_new_tokens=length, seed=number)
                if way == "client":
                    answer = await client.complete(prompt, sampling, request_id=f"r{number}")
                    found = len(answer.token_ids)
                else:
                    found = await direct(session, server.url, prompt, sampling)
                num_tokens += found

        for _ in range(users):
            tasks.start_soon(user)
    wall_s = time.perf_counter() - began_at
    used = {name: round(after - before.get(name, 0.0), 1) for name, after in server.cpu_s().items()}
    return {
        "out_tokens_per_s": round(num_tokens / wall_s),
        "wall_s": round(wall_s, 2),
        "cpu_s": {name: value for name, value in used.items() if value > 0.5},
    }


async def direct(
    session: aiohttp.ClientSession, url: str, prompt: list[int], sampling: Sampling
) -> int:
    """The same request without what Libra adds."""
    body = json.loads(client_module._completion_body(prompt, sampling))
    # Nor a seed, with which vLLM fails on a CPU.
    for name in ("vllm_xargs", "return_tokens_as_token_ids", "seed"):
        body.pop(name)
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {answer}")
        return len(answer["choices"][0]["token_ids"])


if __name__ == "__main__":
    main()
