"""All checks of one run on this machine."""

from pathlib import Path
from typing import Literal

from libra.config.run import RunConfig
from libra.planner.plan import Plan
from libra_supervisor.doctor import probes
from libra_supervisor.doctor.findings import (
    Finding,
    HostDemand,
    disk_finding,
    host_memory_bytes,
    memory_finding,
)
from libra_supervisor.doctor.held import NOTHING, Held

LOOPBACK = "127.0.0.1"
BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
CHECKPOINT_BYTES_PER_PARAMETER = 16
CPU_KV_CACHE_BYTES = 64 * 2**20


def check_site(
    config: RunConfig,
    plan: Plan,
    device: Literal["cpu", "cuda"],
    directory: Path,
    *,
    held: Held = NOTHING,
) -> list[Finding]:
    """Packages, the reward, memory, disk and ports, every one of them, whether it is fine or not.

    Of a run over several nodes: what the first of them has to have, since that is where we are.
    `held` is what the run itself has from an earlier supervisor, and counts as available.
    """
    num_parameters = stored_parameters(Path(config.model.model_path))
    findings = [*probes.package_findings(), probes.reward_finding(config.data.reward)]
    if device == "cpu":
        needed = host_memory_bytes(_host_demand(config, plan, num_parameters))
        available = probes.available_memory_bytes() + held.num_bytes
        findings.append(memory_finding(needed_bytes=needed, available_bytes=available))
    findings.append(
        disk_finding(
            directory=str(directory),
            needed_bytes=_disk_bytes(config, num_parameters),
            free_bytes=probes.free_disk_bytes(directory),
        )
    )
    findings += _port_findings(config, plan, held.ports)
    return findings


def stored_parameters(model: Path) -> int:
    """Parameters of a model directory, from the size of its weight files.

    Two bytes each are assumed: an upper bound for float32 files, right for 16-bit ones.
    """
    num_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return num_bytes // 2


def _host_demand(config: RunConfig, plan: Plan, num_parameters: int) -> HostDemand:
    dtype = config.rollout.rollout_dtype
    resolved = config.training.train_dtype if dtype == "auto" else dtype
    return HostDemand(
        num_parameters=num_parameters,
        num_ranks=sum(not plan.train.node_of_rank(rank) for rank in range(plan.train.world_size)),
        model_parallel_size=plan.train.tp * plan.train.pp,
        num_instances=sum(1 for it in plan.instances if it.slots and not it.node),
        num_workers=sum(len(it.slots) for it in plan.instances if not it.node),
        engine_bytes_per_parameter=BYTES_OF_DTYPE[resolved],
        kv_cache_bytes_per_worker=config.rollout.rollout_kv_cache_bytes or CPU_KV_CACHE_BYTES,
    )


def _disk_bytes(config: RunConfig, num_parameters: int) -> int:
    """keep_last checkpoints and published versions, and one more of each while it is written."""
    per_version = 4 + CHECKPOINT_BYTES_PER_PARAMETER
    return (config.control.keep_last + 1) * num_parameters * per_version


def _port_findings(config: RunConfig, plan: Plan, held: frozenset[int]) -> list[Finding]:
    findings = []
    base = config.rollout.rollout_port_base
    if base:
        findings += [
            probes.port_finding(LOOPBACK, base + index, "rollout_port_base")
            for index, instance in enumerate(plan.instances)
            if instance.slots and not instance.node and base + index not in held
        ]
    if config.api.api_port:
        findings.append(probes.port_finding(config.api.api_host, config.api.api_port, "api_port"))
    return findings
