"""Values that are right but cannot be used: not built yet, or beyond the installed packages.

NOT_YET only shrinks. What the installed stack cannot do is another matter, and said as such.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from libra.config.environment import Environment
from libra.config.problems import Problem
from libra.config.run import RunConfig
from libra.config.surface import value_of

SUPPORTED_ARCHITECTURES: Final = frozenset(
    {"Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"}
)
"""What the trainer maps between Hugging Face and Megatron-Core."""


class Gap(msgspec.Struct, frozen=True):
    """An option refused while `is_needed` holds for its value."""

    path: str
    is_needed: Callable[[Any], bool]
    reason: str


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _above(limit: float) -> Callable[[Any], bool]:
    return lambda value: value is not None and value > limit


def _is_set(value: Any) -> bool:
    return bool(value)


PLANNER: Final = "global_resource_planner"
ROLLOUT: Final = "heterogeneous_rollout"

NOT_YET: Final = (
    Gap("train_backend", _is("fsdp"), "the FSDP backend is not built"),
    Gap("train_cp_size", _above(1), "context parallelism is not built"),
    Gap("train_ep_size", _above(1), "expert parallelism is not built"),
    Gap("eval_data", _is_set, "evaluation during training is not built"),
    Gap("top_p", lambda value: value < 1, "the trainer does not cut its distribution alike"),
    Gap("megatron_grouped_gemm", _is_set, "training MoE models is not built"),
    Gap("rollout_weight_sync_mode", _is("nccl"), "native weight transfer is not built"),
    Gap(f"{PLANNER}.initial_allocation_strategy", _is("grp"), "the planner is not built"),
    Gap(f"{PLANNER}.memory_budget_dry_run_enabled", _is_set, "the recompute probe is not built"),
    Gap(f"{PLANNER}.runtime_dynamic_reconfiguration_enabled", _is_set, "not built"),
    Gap(f"{PLANNER}.runtime_online_replanning", _is_set, "not built"),
    Gap(f"{PLANNER}.runtime_cluster_swap_enabled", _is_set, "not built"),
    Gap(f"{PLANNER}.runtime_reconfigure_training", _is_set, "not built"),
    Gap(f"{PLANNER}.runtime_training_pool_plan_only", _is_set, "not built"),
    Gap(
        f"{PLANNER}.runtime_manage_rollout_processes",
        _is(False),
        "using servers that somebody else started is not built",
    ),
    Gap(f"{ROLLOUT}.endpoints", _is_set, "using servers that somebody else started is not built"),
    Gap(f"{ROLLOUT}.scheduling.enable_metrics_feedback", _is_set, "the poller is not built"),
    Gap(f"{ROLLOUT}.scheduling.shared_load_dir", _is_set, "cross-rank load is not built"),
)


def check_availability(config: RunConfig, environment: Environment) -> tuple[Problem, ...]:
    """Find what this configuration asks for that a run cannot do yet."""
    problems = [
        Problem(
            path=gap.path, what=f"{value_of(config, gap.path)!r} is not available yet: {gap.reason}"
        )
        for gap in NOT_YET
        if gap.is_needed(value_of(config, gap.path))
    ]
    return (*problems, *_check_key_value_heads(config), *_check_nodes(config, environment))


def check_stack(config: RunConfig, *, has_transformer_engine: bool) -> tuple[Problem, ...]:
    """Find what the packages on this machine cannot do. `device: auto` is taken for CUDA."""
    megatron, on_cpu = config.megatron, config.control.device == "cpu"
    offloads = megatron.megatron_optimizer_cpu_offload
    refused = {
        "megatron_optimizer_cpu_offload": (
            offloads and on_cpu,
            "on CPU the optimizer state is in host memory already",
        ),
        "megatron_use_precision_aware_optimizer": (
            megatron.megatron_use_precision_aware_optimizer
            and not has_transformer_engine
            and (on_cpu or not offloads),
            (
                "it needs Transformer Engine, which is not installed, or on CUDA "
                "megatron_optimizer_cpu_offload"
            ),
        ),
    }
    return tuple(
        Problem(path=path, what=f"the installed stack cannot: {reason}", related=("device",))
        for path, (applies, reason) in refused.items()
        if applies
    )


def _check_key_value_heads(config: RunConfig) -> tuple[Problem, ...]:
    arch, tp = config.model_arch, config.training.train_tp_size
    if arch is None or arch.num_key_value_heads % tp == 0 or tp % arch.num_key_value_heads:
        return ()
    what = f"{tp} is not available yet: replicating {arch.num_key_value_heads} key-value heads "
    hint = f"at most {arch.num_key_value_heads}"
    return (Problem(path="train_tp_size", what=f"{what}is not built", hint=hint),)


def _check_nodes(config: RunConfig, environment: Environment) -> tuple[Problem, ...]:
    nodes = config.hardware.nodes if config.hardware else 1
    if nodes > 1:
        what = f"{nodes} nodes are not available yet: a run uses one node"
        return (Problem(path="hardware.nodes", what=what, hint="plan and simulate take any size"),)
    if environment.slurm and environment.slurm.num_step_nodes > 1:
        what = f"this Slurm step has {environment.slurm.num_step_nodes} nodes, a run uses one"
        hint = "start it with srun --nodes=1 --ntasks=1"
        return (Problem(path="", what=f"not available yet: {what}", hint=hint),)
    return ()
