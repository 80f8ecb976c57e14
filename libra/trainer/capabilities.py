"""What the installed stack cannot do is refused here, by option name and with the reason."""

import importlib
import importlib.util
from functools import cache

from libra.config.run import RunConfig
from libra.errors import ConfigError
from libra.trainer.architecture import Architecture
from libra.trainer.layout import ParallelSizes


def refuse_unsupported(
    config: RunConfig, architecture: Architecture, sizes: ParallelSizes, *, is_cuda: bool
) -> None:
    """Raise one ConfigError with every option that this rank could not honour."""
    problems = [
        *_option_problems(config, is_cuda=is_cuda),
        *_layout_problems(architecture, sizes),
        *_expert_problems(config, architecture, sizes),
    ]
    if problems:
        raise ConfigError("the trainer cannot run this configuration: " + "; ".join(problems))


def fallbacks(config: RunConfig, architecture: Architecture, *, is_cuda: bool) -> list[str]:
    """Say which options that hold only when available do not hold here, and what is done."""
    notices = []
    if (error := transformer_engine_error()) and importlib.util.find_spec("transformer_engine"):
        notices.append(f"Transformer Engine is installed, cannot be imported and is left: {error}")
    if (
        config.megatron.megatron_grouped_gemm
        and architecture.experts is not None
        and not uses_transformer_engine(config, is_cuda=is_cuda)
    ):
        notices.append(
            "megatron_grouped_gemm needs Transformer Engine, CUDA and train_dtype bfloat16; "
            "experts are computed one by one"
        )
    return notices


def uses_transformer_engine(config: RunConfig, *, is_cuda: bool) -> bool:
    """Whether the model's layers are Transformer Engine's.

    In bfloat16 only: its products of float32 matrices are rounded to TF32.
    """
    is_wanted = is_cuda and config.training.train_dtype == "bfloat16"
    return is_wanted and transformer_engine_error() is None


@cache
def transformer_engine_error() -> str | None:
    """Why Transformer Engine is of no use here; None when it is there.

    Raises whatever else a damaged installation does at its import, as Megatron's own does before.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        return str(error)
    return None


def _option_problems(config: RunConfig, *, is_cuda: bool) -> list[str]:
    megatron = config.megatron
    offloads = megatron.megatron_optimizer_cpu_offload
    checks = {
        "megatron_optimizer_cpu_offload needs CUDA: on the CPU the optimizer state is there": (
            offloads and not is_cuda
        ),
        "megatron_use_precision_aware_optimizer needs megatron_use_distributed_optimizer": (
            megatron.megatron_use_precision_aware_optimizer
            and not megatron.megatron_use_distributed_optimizer
        ),
        "megatron_use_precision_aware_optimizer needs CUDA and Transformer Engine, or "
        "megatron_optimizer_cpu_offload": (
            megatron.megatron_use_precision_aware_optimizer
            and not offloads
            and not (is_cuda and transformer_engine_error() is None)
        ),
    }
    return [message for message, applies in checks.items() if applies]


def _layout_problems(architecture: Architecture, sizes: ParallelSizes) -> list[str]:
    checks = {
        f"train_tp_size {sizes.tensor} must divide the model's {architecture.num_kv_heads} "
        "key-value heads": architecture.num_kv_heads % sizes.tensor != 0,
        f"train_tp_size {sizes.tensor} must divide the model's {architecture.num_heads} "
        "attention heads": architecture.num_heads % sizes.tensor != 0,
        f"train_tp_size {sizes.tensor} must divide the feed-forward size "
        f"{architecture.ffn_size}": architecture.ffn_size % sizes.tensor != 0,
        f"train_pp_size {sizes.pipeline} must divide the model's {architecture.num_layers} "
        "layers": architecture.num_layers % sizes.pipeline != 0,
    }
    return [message for message, applies in checks.items() if applies]


def _expert_problems(
    config: RunConfig, architecture: Architecture, sizes: ParallelSizes
) -> list[str]:
    num_experts = architecture.experts.num_experts if architecture.experts else 1
    checks = {
        f"train_ep_size {sizes.expert} must divide the model's {num_experts} experts": (
            num_experts % sizes.expert != 0
        ),
        f"train_tp_size {sizes.tensor} with experts needs megatron_sequence_parallel: true": (
            architecture.experts is not None
            and sizes.tensor > 1
            and not config.megatron.megatron_sequence_parallel
        ),
    }
    return [message for message, applies in checks.items() if applies]
