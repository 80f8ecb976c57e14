"""Values that are right but cannot be used: not built yet, or beyond the installed packages."""

import re
from collections.abc import Collection, Iterator
from typing import Final

from libra.config.environment import Environment
from libra.config.problems import Problem
from libra.config.run import RunConfig

SUPPORTED_ARCHITECTURES: Final = frozenset(
    {"Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM"}
)
"""What the trainer maps between Hugging Face and Megatron-Core; FSDP takes any."""


_LOOPBACK: Final = re.compile(r"^https?://(localhost|127\.[0-9.]+|\[::1\])[:/]", re.IGNORECASE)


def check_availability(config: RunConfig, environment: Environment) -> tuple[Problem, ...]:
    """Find what this configuration asks for that a run cannot do yet."""
    return (*_check_key_value_heads(config), *_check_nodes(config, environment))


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
            and (on_cpu or not (offloads or has_transformer_engine)),
            (
                "it needs CUDA and megatron_optimizer_cpu_offload, or Transformer Engine, which is "
                "not installed"
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


def _check_nodes(config: RunConfig, environment: Environment) -> Iterator[Problem]:
    """Find servers that not every node reaches, and nodes that nobody has named."""
    step = environment.slurm
    num_nodes = max(len(config.cluster.nodes), step.num_step_nodes if step else 1)
    described = config.hardware.nodes if config.hardware else 1
    if described > 1 and num_nodes == 1:
        yield Problem(
            path="hardware.nodes",
            what=f"describes {described} nodes, and nobody says which they are",
            hint="name them in nodes, or start one task on each with srun",
            related=("nodes",),
        )
    if num_nodes == 1:
        return
    for index, endpoint in enumerate(config.heterogeneous_rollout.endpoints):
        if _LOOPBACK.match(endpoint.url):
            yield Problem(
                path=f"heterogeneous_rollout.endpoints[{index}].url",
                what=f"{endpoint.url} is each node's own address",
                hint="name it as all nodes reach it",
                related=("nodes",),
            )
