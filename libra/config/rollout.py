"""Rollout engines, sampling and scheduling."""

from typing import Literal

import msgspec

from libra.config.base import (
    Config,
    Count,
    Fraction,
    NonNegativeFloat,
    Port,
    PositiveCount,
    PositiveFloat,
    Seconds,
)


class RolloutConfig(Config, frozen=True, kw_only=True):
    """Flat keys of generation and of the engines."""

    rollout_gpus: Count = 1
    """GPUs (on CPU: tensor-parallel workers) for rollout at launch."""

    max_model_len: PositiveCount = 4096
    """vLLM context length in tokens, prompt and response together."""

    max_new_tokens: PositiveCount = 1024
    """Maximum generated tokens per rollout request; smaller than max_model_len."""

    max_concurrent_rollouts: PositiveCount = 256
    """Maximum in-flight rollout tasks, counted in trajectories."""

    max_head_offpolicyness: NonNegativeFloat = 1.0
    """Maximum accepted policy-version lag: version trained on minus the oldest version in the
    trajectory. `.inf` removes the bound."""

    temperature: NonNegativeFloat = 1.0
    top_p: PositiveFloat = 1.0
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the engines' weights; auto follows train_dtype."""

    gpu_memory_utilization: Fraction = 0.90
    """vLLM's share of each rollout GPU."""

    rollout_kv_cache_bytes: Count = 0
    """KV cache per worker in bytes; 0 lets vLLM size it. On CPU 0 means 64 MiB."""

    rollout_enforce_eager: bool | None = None
    """Skip CUDA graphs and compilation; null means true on CPU and false on GPU."""

    rollout_max_num_seqs: PositiveCount = 256
    """vLLM's --max-num-seqs."""

    rollout_port_base: Port = 0
    """First port of the engines on this node; 0 takes free ones and holds them until hand-over."""

    rollout_extra_args: list[str] = []
    """More arguments for `vllm serve`, appended as they are."""


class TpBucket(Config, frozen=True, kw_only=True):
    tp: PositiveCount
    count: PositiveCount


class Endpoint(Config, frozen=True, kw_only=True):
    url: str
    tp: PositiveCount = 1


class SchedulingConfig(Config, frozen=True, kw_only=True):
    """`heterogeneous_rollout.scheduling`: how requests are routed over the TP buckets."""

    load_metric: Literal["requests", "tokens", "kv_tokens"] = "requests"
    kv_capacity_tokens_by_tp: dict[PositiveCount, PositiveCount] = {}
    kv_activation_reserve_gib: NonNegativeFloat = 4.0
    load_balance_strategy: Literal["least_connections", "round_robin", "weighted"] = (
        "least_connections"
    )
    load_balance_weights: dict[str, PositiveFloat] = {}
    """Weights for `weighted`, by instance id or `tpN`; others weigh 1."""

    max_in_flight_per_instance: Count = 0
    """Queue cap per instance in requests; 0 means none."""

    queue_capacity: PositiveCount = 4096
    queue_deadline_s: Seconds = 600.0
    enable_metrics_feedback: bool = False
    metrics_poll_interval_s: Seconds = 3.0
    metrics_request_timeout_s: Seconds = 1.0
    metrics_staleness_ttl_s: Seconds = 10.0
    metrics_admission_enter: Fraction = 0.90
    metrics_admission_exit: Fraction = 0.75
    metrics_preemption_penalty_ttl_s: Seconds = 60.0
    metrics_bias_alpha: Fraction = 0.3
    shared_load_dir: str = ""
    shared_load_ttl_s: Seconds = 30.0
    shared_load_heartbeat_s: Seconds = 10.0
    shared_load_cache_ttl_s: NonNegativeFloat = 1.0
    prefix_affinity: bool = False
    prefix_affinity_max_entries: PositiveCount = 8192


class HeterogeneousRolloutConfig(Config, frozen=True, kw_only=True):
    """`heterogeneous_rollout`."""

    instances: list[TpBucket] = []
    endpoints: list[Endpoint] = []
    scheduling: SchedulingConfig = msgspec.field(default_factory=SchedulingConfig)
