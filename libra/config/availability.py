"""Values that are right but cannot be used: not built yet, or beyond the installed packages.

NOT_YET only shrinks. What the installed stack cannot do is another matter, and said as such.
"""

from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec

from libra.config.environment import Environment
from libra.config.problems import Problem
from libra.config.run import RunConfig
from libra.config.surface import all_options, value_of
from libra.config.wording import yaml_words

SUPPORTED_ARCHITECTURES: Final = frozenset(
    {"Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM"}
)
"""What the trainer maps between Hugging Face and Megatron-Core; FSDP takes any."""


class Gap(msgspec.Struct, frozen=True):
    """An option refused while `is_needed` holds for its value."""

    path: str
    reason: str
    is_needed: Callable[[Any], bool] | None = None
    """None: any value but the default."""

    def applies_to(self, config: RunConfig) -> bool:
        """Whether `config` asks for what is not there."""
        value = value_of(config, self.path)
        if self.is_needed is None:
            return bool(value != all_options()[self.path].default)
        return self.is_needed(value)


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _gaps(prefix: str, names: str, reason: str) -> tuple[Gap, ...]:
    return tuple(Gap(f"{prefix}.{name}", reason) for name in names.split())


PLANNER: Final = "global_resource_planner"

NOT_YET: Final = (
    *_gaps(
        PLANNER,
        "runtime_dynamic_reconfiguration_enabled runtime_online_replanning "
        "runtime_rollout_reconfigure_strategy runtime_cluster_swap_enabled "
        "runtime_reconfigure_training runtime_training_pool_plan_only "
        "runtime_drain_before_reconfigure decouple_communication_domains "
        "elastic_hybrid_replica_size_gpus elastic_hybrid_min_rollout_gpus",
        "the elastic runtime is not built",
    ),
    *_gaps(
        PLANNER,
        "runtime_batch_collection_timeout_s runtime_batch_collection_max_retries",
        "batch collection has no timeout of its own",
    ),
    *(
        Gap(path, "a run uses one node")
        for path in all_options()
        if path == "nodes" or path.startswith("node_")
    ),
)
"""Remove an entry when its option takes effect; nothing else has to change."""


def check_availability(config: RunConfig, environment: Environment) -> tuple[Problem, ...]:
    """Find what this configuration asks for that a run cannot do yet."""
    problems = [
        Problem(path=gap.path, what=f"is not available yet: {gap.reason}", hint=_allowed(gap))
        for gap in NOT_YET
        if gap.applies_to(config)
    ]
    return (*problems, *_check_key_value_heads(config), *_check_nodes(config, environment))


def _allowed(gap: Gap) -> str:
    return f"the default is {yaml_words(all_options()[gap.path].default)}"


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


def check_trackers(config: RunConfig, *, missing: Collection[str]) -> tuple[Problem, ...]:
    """Find trackers whose package is `missing` on this machine."""
    return tuple(
        Problem(
            path="trackers",
            what=f"{name} is not installed here",
            hint=f"pip install 'libra-rl[{name}]', or leave it out",
        )
        for name in config.tracing.trackers
        if name in missing
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
