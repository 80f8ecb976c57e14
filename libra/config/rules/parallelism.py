"""Parallel degrees against devices and against the model's shape."""

from collections.abc import Iterator

from libra.config.arithmetic import (
    VLLM_VOCABULARY_MULTIPLE,
    data_parallel_size,
    model_parallel_size,
    nearest_divisors,
    nearest_multiples,
    padded,
    planner_decides,
    rollout_buckets,
)
from libra.config.model_arch import ModelArchConfig
from libra.config.problems import Problem
from libra.config.run import RunConfig

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head widths of vLLM 0.32's CPU attention; another one ends the engine at its first request."""


def whole_replicas(config: RunConfig) -> Iterator[Problem]:
    """Check that TP x PP x CP divides the training ranks."""
    training, size = config.training, model_parallel_size(config)
    if training.train_gpus % size and not planner_decides(config):
        yield Problem(
            path="train_gpus",
            what=f"{training.train_gpus} do not divide into replicas of {size} (train_tp_size "
            f"{training.train_tp_size} x train_pp_size {training.train_pp_size} x train_cp_size "
            f"{training.train_cp_size})",
            hint="nearest: "
            + " or ".join(str(gpus) for gpus in nearest_multiples(training.train_gpus, size)),
            related=("train_tp_size", "train_pp_size", "train_cp_size"),
        )


def expert_parallel(config: RunConfig) -> Iterator[Problem]:
    """Check that EP divides the data-parallel size and the experts, and that there are any."""
    ep, dp, arch = config.training.train_ep_size, data_parallel_size(config), config.model_arch
    if ep == 1:
        return
    if dp is not None and dp % ep:
        yield _must_divide("train_ep_size", ep, dp, "the data-parallel size", ("train_gpus",))
    if arch is not None and not arch.num_experts:
        yield Problem(
            path="train_ep_size",
            what=f"is {ep}, but {arch.architecture} has no experts",
            hint="nearest: 1",
            related=("model_arch.num_experts",),
        )
    elif arch is not None and arch.num_experts % ep:
        yield _must_divide("train_ep_size", ep, arch.num_experts, "the experts")


def training_shape(config: RunConfig) -> Iterator[Problem]:
    """Check TP against heads and widths, PP against layers; Megatron pads its vocabulary to fit."""
    arch, training = config.model_arch, config.training
    if arch is None:
        return
    tp, pp = training.train_tp_size, training.train_pp_size
    yield from _tensor_parallel("train_tp_size", tp, arch)
    if arch.num_layers % pp:
        yield _must_divide("train_pp_size", pp, arch.num_layers, "the layers")


def rollout_shape(config: RunConfig) -> Iterator[Problem]:
    """Check every rollout TP against heads, widths and vLLM's padded vocabulary."""
    arch = config.model_arch
    if arch is None:
        return
    for index, bucket in enumerate(rollout_buckets(config)):
        path = f"heterogeneous_rollout.instances[{index}].tp"
        yield from _tensor_parallel(path, bucket.tp, arch)
        rows = padded(arch.vocab_size, VLLM_VOCABULARY_MULTIPLE)
        if rows % bucket.tp:
            yield _must_divide(path, bucket.tp, rows, "vLLM's padded vocabulary")


def sequence_parallel_needs_tp(config: RunConfig) -> Iterator[Problem]:
    """Check that there is a group to split the sequence over, unless the planner chooses it."""
    if planner_decides(config):
        return
    if config.megatron.megatron_sequence_parallel and config.training.train_tp_size == 1:
        yield Problem(
            path="megatron_sequence_parallel",
            what="splits the sequence over the tensor-parallel group, which is 1",
            hint="set train_tp_size above 1 or remove it",
            related=("train_tp_size",),
        )


def moe_needs_sequence_parallel(config: RunConfig) -> Iterator[Problem]:
    """Check what Megatron's MoE layer asserts in its first training step."""
    arch, training = config.model_arch, config.training
    if (
        arch is not None
        and arch.num_experts
        and training.train_tp_size > 1
        and not config.megatron.megatron_sequence_parallel
    ):
        yield Problem(
            path="megatron_sequence_parallel",
            what=f"must be true for a MoE model with train_tp_size {training.train_tp_size}",
            hint="set it to true",
            related=("train_tp_size", "model_arch.num_experts"),
        )


def precision_aware_needs_sharding(config: RunConfig) -> Iterator[Problem]:
    """Check that the optimizer whose state is to be narrow is the distributed one."""
    megatron = config.megatron
    if (
        megatron.megatron_use_precision_aware_optimizer
        and not megatron.megatron_use_distributed_optimizer
    ):
        yield Problem(
            path="megatron_use_precision_aware_optimizer",
            what="needs megatron_use_distributed_optimizer, which is false",
            hint="set that to true",
            related=("megatron_use_distributed_optimizer",),
        )


def head_dim_on_cpu(config: RunConfig) -> Iterator[Problem]:
    """Check the width that vLLM's CPU attention takes."""
    arch = config.model_arch
    if config.control.device != "cpu" or arch is None or arch.head_dim in CPU_HEAD_DIMS:
        return
    yield Problem(
        path="model_path",
        what=f"the installed stack cannot: vLLM's CPU attention has no head_dim {arch.head_dim}",
        hint=f"it has {', '.join(str(width) for width in CPU_HEAD_DIMS)}",
        related=("model_arch.head_dim", "device"),
    )


def _tensor_parallel(path: str, tp: int, arch: ModelArchConfig) -> Iterator[Problem]:
    heads, kv_heads = arch.num_attention_heads, arch.num_key_value_heads
    if heads % tp:
        yield _must_divide(path, tp, heads, "the attention heads")
    elif kv_heads % tp and tp % kv_heads:
        # Fewer heads than ranks are replicated, but only evenly.
        hint = f"nearest: {' or '.join(str(n) for n in nearest_divisors(tp, kv_heads))}"
        what = f"{tp} neither divides nor is a multiple of the key-value heads, {kv_heads}"
        yield Problem(path=path, what=what, hint=hint, related=("model_arch",))
    width = arch.moe_intermediate_size if arch.num_experts else arch.intermediate_size
    if width % tp:
        yield _must_divide(path, tp, width, "the MLP's width")


def _must_divide(
    path: str, value: int, total: int, of: str, related: tuple[str, ...] = ("model_arch",)
) -> Problem:
    nearest = " or ".join(str(divisor) for divisor in nearest_divisors(value, total))
    what = f"{value} does not divide {of}, {total}"
    return Problem(path=path, what=what, hint=f"nearest: {nearest}", related=related)


RULES = (
    whole_replicas,
    expert_parallel,
    training_shape,
    rollout_shape,
    sequence_parallel_needs_tp,
    moe_needs_sequence_parallel,
    precision_aware_needs_sharding,
    head_dim_on_cpu,
)
