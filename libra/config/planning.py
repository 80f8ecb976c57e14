"""The global resource planner and the elastic runtime: `global_resource_planner.*`."""

from math import inf
from typing import Literal

from libra.config.base import (
    Bound,
    Config,
    Count,
    LogSpread,
    Margin,
    Multiplier,
    PathText,
    PositiveCount,
    Seconds,
)


class PlannerConfig(Config, frozen=True, kw_only=True):
    """`global_resource_planner`."""

    initial_allocation_strategy: Literal["grp", "configured"] = "configured"
    """grp runs planning before launch, with train_gpus + rollout_gpus as the budget; configured
    keeps train_gpus, rollout_gpus and heterogeneous_rollout.instances as they are written."""

    allocation_granularity_gpus: PositiveCount = 1
    """Step in GPUs of the split between training and rollout; normally one node or one
    data-parallel replica."""

    min_train_gpus: PositiveCount = 1
    """GPUs that training keeps in every plan."""

    min_rollout_gpus: PositiveCount = 1
    """GPUs that rollout keeps in every plan under which something serves, with hybrid replicas too;
    with elastic_hybrid_min_rollout_gpus 0 replicas may borrow all of rollout at once, but no part
    of these. A reload goes on without a failed instance only while this holds."""

    allowed_train_tp: list[PositiveCount] = []
    """Candidate tensor-parallel degrees of training; empty means every one that fits."""

    allowed_train_ep: list[PositiveCount] = []
    """Candidate expert-parallel degrees, only for MoE models; each divides the experts. Empty means
    every one that fits."""

    allowed_train_pp: list[PositiveCount] = []
    """Candidate pipeline-parallel degrees of training; empty means every one that fits."""

    allowed_rollout_tp: list[PositiveCount] = []
    """Candidate tensor-parallel degrees of rollout instances; empty means every one that fits."""

    allow_cross_node_tp: bool = False
    """Let tensor-parallel groups of training span nodes; a rollout server never does."""

    prior_prompt_tokens: PositiveCount = 256
    """Prompt length in tokens that the planner assumes until trajectories have been observed."""

    prior_response_mean_tokens: Count = 0
    """Mean response length in tokens that the planner assumes until trajectories have been
    observed; 0 takes 40 % of max_new_tokens."""

    prior_response_sigma: LogSpread = 0.8
    """Spread of the assumed response lengths: standard deviation of their natural logarithm."""

    train_comm_compute_ratio_threshold: Bound = inf
    """Prune TP branches whose estimated communication/compute ratio exceeds this; `.inf` prunes
    none."""

    train_ep_comm_compute_ratio_threshold: Bound = inf
    """Prune EP branches whose estimated All-to-All/compute ratio exceeds this; `.inf` prunes
    none."""

    train_pipeline_bubble_ratio_threshold: Bound = 0.30
    """Prune PP branches whose analytical bubble ratio exceeds this; `.inf` prunes none."""

    memory_budget_check_enabled: bool = True
    """Include the temporary memory of recompute_logprobs in the budgets of candidate plans."""

    memory_budget_dry_run_enabled: bool = False
    """Run one complete recompute probe on the real ranks before training."""

    memory_budget_safety_margin_bytes: Count = 2 * 2**30
    """Device memory in bytes kept free outside the analytic estimate."""

    memory_budget_logits_dtype_bytes: PositiveCount = 4
    """Width in bytes of the dtype assumed for the logits temporary; 4 is float32."""

    memory_budget_workspace_factor: Multiplier = 2.0
    """Multiplier for logits and workspace temporaries that live at the same time."""

    calibration_dir: PathText = ""
    """Directory of the factors measured so far, one file for each device and model; empty means
    `libra/calibration` in XDG_DATA_HOME, or else in `~/.local/share`."""

    runtime_dynamic_reconfiguration_enabled: bool = False
    """Master switch for reconfiguration while the run goes on."""

    runtime_online_replanning: bool = False
    """Use online metrics in planner decisions: lengths and step times of this run decide when the
    plan is looked at, and what it is compared on. When false, only the verb `replan` looks at it,
    for the configured prior and what the calibration held at the start."""

    runtime_replan_interval_steps: PositiveCount = 10
    """Training steps from one look at the plan to the next when nothing else asks for one."""

    runtime_replan_cooldown_s: Seconds = 300.0
    """Seconds after a change of the plan in which none is decided; longer after each further one in
    a row that failed."""

    runtime_replan_window_steps: PositiveCount = 16
    """Training steps whose lengths and times the planner looks back on; fewer after a change of
    what is observed."""

    runtime_payback_steps: PositiveCount = 50
    """Training steps within which a change of the plan must have earned what it costs; fewer when
    the run ends before."""

    runtime_switch_cost_prior_s: Seconds = 60.0
    """Seconds of step time that a change of the plan is taken to cost until one of its kind has
    been measured in this run; twice that for another layout of the training core."""

    runtime_manage_rollout_processes: bool = True
    """Let Libra start, stop and adopt rollout processes; false uses the servers in
    heterogeneous_rollout.endpoints and never starts, stops or signals them."""

    runtime_rollout_reconfigure_strategy: Literal[
        "diff", "restart_all", "blue_green", "prewarm", "cluster_swap"
    ] = "diff"
    """How rollout instances are brought to a new plan; diff touches only what changes."""

    runtime_lent_servers: Literal["stop", "sleep"] = "stop"
    """What becomes of a server while training has its GPUs: sleep keeps its process and compiled
    code, and its weights in host memory, so that it is back without a start."""

    runtime_reconfigure_timeout_s: Seconds = 900.0
    """Longest each wait of a change may take (for a drain, for a server to come up, for a step
    boundary), in seconds; past it the change is undone."""

    runtime_cluster_swap_enabled: bool = False
    """Enable exchange between the rollout and training pools without spare GPUs."""

    runtime_reconfigure_training: bool = False
    """Enable training-side pool changes."""

    runtime_training_pool_plan_only: bool = False
    """Record training-pool changes without attaching workers."""

    decouple_communication_domains: bool = True
    """Keep elastic gradient traffic off the core training DP process group; false rebuilds the gang
    at a step boundary when membership changes."""

    elastic_hybrid_replica_size_gpus: Count = 0
    """Ranks in one complete TP x EP x PP x CP replica; 0 derives it from the training topology."""

    elastic_hybrid_min_rollout_gpus: Count = 1
    """Rollout GPUs that the elastic hybrid pool may never borrow; with 0 it may borrow all of them,
    for as long as there is something to train on."""

    elastic_hybrid_contribution_timeout_s: Seconds = 30.0
    """Seconds that the core waits for the gradients of a hybrid replica once it has its own; a
    replica that is later is dropped from the step and from the pool."""

    elastic_hybrid_norm_limit: Margin = 100.0
    """A hybrid replica's gradients are dropped when their norm is more than this many times that of
    one of the core's own replicas."""

    elastic_hybrid_max_workers: Count | None = None
    """Deprecated and ignored, with a warning: the elastic hybrid pool has no policy maximum."""

    runtime_batch_collection_timeout_s: Seconds = 1800.0
    """Seconds after which collecting a training batch counts as timed out; generous, since long
    responses are the ones a short limit would cut."""

    runtime_batch_collection_max_retries: Count = 3
    """Retries after a batch collection timeout. Each asks anew for the samples that have been
    running for longer than the timeout, and for nothing else."""

    runtime_batch_collection_allow_partial: bool = False
    """After the retries, train on the complete groups that are there; false ends the run."""

    runtime_drain_before_reconfigure: bool = True
    """Drain in-flight rollout work before a change at run time."""
