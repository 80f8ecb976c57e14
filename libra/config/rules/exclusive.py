"""Options that only some choice reads: refused under another choice, never ignored.

Where the choice is which backend, scheduler or metric to use, setting another one's option is an
error. Where it is a switch, its tunables may stay while it is off, with a warning, so that turning
a feature off for one run needs one override.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from libra.config.problems import Problem
from libra.config.run import RunConfig
from libra.config.surface import all_options, value_of


class Dependence(msgspec.Struct, frozen=True):
    """`options` have an effect only while `holds` is true of the option `governor`."""

    options: tuple[str, ...]
    governor: str
    holds: Callable[[Any], bool]
    needed: str
    """`governor` in the state that gives them an effect, in words."""


def _is(value: Any) -> Callable[[Any], bool]:
    return lambda found: found == value


def _is_not(value: Any) -> Callable[[Any], bool]:
    return lambda found: found != value


def _is_one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda found: found in values


def _contains(value: Any) -> Callable[[Any], bool]:
    return lambda found: value in found


def _prefixed(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


_SCHEDULING: Final = "heterogeneous_rollout.scheduling"
_PLANNER: Final = "global_resource_planner"
_MEGATRON: Final = tuple(path for path in all_options() if path.startswith("megatron_"))

CHOICES: Final = (
    Dependence(_MEGATRON, "train_backend", _is("megatron_core"), "megatron_core"),
    Dependence(("fsdp_gradient_checkpointing",), "train_backend", _is("fsdp"), "fsdp"),
    Dependence(
        ("train_tp_size", "train_pp_size", "train_cp_size", "train_ep_size"),
        "train_backend",
        _is("megatron_core"),
        "megatron_core",
    ),
    # The planner splits the training side by Megatron-Core's degrees.
    Dependence(
        _prefixed(_PLANNER, "initial_allocation_strategy"),
        "train_backend",
        _is("megatron_core"),
        "megatron_core",
    ),
    Dependence(
        _prefixed(_SCHEDULING, "load_balance_weights"),
        f"{_SCHEDULING}.load_balance_strategy",
        _is("weighted"),
        "weighted",
    ),
    Dependence(
        _prefixed(_SCHEDULING, "load_metric"),
        f"{_SCHEDULING}.load_balance_strategy",
        _is_not("round_robin"),
        "not round_robin",
    ),
    Dependence(
        _prefixed(_SCHEDULING, "kv_capacity_tokens_by_tp", "kv_activation_reserve_gib"),
        f"{_SCHEDULING}.load_metric",
        _is("kv_tokens"),
        "kv_tokens",
    ),
    # Engines that keep the base model would be evaluated over and over.
    Dependence(("eval_data",), "rollout_weight_sync_mode", _is_not("none"), "not none"),
    Dependence(
        ("lr_decay_steps", "lr_min_fraction"), "lr_schedule", _is_not("constant"), "not constant"
    ),
    Dependence(
        ("megatron_optimizer_offload_fraction",),
        "megatron_optimizer_cpu_offload",
        bool,
        "true",
    ),
    # Every server receives at the same time, in the process that serves.
    Dependence(
        ("rollout_weight_reload_method", "rollout_weight_reload_strategy"),
        "rollout_weight_sync_mode",
        _is_not("nccl"),
        "not nccl",
    ),
    Dependence(
        ("rollout_weight_pause_mode",), "rollout_weight_reload_method", _is("inplace"), "inplace"
    ),
    # Its ratios have an upper bound only, which keeps every token's gradient.
    Dependence(("clip_ratio_low", "clip_ratio_dual"), "policy_loss", _is_not("cispo"), "not cispo"),
    Dependence(
        ("advantage_eps",),
        "advantage",
        _is_one_of("grpo", "grpo_population_std", "loo_std"),
        "grpo, grpo_population_std or loo_std",
    ),
)
"""Set under another choice: an error."""

SWITCHES: Final = (
    Dependence(
        _prefixed(
            _SCHEDULING,
            "metrics_poll_interval_s",
            "metrics_request_timeout_s",
            "metrics_staleness_ttl_s",
            "metrics_admission_enter",
            "metrics_admission_exit",
            "metrics_preemption_penalty_ttl_s",
            "metrics_bias_alpha",
        ),
        f"{_SCHEDULING}.enable_metrics_feedback",
        bool,
        "true",
    ),
    Dependence(
        _prefixed(_SCHEDULING, "prefix_affinity_max_entries"),
        f"{_SCHEDULING}.prefix_affinity",
        bool,
        "true",
    ),
    Dependence(("kl_estimator", "kl_unbiased"), "kl_coefficient", bool, "above 0"),
    Dependence(("importance_cap",), "importance_correction", _is_not("none"), "not none"),
    Dependence(("importance_floor",), "importance_correction", _is("icepop"), "icepop"),
    Dependence(
        (
            "sync_interval",
            "rollout_weight_reload_method",
            "rollout_weight_reload_strategy",
            "rollout_weight_pause_mode",
            "rollout_weight_ack_timeout_s",
        ),
        "rollout_weight_sync_mode",
        _is_not("none"),
        "not none",
    ),
    Dependence(("eval_interval", "eval_samples", "eval_pass_reward"), "eval_data", bool, "set"),
    Dependence(("recompute_micro_batch_size",), "recompute_logprobs", bool, "true"),
    Dependence(
        _prefixed(
            _PLANNER,
            "memory_budget_logits_dtype_bytes",
            "memory_budget_workspace_factor",
        ),
        f"{_PLANNER}.memory_budget_check_enabled",
        bool,
        "true",
    ),
    Dependence(
        ("train_tp_size", "train_pp_size", "train_ep_size"),
        f"{_PLANNER}.initial_allocation_strategy",
        _is("configured"),
        "configured",
    ),
    Dependence(
        ("phase_trace_dir", "phase_trace_max_bytes", "phase_trace_keep"),
        "phase_trace_enabled",
        bool,
        "true",
    ),
    Dependence(("tensorboard_dir",), "trackers", _contains("tensorboard"), "with tensorboard"),
    Dependence(("wandb_project", "wandb_mode"), "trackers", _contains("wandb"), "with wandb"),
    Dependence(
        ("mlflow_tracking_uri", "mlflow_experiment"),
        "trackers",
        _contains("mlflow"),
        "with mlflow",
    ),
    Dependence(("node_loss_patience_s",), "node_loss_policy", _is("shrink"), "shrink"),
    Dependence(("api.api_host",), "api.api_port", _is_not(None), "set"),
)
"""Set while the switch is off: a warning."""


def options_of_other_choices(config: RunConfig) -> Iterator[Problem]:
    """Refuse what another backend, scheduler or method would read."""
    for path, dependence in _without_effect(config, CHOICES):
        found = value_of(config, dependence.governor)
        yield Problem(
            path=path,
            what=f"has an effect only with {dependence.governor} {dependence.needed}, "
            f"which is {_said(found)}",
            hint=f"remove it or change {dependence.governor}",
            related=(dependence.governor,),
        )


def tunables_of_what_is_off(config: RunConfig) -> Iterator[Problem]:
    """Warn of tunables whose switch is off."""
    for path, dependence in _without_effect(config, SWITCHES):
        found = value_of(config, dependence.governor)
        yield Problem(
            path=path,
            what=f"has no effect while {dependence.governor} is {_said(found)}",
            related=(dependence.governor,),
        )


def deprecated(config: RunConfig) -> Iterator[Problem]:
    """Warn of what is accepted for old files only."""
    if config.global_resource_planner.elastic_hybrid_max_workers is not None:
        yield Problem(
            path=f"{_PLANNER}.elastic_hybrid_max_workers",
            what="is deprecated and ignored: the elastic hybrid pool has no policy maximum",
            hint="remove it",
        )


def _without_effect(
    config: RunConfig, dependences: tuple[Dependence, ...]
) -> Iterator[tuple[str, Dependence]]:
    for dependence in dependences:
        if dependence.holds(value_of(config, dependence.governor)):
            continue
        for path in dependence.options:
            if value_of(config, path) != all_options()[path].default:
                yield path, dependence


def _said(value: Any) -> str:
    if value is None or value == "":
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)


RULES = (options_of_other_choices,)
WARNINGS = (tunables_of_what_is_off, deprecated)
