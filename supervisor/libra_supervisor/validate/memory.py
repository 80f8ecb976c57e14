"""Memory by role as `validate` shows it: the planner's estimate for the configured layout."""

from collections.abc import Iterator

from libra.config.arithmetic import data_parallel_size, rollout_buckets
from libra.config.model_arch import ModelArchConfig
from libra.config.rules.rollout import CPU_KV_CACHE_BYTES, DTYPE_BYTES
from libra.config.run import RunConfig
from libra.models.architecture import architecture_of
from libra.models.kv_capacity import GIB
from libra.models.kv_capacity import RolloutMemory as EngineMemory
from libra.planner.calibration import Calibration
from libra.planner.memory import MemoryBudget, RolloutMemory, TrainMemory
from libra.planner.train_layout import TrainLayout
from libra_supervisor.validate.ports import RoleMemory


def estimate_memory(config: RunConfig) -> tuple[RoleMemory, ...]:
    """Estimate a trainer rank and one worker of each TP degree.

    Empty without the model's shape, and while the planner is to choose the layout.
    """
    arch = config.model_arch
    if arch is None or data_parallel_size(config) is None:
        return ()
    return (_trainer_rank(config, arch), *_engine_workers(config, arch))


def _trainer_rank(config: RunConfig, arch: ModelArchConfig) -> RoleMemory:
    training = config.training
    memory = TrainMemory(
        arch=arch,
        training=training,
        megatron=config.megatron,
        planner=config.global_resource_planner,
        calibration=Calibration(hardware="", model=""),
        capacity_bytes=_limit_bytes(config) or 0,
        max_model_len=config.rollout.max_model_len,
        has_reference=config.algorithm.kl_coefficient > 0,
    )
    layout = TrainLayout(
        tp=training.train_tp_size,
        ep=training.train_ep_size,
        pp=training.train_pp_size,
        cp=training.train_cp_size,
        dp=data_parallel_size(config) or 1,
        micro_batch_size=training.micro_batch_size,
    )
    return _role("trainer rank", memory.budget(layout), config)


def _engine_workers(config: RunConfig, arch: ModelArchConfig) -> Iterator[RoleMemory]:
    rollout = config.rollout
    dtype = (
        config.training.train_dtype if rollout.rollout_dtype == "auto" else rollout.rollout_dtype
    )
    on_cpu = config.control.device == "cpu"
    reserve_gib = config.heterogeneous_rollout.scheduling.kv_activation_reserve_gib
    memory = RolloutMemory(
        arch=architecture_of(arch),
        engine=EngineMemory(
            device_bytes=_limit_bytes(config) or 0,
            utilization_fraction=rollout.gpu_memory_utilization,
            activation_reserve_bytes=0 if on_cpu else int(reserve_gib * GIB),
            kv_cache_bytes=rollout.rollout_kv_cache_bytes,
        ),
        max_model_len=rollout.max_model_len,
        dtype_bytes=DTYPE_BYTES[dtype],
    )
    cache_bytes = rollout.rollout_kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else 0)
    for tp in sorted({bucket.tp for bucket in rollout_buckets(config)}):
        role = _role(f"engine worker, TP {tp}", memory.budget(tp), config)
        if cache_bytes:
            parts = {name: size for name, size in role.bytes_by_part.items() if "KV" not in name}
            role = RoleMemory(
                role=role.role,
                bytes_by_part={**parts, "KV cache": cache_bytes},
                limit_bytes=role.limit_bytes,
            )
        yield role


def _role(name: str, budget: MemoryBudget, config: RunConfig) -> RoleMemory:
    parts = {str(item): size for item, size in budget.bytes_of.items()}
    return RoleMemory(role=name, bytes_by_part=parts, limit_bytes=_limit_bytes(config))


def _limit_bytes(config: RunConfig) -> int | None:
    """Memory of one device; on CPU all roles share the machine's, which is not asked for here."""
    if config.hardware is None or config.control.device == "cpu":
        return None
    return config.hardware.memory_bytes
