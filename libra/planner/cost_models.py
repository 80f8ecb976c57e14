"""From a configuration to the models that the search asks."""

import msgspec

from libra.config.hardware import HardwareConfig
from libra.config.model_arch import ModelArchConfig
from libra.config.rules.rollout import CPU_KV_CACHE_BYTES
from libra.config.run import RunConfig
from libra.errors import ConfigError
from libra.models.architecture import architecture_of
from libra.models.hardware import DeviceRates, device_rates
from libra.models.kv_capacity import GIB
from libra.models.kv_capacity import RolloutMemory as EngineMemory
from libra.planner.calibration import Calibration
from libra.planner.instance_cost import InstanceModel
from libra.planner.memory import RolloutMemory, TrainMemory
from libra.planner.publish_cost import PublishModel
from libra.planner.train_cost import TrainModel

_BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


class CostModels(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the planner knows about one configuration, layouts and demand aside."""

    rates: DeviceRates
    train: TrainModel
    train_memory: TrainMemory
    instance: InstanceModel
    rollout_memory: RolloutMemory
    publish: PublishModel


def cost_models(config: RunConfig, calibration: Calibration) -> CostModels:
    """Raises ConfigError when the configuration does not describe hardware or model."""
    hardware, arch = described(config)
    training, rollout = config.training, config.rollout
    rates = device_rates(hardware, dtype_bytes=_BYTES_OF[training.train_dtype])
    dtype = training.train_dtype if rollout.rollout_dtype == "auto" else rollout.rollout_dtype
    rollout_memory = RolloutMemory(
        arch=architecture_of(arch),
        engine=engine_memory(config, hardware),
        max_model_len=rollout.max_model_len,
        dtype_bytes=_BYTES_OF[dtype],
    )
    return CostModels(
        rates=rates,
        train=TrainModel(
            arch=arch,
            rates=rates,
            training=training,
            megatron=config.megatron,
            calibration=calibration,
            has_reference=config.algorithm.kl_coefficient > 0,
        ),
        train_memory=TrainMemory(
            arch=arch,
            training=training,
            megatron=config.megatron,
            planner=config.global_resource_planner,
            calibration=calibration,
            capacity_bytes=hardware.memory_bytes,
            max_model_len=rollout.max_model_len,
            has_reference=config.algorithm.kl_coefficient > 0,
        ),
        instance=InstanceModel(
            arch=arch,
            rates=rates,
            memory=rollout_memory,
            calibration=calibration,
            max_sequences=rollout.rollout_max_num_seqs,
        ),
        rollout_memory=rollout_memory,
        publish=PublishModel(
            weights=config.weights,
            memory=rollout_memory,
            calibration=calibration,
            gpus_per_node=hardware.gpus_per_node,
        ),
    )


def engine_memory(config: RunConfig, hardware: HardwareConfig) -> EngineMemory:
    """What an engine worker may use. On the CPU its cache is set, not what a reserve leaves."""
    rollout, on_cpu = config.rollout, config.control.device == "cpu"
    reserve_gib = config.heterogeneous_rollout.scheduling.kv_activation_reserve_gib
    cache_bytes = rollout.rollout_kv_cache_bytes
    return EngineMemory(
        device_bytes=hardware.memory_bytes,
        utilization_fraction=rollout.gpu_memory_utilization,
        activation_reserve_bytes=0 if on_cpu else int(reserve_gib * GIB),
        kv_cache_bytes=cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else cache_bytes),
    )


def described(config: RunConfig) -> tuple[HardwareConfig, ModelArchConfig]:
    """Hardware and model shape. Raises ConfigError naming what is missing."""
    hardware, arch = config.hardware, config.model_arch
    if hardware is None or arch is None:
        missing = [
            name
            for name, section in (("hardware", hardware), ("model_arch", arch))
            if section is None
        ]
        raise ConfigError(
            f"the planner needs {' and '.join(missing)}: write the section, or name a file with "
            f"{' and '.join(f'{name}_config' for name in missing)} "
            "(configs/hardware and configs/models have some)"
        )
    return hardware, arch
