"""Megatron's AdamW, stepped only with finite gradients."""

from math import isfinite
from typing import Any, Final

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from libra.config.run import RunConfig
from libra.trainer.model import torch_dtype


def build_optimizer(model: Any, config: RunConfig) -> Any:
    """AdamW over the parameters of a model with gradient buffers; main weights are float32."""
    training, megatron = config.training, config.megatron
    dtype = torch_dtype(training.train_dtype)
    is_torch_adam = not _needs_engine_adam(config)
    _choose_adam(torch_s=is_torch_adam)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_eps,
        clip_grad=training.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=megatron.megatron_use_distributed_optimizer,
        use_precision_aware_optimizer=megatron.megatron_use_precision_aware_optimizer,
        # The low halves of the main weights alone would be saved as if they were the weights.
        store_param_remainders=False,
        optimizer_cpu_offload=megatron.megatron_optimizer_cpu_offload,
        optimizer_offload_fraction=megatron.megatron_optimizer_offload_fraction,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    for group in optimizer.param_groups:
        # Biases and norms have 0 there, which Megatron leaves to its scheduler to look at.
        group["weight_decay"] = training.weight_decay * group["wd_mult"]
    is_on_device = next(model.parameters()).is_cuda and not megatron.megatron_optimizer_cpu_offload
    if is_on_device and is_torch_adam:
        _use_fused_kernels(optimizer)
    return optimizer


def has_torch_adam() -> bool:
    """Whether the optimizers that `build_optimizer` has built here are torch's."""
    return not distrib_optimizer.USING_TE_OPTIMIZER


def _needs_engine_adam(config: RunConfig) -> bool:
    """Whether states are kept in other precisions, which only Transformer Engine's Adam does."""
    megatron = config.megatron
    is_precise = megatron.megatron_use_precision_aware_optimizer
    return is_precise and not megatron.megatron_optimizer_cpu_offload


def _choose_adam(*, torch_s: bool) -> None:
    """Have Megatron take torch's AdamW, also where it could import Transformer Engine's or apex's.

    They are no faster than torch's fused one, do not run on the CPU, and their checkpoints would be
    others.
    """
    for module, name, found in _FOUND_BY_MEGATRON:
        setattr(module, name, _OF_TORCH[name] if torch_s else found)


_OF_TORCH: Final = {
    "Adam": torch.optim.AdamW,
    "USING_PYTORCH_OPTIMIZER": True,
    "HAVE_APEX_OR_TE": False,
    "USING_TE_OPTIMIZER": False,
    "USING_APEX_OPTIMIZER": False,
}
_FOUND_BY_MEGATRON: Final = [
    (module, name, getattr(module, name))
    for module in (core_optimizer, distrib_optimizer)
    for name in _OF_TORCH
    if hasattr(module, name)
]
"""What each of Megatron's modules has imported, and has concluded from it."""


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers under a Megatron optimizer."""
    return [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]


def _use_fused_kernels(optimizer: Any) -> None:
    # One pass over parameters and state, where torch's default makes temporaries of their size.
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            group["fused"], group["foreach"] = True, False


def step_if_finite(optimizer: Any, *, learning_rate: float) -> tuple[float, bool]:
    """Clip by the global norm and step; returns that norm and whether the step was taken.

    A norm that is NaN or infinite leaves weights and optimizer state untouched. The norm is
    reduced over all ranks that hold parts of a gradient, so every rank decides alike.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not isfinite(norm):
        return norm, False
    _clip_and_step(optimizer, norm, learning_rate=learning_rate)
    return norm, True


def step_with(optimizer: Any, norm: float, *, learning_rate: float) -> None:
    """Clip as if the global norm were `norm`, and step."""
    optimizer.prepare_grads()
    _clip_and_step(optimizer, norm, learning_rate=learning_rate)


def _clip_and_step(optimizer: Any, norm: float, *, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    # Megatron's own step() would clip after the norm without looking at it.
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if part.config.clip_grad > 0 and parameters:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    optimizer.step_with_ready_grads()
