"""The two layers that Megatron's local spec lacks without Transformer Engine and apex.

Its own attention materialises the scores of every pair of tokens, and its own RMSNorm refuses
sequence parallelism.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


class RmsNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked for the gradient all-reduce of sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class SdpaAttention(torch.nn.Module):
    """Causal core attention through torch's scaled_dot_product_attention.

    Queries [s, b, heads, d], keys and values [s, b, kv heads, d]; the result is
    [s, b, heads * d]. Rows are padded on the right, where a causal mask keeps real tokens from
    seeing the padding, so no other mask is taken.
    """

    def __init__(
        self,
        config: Any,
        *,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _attention_mask: torch.Tensor | None = None,
        **_unused: Any,
    ) -> torch.Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        attended = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.permute(2, 0, 1, 3).flatten(2)
