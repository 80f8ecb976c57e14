"""What `--resume` may change, and why the rest may not."""

from collections.abc import Mapping
from typing import Final

from libra.config.problems import Place, Problem
from libra.config.run import RunConfig
from libra.config.surface import all_options, value_of

_ORDER: Final = "it decides which prompts come next, and the saved cursor counts them"
_STATE: Final = "the optimizer's saved state has this form"

FIXED: Final[Mapping[str, str]] = {
    "run_id": "records and published weights carry it",
    "model_path": "v0 is this model",
    "tokenizer_path": "saved trajectories hold its token ids",
    "run_name": "the run directory carries it",
    "seed": _ORDER,
    "device": _STATE,
    "train_data": _ORDER,
    "shuffle": _ORDER,
    "prompt_field": _ORDER,
    "apply_chat_template": _ORDER,
    "on_bad_row": _ORDER,
    "on_long_prompt": _ORDER,
    "train_backend": _STATE,
    "train_ep_size": "experts that are spread over ranks have an optimizer of their own",
    "train_dtype": _STATE,
    "batch_size": "trajectories accepted so far are counted as steps x batch_size",
    "n_samples": "saved groups have this many samples",
    "megatron_use_distributed_optimizer": _STATE,
    "megatron_use_precision_aware_optimizer": _STATE,
    "megatron_optimizer_cpu_offload": _STATE,
    "megatron_optimizer_offload_fraction": _STATE,
    "megatron_grouped_gemm": _STATE,
    "model_arch.*": "v0 is this model",
}
"""Reason by option; `section.*` for all of a section."""

FREE: Final[frozenset[str]] = frozenset(
    {
        "total_steps", "epochs", "max_run_s", "save_interval", "keep_last",
        "eval_data", "eval_interval", "eval_samples", "eval_pass_reward",
        "answer_field", "workflow", "workflow_args", "reward", "reward_args",
        "reward_workers", "reward_timeout_s", "reward_memory_bytes", "max_group_attempts",
        "mini_batch_size", "micro_batch_size", "recompute_logprobs", "recompute_micro_batch_size",
        "learning_rate", "lr_schedule", "lr_warmup_steps", "lr_decay_steps", "lr_min_fraction",
        "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "max_skipped_steps",
        "train_gpus", "train_tp_size", "train_pp_size", "train_cp_size",
        "megatron_use_cpu_initialization", "megatron_sequence_parallel",
        "megatron_recompute_granularity", "fsdp_gradient_checkpointing",
        "max_flat_drops",
        "advantage", "advantage_eps", "policy_loss", "clip_ratio_low", "clip_ratio_high",
        "clip_ratio_dual", "loss_agg_mode", "importance_correction", "importance_cap",
        "importance_floor", "kl_coefficient", "kl_estimator", "kl_unbiased",
        "entropy_coefficient", "mask_truncated",
        "rollout_gpus", "max_model_len", "max_new_tokens", "max_concurrent_rollouts",
        "max_head_offpolicyness", "temperature", "top_p", "rollout_dtype",
        "gpu_memory_utilization", "rollout_kv_cache_bytes", "rollout_enforce_eager",
        "rollout_max_num_seqs", "rollout_port_base", "rollout_extra_args",
        "sync_interval", "rollout_weight_sync_mode", "rollout_weight_reload_method",
        "rollout_weight_reload_strategy", "rollout_weight_pause_mode",
        "rollout_weight_ack_timeout_s",
        "phase_trace_enabled", "phase_trace_dir", "phase_trace_max_bytes", "phase_trace_keep",
        "trackers", "tensorboard_dir", "wandb_project", "wandb_mode", "mlflow_tracking_uri",
        "mlflow_experiment",
        "nodes", "node_port", "node_lease_s", "node_orphan_grace_s", "node_loss_policy",
        "node_loss_patience_s", "node_token_file", "node_tls_cert", "node_tls_key", "node_tls_ca",
        "global_resource_planner.*", "heterogeneous_rollout.*", "supervision.*", "api.*",
        "hardware.*",
    }
)  # fmt: skip
"""Options that take their new value from the step at which the run goes on."""


def reason_fixed(path: str) -> str | None:
    """Why `--resume` refuses another value of the option at `path`; None when it may change."""
    return FIXED.get(path) or FIXED.get(f"{path.partition('.')[0]}.*")


def check_resume(
    old: RunConfig, new: RunConfig, *, place_of: Mapping[str, Place]
) -> tuple[Problem, ...]:
    """Options whose value differs from the run's first configuration though it may not."""
    return tuple(
        Problem(
            path=path,
            what=f"was {value_of(old, path)!r} and is now {value_of(new, path)!r}, but --resume "
            f"cannot change it: {reason}",
            hint="set it back, or start a new run",
            place=place_of.get(path),
        )
        for path in all_options()
        if (reason := reason_fixed(path)) and value_of(old, path) != value_of(new, path)
    )
