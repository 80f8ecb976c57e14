"""Rotary frequencies exactly as transformers computes them (modeling_rope_utils)."""

from math import ceil, floor, log, pi
from typing import assert_never

import torch

from libra.trainer.architecture import Architecture, Rope


def inverse_frequencies(architecture: Architecture) -> torch.Tensor:
    """float32[head_dim / 2]: angle per position of each pair of dimensions."""
    rope, dim = architecture.rope, architecture.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope, dim)
        case _:
            assert_never(rope.kind)


def _llama3(plain: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between are interpolated."""
    wavelengths = 2 * pi / plain
    longest_kept = rope.original_max_positions / rope.high_freq_factor
    shortest_slowed = rope.original_max_positions / rope.low_freq_factor
    slowed = plain / rope.factor
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * slowed + smooth * plain
    scaled = torch.where(wavelengths > shortest_slowed, slowed, between)
    return torch.where(wavelengths < longest_kept, plain, scaled)


def _yarn(plain: torch.Tensor, rope: Rope, dim: int) -> torch.Tensor:
    """Waves that turn often within the original length are kept, rare ones slowed by `factor`.

    Between the dimensions of `beta_fast` and `beta_slow` turns there is a straight ramp.
    """
    yarn = rope.yarn
    assert yarn is not None  # noqa: S101 - a rope of this kind has one

    def dimension_of(num_turns: float) -> float:
        wavelength = rope.original_max_positions / (num_turns * 2 * pi)
        return dim * log(wavelength) / (2 * log(rope.theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncates:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    slowed_share = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept_share = 1 - slowed_share
    return plain / rope.factor * (1 - kept_share) + plain * kept_share
