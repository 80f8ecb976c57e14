"""AdamW over sharded parameters, stepped only with finite gradients."""

from collections.abc import Callable, Sequence
from math import isfinite, sqrt
from typing import Any

import torch

from libra.config.training import TrainingConfig
from libra.trainer.fsdp.weights import local


def build_optimizer(model: torch.nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW with its state in place; weight decay leaves biases and norms alone, as Megatron's."""
    parameters = list(model.named_parameters())
    decayed = [p for name, p in parameters if p.dim() > 1 and not name.endswith(".bias")]
    others = [p for name, p in parameters if p.dim() <= 1 or name.endswith(".bias")]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=local(parameters[0][1]).is_cuda,
    )
    for parameter in decayed + others:
        # What AdamW would make at its first step: there is always something to save and to load.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=local(parameter).device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def step_if_finite(
    optimizer: torch.optim.Optimizer,
    *,
    learning_rate: float,
    max_norm: float,
    sum_over_ranks: Callable[[Sequence[float]], list[float]],
) -> tuple[float, bool]:
    """Clip by the global norm and step; returns that norm and whether the step was taken."""
    gradients = [
        local(parameter.grad)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    squares = sum(float(norm) ** 2 for norm in torch._foreach_norm(_filled(gradients)))  # noqa: SLF001
    norm = sqrt(sum_over_ranks([squares])[0])
    if not isfinite(norm):
        return norm, False
    # As Megatron clips; a clip of 0 is none.
    factor = max_norm / (norm + 1e-6)
    if max_norm > 0 and factor < 1.0:
        torch._foreach_mul_(_filled(gradients), factor)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    return norm, True


def _filled(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Without the empty shards of parameters with fewer rows than there are ranks."""
    return [tensor for tensor in tensors if tensor.numel()]
