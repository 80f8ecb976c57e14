"""Rotary frequencies exactly as transformers computes them (modeling_rope_utils)."""

from math import pi
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
