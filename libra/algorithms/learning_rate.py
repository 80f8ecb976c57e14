"""The learning rate as a function of how many optimizer steps have been taken."""

from math import cos, pi
from typing import assert_never

from libra.config.training import TrainingConfig
from libra.errors import ConfigError


def decay_steps(config: TrainingConfig, *, total_steps: int | None) -> int:
    """Optimizer steps until the minimum is reached; 0 for a constant rate.

    Raises ConfigError when the schedule decays but nothing says over how many steps.
    """
    if config.lr_schedule == "constant":
        return 0
    if config.lr_decay_steps:
        return config.lr_decay_steps
    if total_steps is None:
        raise ConfigError(
            f"lr_schedule {config.lr_schedule} needs an end: set lr_decay_steps (optimizer steps) "
            "or total_steps (training steps)"
        )
    return total_steps * optimizer_steps_per_batch(config)


def optimizer_steps_per_batch(config: TrainingConfig) -> int:
    """Mini-batches of one training step."""
    return config.batch_size // (config.mini_batch_size or config.batch_size)


def learning_rate(config: TrainingConfig, *, num_taken: int, decay_steps: int) -> float:
    """Rate of the optimizer step that follows `num_taken` steps.

    Rises linearly to `learning_rate` over the warm-up, reaches it with the warm-up's last step,
    then decays until `decay_steps` (counted from the first step) and stays at the minimum.
    """
    peak, warmup = config.learning_rate, config.lr_warmup_steps
    if num_taken < warmup:
        return peak * (num_taken + 1) / warmup
    minimum = peak * config.lr_min_fraction
    progress = min(1.0, (num_taken - warmup) / max(decay_steps - warmup, 1))
    match config.lr_schedule:
        case "constant":
            return peak
        case "linear":
            return peak + (minimum - peak) * progress
        case "cosine":
            return minimum + (peak - minimum) * (1 + cos(pi * progress)) / 2
        case _:
            assert_never(config.lr_schedule)
