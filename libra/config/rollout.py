"""Rollout engines, sampling and scheduling."""

from typing import Literal

import msgspec

from libra.config.base import (
    Bound,
    Config,
    Count,
    Fraction,
    Gibibytes,
    NonNegativeFloat,
    PathText,
    Port,
    PositiveCount,
    PositiveFloat,
    PositiveFraction,
    Seconds,
)


class RolloutConfig(Config, frozen=True, kw_only=True):
    """Flat keys of generation and of the engines."""

    rollout_gpus: Count = 1
    """GPUs assigned to rollout at launch (on CPU: tensor-parallel workers)."""

    max_model_len: PositiveCount = 4096
    """vLLM context length in tokens, prompt and response together."""

    max_new_tokens: PositiveCount = 1024
    """Maximum generated tokens per rollout request; smaller than max_model_len."""

    max_concurrent_rollouts: PositiveCount = 256
    """Maximum in-flight rollout tasks, counted in trajectories."""

    max_head_offpolicyness: Bound = 1.0
    """Maximum accepted policy-version lag: version trained on minus the oldest version in the
    trajectory, a whole number. `.inf` removes the bound."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by it too."""

    top_p: PositiveFraction = 1.0
    """Nucleus sampling: the smallest set of tokens with this probability mass."""

    rollout_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the engines' weights; auto follows train_dtype."""

    gpu_memory_utilization: PositiveFraction = 0.90
    """vLLM's share of the memory of each rollout GPU; unused on CPU, where rollout_kv_cache_bytes
    counts."""

    rollout_kv_cache_bytes: Count = 0
    """KV cache per worker in bytes; 0 lets vLLM size it. On CPU 0 means 64 MiB."""

    rollout_enforce_eager: bool | None = None
    """Skip CUDA graphs and compilation; null means true on CPU and false on GPU."""

    rollout_max_num_seqs: PositiveCount = 256
    """Most sequences that one instance decodes together (vLLM's --max-num-seqs)."""

    rollout_port_base: Port = 0
    """First port of the engines on this node; 0 takes free ones and holds them until hand-over."""

    rollout_extra_args: list[str] = []
    """More arguments for `vllm serve`, appended as they are."""


class TpBucket(Config, frozen=True, kw_only=True):
    """`count` instances of one tensor-parallel degree."""

    tp: PositiveCount
    """Tensor-parallel degree: GPUs of each instance; divides the attention heads."""

    count: PositiveCount
    """Instances of this degree."""


class Endpoint(Config, frozen=True, kw_only=True):
    """A vLLM server that somebody else started."""

    url: str
    """Root URL: `http://host:port`."""

    tp: PositiveCount = 1
    """Its tensor-parallel degree."""


class SchedulingConfig(Config, frozen=True, kw_only=True):
    """`heterogeneous_rollout.scheduling`: how requests are routed over the TP buckets."""

    load_metric: Literal["requests", "tokens", "kv_tokens"] = "requests"
    """Selection signal for least-connections routing: requests in flight, estimated tokens in
    flight (prompt plus expected output), or kv_tokens (that load over the bucket's KV capacity)."""

    kv_capacity_tokens_by_tp: dict[PositiveCount, PositiveCount] = {}
    """KV capacity in tokens per TP degree, e.g. `{1: 120000, 4: 450000}`; empty estimates it from
    the hardware and the model and calibrates it against the engines."""

    kv_activation_reserve_gib: Gibibytes = 4.0
    """Memory per GPU in GiB left out when KV capacity is estimated."""

    load_balance_strategy: Literal["least_connections", "round_robin", "weighted"] = (
        "least_connections"
    )
    """How an instance is chosen; equal ones take turns under every strategy."""

    load_balance_weights: dict[str, PositiveFloat] = {}
    """Weights for `weighted`, by instance id or `tpN`; others weigh 1."""

    max_in_flight_per_instance: Count = 0
    """Queue cap per instance in requests in flight; 0 means none."""

    queue_capacity: PositiveCount = 4096
    """Requests that may wait for an instance; more are refused."""

    queue_deadline_s: Seconds = 600.0
    """Longest wait of a request for an instance, in seconds."""

    enable_metrics_feedback: bool = False
    """Poll each instance's /metrics: observed gauges correct the local load estimate and drive
    occupancy admission."""

    metrics_poll_interval_s: Seconds = 3.0
    """Seconds between polls of one instance."""

    metrics_request_timeout_s: Seconds = 1.0
    """Timeout of one poll in seconds."""

    metrics_staleness_ttl_s: Seconds = 10.0
    """Age in seconds from which a snapshot is ignored."""

    metrics_admission_enter: Fraction = 0.90
    """KV occupancy above which an instance gets no new requests."""

    metrics_admission_exit: Fraction = 0.75
    """KV occupancy below which it gets them again; under metrics_admission_enter."""

    metrics_preemption_penalty_ttl_s: Seconds = 60.0
    """Seconds for which a detected preemption counts against an instance."""

    metrics_bias_alpha: Fraction = 0.3
    """Weight of the newest snapshot in the bias, EMA(observed - local)."""

    shared_load_dir: PathText = ""
    """Shared directory where every scheduler publishes its requests in flight per instance; empty
    turns it off on one node, and takes load/ in the run directory with several."""

    shared_load_ttl_s: Seconds = 30.0
    """Seconds without a refresh after which a rank's file no longer counts."""

    shared_load_heartbeat_s: Seconds = 10.0
    """Seconds between refreshes of a rank's own file; under shared_load_ttl_s."""

    shared_load_cache_ttl_s: NonNegativeFloat = 1.0
    """Seconds for which the sum over ranks is reused; own writes end it at once."""

    prefix_affinity: bool = False
    """Prefer the instance that served a prompt_id before, whose prefix cache holds the prompt."""

    prefix_affinity_max_entries: PositiveCount = 8192
    """Prompts remembered; the least recently used is forgotten first."""


class HeterogeneousRolloutConfig(Config, frozen=True, kw_only=True):
    """`heterogeneous_rollout`."""

    instances: list[TpBucket] = []
    """Rollout instances by TP degree, e.g. `[{tp: 1, count: 4}, {tp: 4, count: 2}]`; they add up to
    rollout_gpus. Empty means one TP 1 instance per rollout GPU. With
    `initial_allocation_strategy: grp` the planner chooses and this stays empty."""

    endpoints: list[Endpoint] = []
    """Servers to use with `runtime_manage_rollout_processes: false`: never started, stopped or
    signalled."""

    scheduling: SchedulingConfig = msgspec.field(default_factory=SchedulingConfig)
    """Routing over the instances."""
