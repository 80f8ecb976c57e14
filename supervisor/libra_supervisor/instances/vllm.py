"""RunConfig and a placement -> what to start for one vLLM server. Pure."""

import hashlib
import zlib
from collections.abc import Mapping
from typing import Literal

import msgspec

from libra.config.run import RunConfig
from libra.ids import ChildId, Incarnation, InstanceId, RunId
from libra.version import __version__
from libra.wire.instance import (
    INCARNATION_VARIABLE,
    INSTANCE_ID_VARIABLE,
    RUN_ID_VARIABLE,
    TOKEN_FILE_VARIABLE,
    WEIGHTS_DIRECTORY_VARIABLE,
)
from libra_supervisor.instances.client import MODEL_NAME
from libra_supervisor.process.spec import ProcessSpec

TRANSFER_CONFIG = '{"backend": "libra"}'
"""The engine that `libra.serving.plugin` registers."""

CPU_KV_CACHE_BYTES = 64 * 2**20
CPU_BATCHED_TOKENS = 4096
"""Tokens in one step of a CPU engine, which takes prompts whole; more where they may be longer."""

# Would override arguments given here, or lock us out of our own server.
DROPPED_VARIABLES = frozenset({"VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY"})

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class InstancePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one server runs: one worker on each of `devices`, which are as many as its TP degree.

    A device is on CPU a core number or a set of them as in `0-3`, on CUDA an index or UUID as
    CUDA_VISIBLE_DEVICES takes it.
    """

    instance_id: InstanceId
    incarnation: Incarnation
    device_kind: Literal["cpu", "cuda"]
    devices: tuple[str, ...]
    host: str
    port: int

    @property
    def tp(self) -> int:
        return len(self.devices)

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class ServingPaths(msgspec.Struct, frozen=True, kw_only=True):
    """Absolute paths of the run that a server is told."""

    python: str
    weights_directory: str
    token_file: str
    working_directory: str
    log_path: str


def server_spec(
    config: RunConfig,
    placement: InstancePlacement,
    *,
    run_id: RunId,
    paths: ServingPaths,
    environment: Mapping[str, str],
    served_directory: str | None = None,
) -> ProcessSpec:
    """Say how to start the server. `environment` is the supervisor's own.

    `served_directory` is a published version to start with; None starts with the base model,
    from which a reload leads to the committed version.
    """
    return ProcessSpec(
        child_id=ChildId(placement.instance_id),
        run_id=run_id,
        argv=(
            paths.python,
            "-m",
            "libra.serving.launch",
            "--",
            served_directory or config.model.model_path,
            *_arguments(config, placement),
            *config.rollout.rollout_extra_args,
        ),
        env={
            **{k: v for k, v in environment.items() if k not in DROPPED_VARIABLES},
            **OFFLINE,
            **_device_variables(placement, environment),
            INSTANCE_ID_VARIABLE: placement.instance_id,
            INCARNATION_VARIABLE: placement.incarnation,
            RUN_ID_VARIABLE: run_id,
            WEIGHTS_DIRECTORY_VARIABLE: paths.weights_directory,
            TOKEN_FILE_VARIABLE: paths.token_file,
        },
        cwd=paths.working_directory,
        log_path=paths.log_path,
    )


def start_digest(
    config: RunConfig,
    placement: InstancePlacement,
    *,
    paths: ServingPaths,
    environment: Mapping[str, str],
) -> str:
    """Names what the server is started with, whichever process, port and weights it is.

    A process of another digest cannot be adopted: it would serve another configuration.
    """
    settled = msgspec.structs.replace(placement, incarnation=Incarnation(""), port=0)
    ours = {name: value for name, value in environment.items() if name.startswith("VLLM_")}
    spec = server_spec(config, settled, run_id=RunId(""), paths=paths, environment=ours)
    parts = (__version__, spec.argv, sorted(spec.env.items()), spec.cwd, spec.log_path)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def rollout_dtype(config: RunConfig) -> str:
    """The dtype of the engines' weights, `auto` resolved."""
    given = config.rollout.rollout_dtype
    return config.training.train_dtype if given == "auto" else given


def _arguments(config: RunConfig, placement: InstancePlacement) -> tuple[str, ...]:
    rollout = config.rollout
    values = {
        "--host": placement.host,
        "--port": placement.port,
        "--served-model-name": MODEL_NAME,
        "--tokenizer": config.model.resolved_tokenizer_path,
        "--dtype": rollout_dtype(config),
        "--tensor-parallel-size": placement.tp,
        "--max-model-len": rollout.max_model_len,
        "--max-num-seqs": rollout.rollout_max_num_seqs,
        # Servers with one seed would answer requests without a seed alike.
        "--seed": (config.control.seed + zlib.crc32(placement.instance_id.encode())) % 2**31,
        # What the policy gradient needs: the distribution that was sampled from.
        "--logprobs-mode": "processed_logprobs",
        # The model's generation_config.json must not change the sampling that the run asks for.
        "--generation-config": "vllm",
        **_memory_values(config, placement),
    }
    if config.weights.rollout_weight_sync_mode == "nccl":
        values["--weight-transfer-config"] = TRANSFER_CONFIG
    if placement.device_kind == "cpu" and placement.tp == 1:
        # Without a worker process of its own a server starts faster and takes 0.3 GB less.
        values["--distributed-executor-backend"] = "uni"
    flags = ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if placement.device_kind == "cpu":
        # Part of a prompt with a seed ends a CPU engine: "CPU Generator does not use offset".
        flags.append("--no-enable-chunked-prefill")
        values["--max-num-batched-tokens"] = max(rollout.max_model_len, CPU_BATCHED_TOKENS)
    keeps_lent = config.global_resource_planner.runtime_lent_servers == "sleep"
    if keeps_lent and placement.device_kind == "cuda":
        # On CPU vLLM refuses the flag; the calls pause the engine there, without it.
        flags.append("--enable-sleep-mode")
    if _is_eager(config, placement):
        flags.append("--enforce-eager")
    pairs = (str(part) for pair in values.items() for part in pair)
    return (*pairs, *flags)


def _memory_values(config: RunConfig, placement: InstancePlacement) -> dict[str, object]:
    num_bytes = config.rollout.rollout_kv_cache_bytes
    if placement.device_kind == "cpu":
        return {"--kv-cache-memory-bytes": num_bytes or CPU_KV_CACHE_BYTES}
    share = {"--gpu-memory-utilization": config.rollout.gpu_memory_utilization}
    return {**share, "--kv-cache-memory-bytes": num_bytes} if num_bytes else {**share}


def _is_eager(config: RunConfig, placement: InstancePlacement) -> bool:
    given = config.rollout.rollout_enforce_eager
    return placement.device_kind == "cpu" if given is None else given


def _device_variables(
    placement: InstancePlacement, environment: Mapping[str, str]
) -> dict[str, str]:
    if placement.device_kind == "cpu":
        return {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(placement.devices),
            # The sampler's compiled helpers cost 17 s at the first request and gain nothing here.
            "TORCHDYNAMO_DISABLE": environment.get("TORCHDYNAMO_DISABLE", "1"),
        }
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(placement.devices),
        # vLLM's default sampler on CUDA needs flashinfer, which is not among its requirements.
        "VLLM_USE_FLASHINFER_SAMPLER": environment.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
    }
