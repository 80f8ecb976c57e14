"""All checks of one run on this machine."""

from pathlib import Path
from typing import Literal

from libra.config.run import RunConfig
from libra.ids import NodeRank
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
    host: str = LOOPBACK,
    held: Held = NOTHING,
) -> list[Finding]:
    """Everything that the first node has to have, whether it is fine or not.

    `host` is where servers listen. `held` is what the run itself has from an earlier supervisor,
    and counts as available.
    """
    findings = check_node(config, plan, device, node=NodeRank(0), host=host, held=held)
    findings.append(probes.reward_finding(config.data.reward))
    findings.append(
        disk_finding(
            directory=str(directory),
            needed_bytes=_disk_bytes(config),
            free_bytes=probes.free_disk_bytes(directory),
        )
    )
    if config.api.api_port:
        findings.append(probes.port_finding(config.api.api_host, config.api.api_port, "api_port"))
    return findings


def check_node(
    config: RunConfig,
    plan: Plan,
    device: Literal["cpu", "cuda"],
    *,
    node: NodeRank,
    host: str,
    held: Held = NOTHING,
) -> list[Finding]:
    """What any node has to have for its part of the plan: packages, memory, ports."""
    findings = probes.package_findings()
    if device == "cpu":
        needed = host_memory_bytes(_host_demand(config, plan, node))
        available = probes.available_memory_bytes() + held.num_bytes
        findings.append(memory_finding(needed_bytes=needed, available_bytes=available))
    return findings + _port_findings(config, plan, node, host, held.ports)


def stored_parameters(model: Path) -> int:
    """Parameters of a model directory, from the size of its weight files.

    Two bytes each are assumed: an upper bound for float32 files, right for 16-bit ones.
    """
    num_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return num_bytes // 2


def _host_demand(config: RunConfig, plan: Plan, node: NodeRank) -> HostDemand:
    dtype = config.rollout.rollout_dtype
    resolved = config.training.train_dtype if dtype == "auto" else dtype
    return HostDemand(
        num_parameters=stored_parameters(Path(config.model.model_path)),
        num_ranks=sum(
            plan.train.node_of_rank(rank) == node for rank in range(plan.train.world_size)
        ),
        model_parallel_size=plan.train.tp * plan.train.pp,
        num_instances=sum(1 for it in plan.instances if it.slots and it.node == node),
        num_workers=sum(len(it.slots) for it in plan.instances if it.node == node),
        engine_bytes_per_parameter=BYTES_OF_DTYPE[resolved],
        kv_cache_bytes_per_worker=config.rollout.rollout_kv_cache_bytes or CPU_KV_CACHE_BYTES,
    )


def _disk_bytes(config: RunConfig) -> int:
    """keep_last checkpoints and published versions, and one more of each while it is written."""
    per_version = 4 + CHECKPOINT_BYTES_PER_PARAMETER
    num_parameters = stored_parameters(Path(config.model.model_path))
    return (config.control.keep_last + 1) * num_parameters * per_version


def _port_findings(
    config: RunConfig, plan: Plan, node: NodeRank, host: str, held: frozenset[int]
) -> list[Finding]:
    base = config.rollout.rollout_port_base
    if not base:
        return []
    return [
        probes.port_finding(host, base + index, "rollout_port_base")
        for index, instance in enumerate(plan.instances)
        if instance.slots and instance.node == node and base + index not in held
    ]
