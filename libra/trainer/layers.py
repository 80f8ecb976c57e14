"""The layers that Megatron's local spec lacks without Transformer Engine and apex.

Its own attention materialises the scores of every pair of tokens and knows no packed sequences,
its own RMSNorm refuses sequence parallelism, and its rotary embedding knows one position per
column only.
"""

import inspect
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from libra.trainer.columns import ContextShare, Packing, Spans

# torch 2.11 says is_causal, 2.13 a window; neither takes the other.
_CAUSAL_OPTION: dict[str, Any] = (
    {"is_causal": True}
    if "is_causal" in inspect.signature(varlen_attn).parameters
    else {"window_size": (-1, 0)}
)


class RmsNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked for the gradient all-reduce of sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class Rotary(torch.nn.Module):
    """Rotary angles of the positions that a `Packing` gives its columns, [s, 1, 1, head_dim].

    The frequencies are no buffer: a model in bfloat16 must not round them.
    """

    def __init__(self, inverse_frequencies: torch.Tensor) -> None:
        super().__init__()
        self._inverse_frequencies = inverse_frequencies

    def get_rotary_seq_len(self, *arguments: Any, **_options: Any) -> torch.Tensor:
        """Megatron asks for a length and hands it to `forward`; ours are positions."""
        packing: Packing = arguments[-1]
        return packing.positions

    def forward(self, positions: torch.Tensor, **_options: Any) -> torch.Tensor:
        angles = torch.outer(positions.float(), self._inverse_frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class SdpaAttention(torch.nn.Module):
    """Causal core attention through torch's own kernels.

    Queries [s, b, heads, d], keys and values [s, b, kv heads, d]; the result is
    [s, b, heads * d]. Padded rows end in padding, which a causal mask hides from real tokens.
    Packed sequences stand in one row and see nothing of each other; under context parallelism
    keys and values of all ranks are gathered.
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
        *,
        packed_seq_params: Packing,
        **_unused: Any,
    ) -> torch.Tensor:
        packing = packed_seq_params
        if packing.context is None and packing.spans is None:
            return self._padded(query, key, value)
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        if packing.context is not None:
            attended = self._shared(query, key, value, packing.context)
        elif packing.spans is not None:
            attended = self._packed(query, key, value, packing.spans)
        return attended.flatten(1)[:, None]

    def _padded(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
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

    def _shared(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: ContextShare
    ) -> torch.Tensor:
        key, value = (
            gather_from_sequence_parallel_region(tensor, group=share.group)
            for tensor in (key, value)
        )
        halves = [
            self._packed(
                query.index_select(0, half.queries),
                key.index_select(0, half.keys),
                value.index_select(0, half.keys),
                half.spans,
            )
            for half in share.halves
        ]
        return torch.cat(halves).index_select(0, share.restore)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans
    ) -> torch.Tensor:
        """[t, heads, d] of packed queries over packed keys; a sequence's last keys are its own."""
        if not query.is_cuda or query.dtype == torch.float32:
            return self._one_by_one(query, key, value, spans)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        attended = varlen_attn(
            query,
            key,
            value,
            spans.query_boundaries,
            spans.key_boundaries,
            max(spans.query_lengths),
            max(spans.key_lengths),
            scale=self._scale,
            **_CAUSAL_OPTION,
        )
        return cast("torch.Tensor", attended)

    def _one_by_one(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans
    ) -> torch.Tensor:
        parts = zip(
            torch.split(query, list(spans.query_lengths)),
            torch.split(key, list(spans.key_lengths)),
            torch.split(value, list(spans.key_lengths)),
            strict=True,
        )
        attended: list[torch.Tensor] = []
        for part in parts:
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in part)
            mask = _causal_mask(q, k)
            one = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            attended.append(one[0].transpose(0, 1))
        return torch.cat(attended)


def _causal_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Which keys each query sees when there are more keys than queries; else None."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries == num_keys:
        return None
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    return everything.tril(diagonal=num_keys - num_queries)
