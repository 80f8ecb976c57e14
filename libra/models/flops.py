"""Floating-point operations of a forward pass; a backward pass costs twice as many.

A matrix product of m x k by k x n takes 2mkn operations (Narayanan et al. 2021, section 3.1).
"""

from libra.config.model_arch import ModelArchConfig
from libra.models.parameters import (
    active_layer_parameters,
    attention_width,
    embedding_parameters,
)


def layer_token_flops(arch: ModelArchConfig) -> int:
    """Forward operations of one block for one token, the attention scores left out."""
    return 2 * active_layer_parameters(arch)


def layer_attention_flops_per_square_token(arch: ModelArchConfig) -> int:
    """Forward operations of one block's causal attention per (sequence length)^2.

    Scores and weighted sum take 2 x 2 s^2 x width; the causal half of the matrix is skipped.
    """
    return 2 * attention_width(arch)


def head_token_flops(arch: ModelArchConfig) -> int:
    """Forward operations of the output head for one token."""
    return 2 * embedding_parameters(arch)


def forward_flops(arch: ModelArchConfig, num_tokens: int) -> int:
    """One causal forward pass of one sequence."""
    matmul = arch.num_layers * layer_token_flops(arch) + head_token_flops(arch)
    attention = arch.num_layers * layer_attention_flops_per_square_token(arch)
    return num_tokens * matmul + num_tokens**2 * attention
