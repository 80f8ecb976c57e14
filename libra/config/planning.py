"""The global resource planner and the elastic runtime: `global_resource_planner.*`."""

from math import inf
from typing import Literal

from libra.config.base import Config, Count, NonNegativeFloat, PositiveCount, Seconds


class PlannerConfig(Config, frozen=True, kw_only=True):
    """`global_resource_planner`."""

    initial_allocation_strategy: Literal["grp", "configured"] = "configured"
    allocation_granularity_gpus: PositiveCount = 1
    min_train_gpus: PositiveCount = 1
    min_rollout_gpus: PositiveCount = 1
    allowed_train_tp: list[PositiveCount] = []
    allowed_train_ep: list[PositiveCount] = []
    allowed_train_pp: list[PositiveCount] = []
    allowed_rollout_tp: list[PositiveCount] = []
    allow_cross_node_tp: bool = False
    """Let tensor-parallel groups span nodes."""

    prior_prompt_tokens: PositiveCount = 256
    """Prompt length the planner assumes while no trajectory has been observed, in tokens."""

    prior_response_mean_tokens: Count = 0
    """Mean response length the planner assumes before observations; 0 takes 40 % of
    max_new_tokens."""

    prior_response_sigma: NonNegativeFloat = 0.8
    """Spread of assumed response lengths: standard deviation of their natural logarithm."""

    train_comm_compute_ratio_threshold: NonNegativeFloat = inf
    train_ep_comm_compute_ratio_threshold: NonNegativeFloat = inf
    train_pipeline_bubble_ratio_threshold: NonNegativeFloat = 0.30
    memory_budget_check_enabled: bool = True
    memory_budget_dry_run_enabled: bool = False
    memory_budget_safety_margin_bytes: Count = 2 * 2**30
    memory_budget_logits_dtype_bytes: PositiveCount = 4
    memory_budget_workspace_factor: NonNegativeFloat = 2.0
    runtime_dynamic_reconfiguration_enabled: bool = False
    runtime_online_replanning: bool = False
    runtime_manage_rollout_processes: bool = True
    runtime_rollout_reconfigure_strategy: Literal[
        "diff", "restart_all", "blue_green", "prewarm", "cluster_swap"
    ] = "diff"
    runtime_cluster_swap_enabled: bool = False
    runtime_reconfigure_training: bool = False
    runtime_training_pool_plan_only: bool = False
    decouple_communication_domains: bool = True
    elastic_hybrid_replica_size_gpus: Count = 0
    elastic_hybrid_min_rollout_gpus: Count = 1
    elastic_hybrid_max_workers: Count | None = None
    runtime_batch_collection_timeout_s: Seconds = 1800.0
    runtime_batch_collection_max_retries: Count = 3
    runtime_drain_before_reconfigure: bool = True
