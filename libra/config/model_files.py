"""A Hugging Face config.json to ModelArchConfig."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from libra.config.model_arch import ModelArchConfig
from libra.errors import DataError

QKV_BIAS_ARCHITECTURES = frozenset({"Qwen2ForCausalLM"})
"""Always have biases on query, key and value, whatever config.json says."""

QK_NORM_ARCHITECTURES = frozenset({"Qwen3ForCausalLM", "Qwen3MoeForCausalLM"})
QWEN3_HEAD_DIM = 128
"""What transformers' Qwen3 classes take when config.json does not say."""


def model_arch_of(text: str) -> ModelArchConfig:
    """Shape said by the text of a config.json.

    Raises DataError naming the key that is missing or makes no sense.
    """
    said = _parse(text)
    architectures = said.get("architectures")
    if not (
        isinstance(architectures, list) and architectures and isinstance(architectures[0], str)
    ):
        raise DataError("no `architectures` list with a class name in it")
    architecture = architectures[0]
    heads = _count(said, "num_attention_heads")
    hidden = _count(said, "hidden_size")
    qk_norm = architecture in QK_NORM_ARCHITECTURES
    bias = architecture in QKV_BIAS_ARCHITECTURES or bool(said.get("attention_bias"))
    values = {
        "architecture": architecture,
        "num_layers": _count(said, "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": _count(said, "num_key_value_heads", default=heads),
        "head_dim": _count(
            said, "head_dim", default=QWEN3_HEAD_DIM if qk_norm else hidden // heads
        ),
        "intermediate_size": _count(said, "intermediate_size"),
        "vocab_size": _count(said, "vocab_size"),
        "tied_embeddings": bool(said.get("tie_word_embeddings")),
        "attention_bias": bias,
        "qk_norm": qk_norm,
        "num_experts": _count(said, "num_experts", default=0),
        "num_experts_per_token": _count(said, "num_experts_per_tok", default=0),
        "moe_intermediate_size": _count(said, "moe_intermediate_size", default=0),
        "max_position_embeddings": _count(said, "max_position_embeddings", default=0),
    }
    try:
        return msgspec.convert(values, ModelArchConfig)
    except msgspec.ValidationError as exc:
        raise DataError(f"makes no sense: {exc}") from exc


def _parse(text: str) -> Mapping[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise DataError(f"not JSON: {exc}") from exc
    if not isinstance(said, dict):
        raise DataError("not a JSON object")
    return said


def _count(said: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = said.get(key)
    if value is None:
        value = default
    least = 0 if default == 0 else 1
    if type(value) is not int or value < least:
        raise DataError(f"`{key}` is {value!r}, not a whole number from {least}")
    return value
