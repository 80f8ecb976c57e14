"""From a placement to the process that serves it: `libra.serving.launch`, all flags decided."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from libra.config.run import RunConfig
from libra.ids import ChildId, Incarnation, RunId
from libra.planner.plan import InstancePlacement
from libra.wire.instance import (
    INCARNATION_VARIABLE,
    INSTANCE_ID_VARIABLE,
    TOKEN_FILE_VARIABLE,
    WEIGHTS_DIRECTORY_VARIABLE,
)
from libra_supervisor.instances.client import MODEL_NAME
from libra_supervisor.process.spec import Limits, ProcessSpec
from libra_supervisor.run_directory import RunDirectory

CPU_KV_CACHE_BYTES = 64 * 2**20
"""Per worker, where the configuration leaves it to us: vLLM would take whole gibibytes."""

SHUTDOWN_TIMEOUT_S = 5
"""How long vLLM lets requests finish after SIGTERM; routing took the work away before."""


class ServerSite(msgspec.Struct, frozen=True, kw_only=True):
    """What every server of one run on this node has in common."""

    run_id: RunId
    directory: RunDirectory
    config: RunConfig
    device: Literal["cpu", "cuda"]
    host: str
    token_file: Path
    env: Mapping[str, str]
    """The environment the supervisor was started with."""

    cores: tuple[int, ...]
    """CPU cores of this node, for binding workers."""

    devices: tuple[str, ...] = ()
    """CUDA devices by slot."""


def server_spec(
    site: ServerSite,
    placement: InstancePlacement,
    *,
    port: int,
    incarnation: Incarnation,
    model: Path,
) -> ProcessSpec:
    """The process of one incarnation, serving the weights in `model` from the start."""
    child_id = ChildId(placement.instance_id)
    arguments = (
        str(model),
        *("--host", site.host, "--port", str(port), "--served-model-name", MODEL_NAME),
        *_engine_flags(site, placement),
        *site.config.rollout.rollout_extra_args,
    )
    return ProcessSpec(
        child_id=child_id,
        run_id=site.run_id,
        argv=(sys.executable, "-m", "libra.serving.launch", "--", *arguments),
        env=_environment(site, placement, incarnation),
        cwd=str(site.directory.root),
        log_path=str(site.directory.log_of(child_id)),
        limits=Limits(),
    )


def _engine_flags(site: ServerSite, placement: InstancePlacement) -> tuple[str, ...]:
    config, rollout = site.config, site.config.rollout
    dtype = (
        config.training.train_dtype if rollout.rollout_dtype == "auto" else rollout.rollout_dtype
    )
    is_cpu = site.device == "cpu"
    is_eager = is_cpu if rollout.rollout_enforce_eager is None else rollout.rollout_enforce_eager
    kv_bytes = rollout.rollout_kv_cache_bytes or (CPU_KV_CACHE_BYTES if is_cpu else 0)
    return (
        *("--tokenizer", config.model.resolved_tokenizer_path),
        *("--dtype", dtype, "--tensor-parallel-size", str(placement.tp)),
        *("--max-model-len", str(rollout.max_model_len)),
        *("--max-num-seqs", str(rollout.rollout_max_num_seqs)),
        *("--seed", str(config.control.seed)),
        # The logprobs of the distribution that was sampled from, temperature and top-p applied.
        *("--logprobs-mode", "processed_logprobs"),
        # The model's own sampling defaults must not change what the configuration says.
        *("--generation-config", "vllm"),
        *("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)),
        "--enable-prompt-tokens-details",
        *(("--enforce-eager",) if is_eager else ()),
        *(("--kv-cache-memory-bytes", str(kv_bytes)) if kv_bytes else ()),
        *(() if is_cpu else ("--gpu-memory-utilization", str(rollout.gpu_memory_utilization))),
    )


def _environment(
    site: ServerSite, placement: InstancePlacement, incarnation: Incarnation
) -> dict[str, str]:
    env = dict(site.env) | {
        INSTANCE_ID_VARIABLE: placement.instance_id,
        INCARNATION_VARIABLE: incarnation,
        WEIGHTS_DIRECTORY_VARIABLE: str(site.directory.weights),
        TOKEN_FILE_VARIABLE: str(site.token_file),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if site.device == "cpu":
        env |= {
            # Left alone, the worker of every instance pins itself to core 0.
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(_cores_of(site, placement)),
            "CUDA_VISIBLE_DEVICES": "",
        }
        # It counts whole gibibytes and would override --kv-cache-memory-bytes.
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    elif site.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(site.devices[slot] for slot in placement.slots)
    return env


def _cores_of(site: ServerSite, placement: InstancePlacement) -> tuple[str, ...]:
    """One core per worker, round robin over the node's cores."""
    return tuple(str(site.cores[slot % len(site.cores)]) for slot in placement.slots)
