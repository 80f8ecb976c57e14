"""The shape of a decoder-only transformer, read from a Hugging Face config.json."""

from collections.abc import Mapping
from typing import Any

import msgspec

from libra.config.model_arch import ModelArchConfig
from libra.errors import ConfigError


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions in Hugging Face's terms. One layer's attention has the same shape as the next."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    """The output projection is the input embedding."""

    num_experts: int = 0
    """0 for a dense model."""

    num_experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    num_dense_layers: int = 0
    """Layers of a mixture-of-experts model that have a dense MLP."""

    has_attention_bias: bool = False
    kv_latent_size: int = 0
    """Multi-head latent attention: elements cached per token and layer; 0 for ordinary K and V."""

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0


def architecture_from_config(config: Mapping[str, Any], *, source: str) -> Architecture:
    """Read the dimensions from a parsed config.json; `source` names it in errors.

    Raises ConfigError when a dimension that has no default is missing.
    """
    # Multimodal checkpoints nest the language model.
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    heads = _required(config, source, "num_attention_heads")
    hidden = _required(config, source, "hidden_size")
    experts = _first(config, 0, "num_local_experts", "num_experts", "n_routed_experts")
    expert_size = _first(config, 0, "moe_intermediate_size")
    dense_size = _first(config, expert_size, "intermediate_size")
    return Architecture(
        num_layers=_required(config, source, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=dense_size,
        num_attention_heads=heads,
        num_kv_heads=_first(config, heads, "num_key_value_heads"),
        head_dim=_first(config, hidden // heads, "head_dim"),
        vocab_size=_required(config, source, "vocab_size"),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        num_experts=experts,
        num_experts_per_token=_first(config, 0, "num_experts_per_tok") if experts else 0,
        expert_intermediate_size=(expert_size or dense_size) if experts else 0,
        shared_intermediate_size=_shared_size(config, expert_size) if experts else 0,
        num_dense_layers=_first(config, 0, "first_k_dense_replace") if experts else 0,
        has_attention_bias=_has_attention_bias(config),
        kv_latent_size=_latent_size(config),
    )


def architecture_of(arch: ModelArchConfig) -> Architecture:
    """The same shape from the configuration's `model_arch`."""
    return Architecture(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_attention_heads=arch.num_attention_heads,
        num_kv_heads=arch.num_key_value_heads,
        head_dim=arch.head_dim,
        vocab_size=arch.vocab_size,
        is_tied=arch.tied_embeddings,
        num_experts=arch.num_experts,
        num_experts_per_token=arch.num_experts_per_token,
        expert_intermediate_size=arch.moe_intermediate_size,
        has_attention_bias=arch.attention_bias,
    )


def num_parameters(arch: Architecture) -> int:
    """Weights of the whole model: embeddings, attention, MLPs, norms.

    Attention projections as in Llama and Qwen; for latent attention the K/V projections are
    approximated by ordinary ones.
    """
    embeddings = arch.vocab_size * arch.hidden_size * (1 if arch.is_tied else 2)
    num_moe = arch.num_layers - arch.num_dense_layers if arch.is_moe else 0
    num_dense = arch.num_layers - num_moe
    layers = arch.num_layers * (_attention(arch) + 2 * arch.hidden_size)
    mlps = num_dense * 3 * arch.hidden_size * arch.intermediate_size + num_moe * _experts(arch)
    return embeddings + layers + mlps + arch.hidden_size


def _attention(arch: Architecture) -> int:
    query = arch.num_attention_heads * arch.head_dim
    kv = arch.num_kv_heads * arch.head_dim
    bias = query + 2 * kv if arch.has_attention_bias else 0
    return arch.hidden_size * (2 * query + 2 * kv) + bias


def _experts(arch: Architecture) -> int:
    gate = arch.hidden_size * arch.num_experts
    size = arch.num_experts * arch.expert_intermediate_size + arch.shared_intermediate_size
    return gate + 3 * arch.hidden_size * size


def _required(config: Mapping[str, Any], source: str, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{source}: {key} is {value!r}; a positive number is needed")
    return value


def _first(config: Mapping[str, Any], default: int, *keys: str) -> int:
    values = (config.get(key) for key in keys)
    return next((int(v) for v in values if isinstance(v, int)), default)


def _shared_size(config: Mapping[str, Any], expert_size: int) -> int:
    given = _first(config, 0, "shared_expert_intermediate_size")
    return given or _first(config, 0, "n_shared_experts") * expert_size


def _has_attention_bias(config: Mapping[str, Any]) -> bool:
    # Qwen2 has biases on Q, K and V and does not say so in its config.json.
    default = str(config.get("model_type", "")).startswith("qwen2")
    return bool(config.get("attention_bias", default))


def _latent_size(config: Mapping[str, Any]) -> int:
    rank = _first(config, 0, "kv_lora_rank")
    return rank + _first(config, 0, "qk_rope_head_dim") if rank else 0
