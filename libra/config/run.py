"""RunConfig, the root: every section of one run, already checked."""

import msgspec

from libra.config.algorithm import AlgorithmConfig
from libra.config.base import Config
from libra.config.data import DataConfig
from libra.config.evaluation import EvaluationConfig
from libra.config.hardware import HardwareConfig
from libra.config.model import ModelConfig
from libra.config.model_arch import ModelArchConfig
from libra.config.nodes import NodesConfig
from libra.config.planning import PlannerConfig
from libra.config.rollout import HeterogeneousRolloutConfig, RolloutConfig
from libra.config.run_control import RunControlConfig
from libra.config.supervision import ApiConfig, SupervisionConfig
from libra.config.tracing import TracingConfig
from libra.config.training import MegatronConfig, TrainingConfig
from libra.config.weights import WeightsConfig


class RunConfig(Config, frozen=True, kw_only=True):
    """One run. Sections from `model` to `cluster` are flat in YAML; the rest are nested there."""

    model: ModelConfig
    control: RunControlConfig = msgspec.field(default_factory=RunControlConfig)
    data: DataConfig = msgspec.field(default_factory=DataConfig)
    evaluation: EvaluationConfig = msgspec.field(default_factory=EvaluationConfig)
    training: TrainingConfig = msgspec.field(default_factory=TrainingConfig)
    megatron: MegatronConfig = msgspec.field(default_factory=MegatronConfig)
    algorithm: AlgorithmConfig = msgspec.field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    weights: WeightsConfig = msgspec.field(default_factory=WeightsConfig)
    tracing: TracingConfig = msgspec.field(default_factory=TracingConfig)
    cluster: NodesConfig = msgspec.field(default_factory=NodesConfig)
    global_resource_planner: PlannerConfig = msgspec.field(default_factory=PlannerConfig)
    heterogeneous_rollout: HeterogeneousRolloutConfig = msgspec.field(
        default_factory=HeterogeneousRolloutConfig
    )
    supervision: SupervisionConfig = msgspec.field(default_factory=SupervisionConfig)
    api: ApiConfig = msgspec.field(default_factory=ApiConfig)
    hardware: HardwareConfig | None = None
    """None: not said; the planner needs it."""

    model_arch: ModelArchConfig | None = None
    """None: not said and there is no config.json to read it from."""
