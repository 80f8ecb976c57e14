"""Tiny real models in Hugging Face format, made from a seed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 250,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "torch_dtype": "float32",
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen2_tied": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
    },
    "llama_tied": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2_yarn": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 32,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def make_tiny_model(directory: Path, kind: str, *, seed: int = 7, **changes: Any) -> Path:
    """Write config.json and model.safetensors (float32, normal weights) of a kind above."""
    config = BASE | (KINDS | WITH_EXPERTS)[kind] | changes
    directory.mkdir(parents=True)
    (directory / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    (directory / "generation_config.json").write_text('{"do_sample": true}')
    (directory / "tokenizer_config.json").write_text("{}")
    save_file(_weights(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_other_architectures(directory: Path) -> None:
    """Write tiny models that Megatron-Core's mapping does not know.

    `olmo2` is a plain decoder of another make; `granite` scales its logits.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - seconds to import

    sizes = {name: BASE[name] for name in ("hidden_size", "intermediate_size", "vocab_size")}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    for kind, options in {"olmo2": {}, "granite": {"logits_scaling": 4.0}}.items():
        torch.manual_seed(3)
        config = AutoConfig.for_model(kind, **sizes, **options, pad_token_id=None)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / kind)


def _weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.08

    hidden = config["hidden_size"]
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        weights |= _attention(config, layer, normal)
        weights |= _feed_forward(config, layer, normal)
        weights[f"{layer}input_layernorm.weight"] = 1 + normal(hidden)
        weights[f"{layer}post_attention_layernorm.weight"] = 1 + normal(hidden)
    weights["model.norm.weight"] = 1 + normal(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden)
    return weights


def _attention(
    config: dict[str, Any], layer: str, normal: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // num_heads)
    num_keys = config["num_key_value_heads"] * head_dim
    weights = {}
    for letter, rows in (("q", num_heads * head_dim), ("k", num_keys), ("v", num_keys)):
        weights[f"{layer}self_attn.{letter}_proj.weight"] = normal(rows, hidden)
        if config["model_type"] == "qwen2":
            weights[f"{layer}self_attn.{letter}_proj.bias"] = normal(rows)
    if config["model_type"].startswith("qwen3"):
        weights[f"{layer}self_attn.q_norm.weight"] = 1 + normal(head_dim)
        weights[f"{layer}self_attn.k_norm.weight"] = 1 + normal(head_dim)
    weights[f"{layer}self_attn.o_proj.weight"] = normal(hidden, num_heads * head_dim)
    return weights


def _feed_forward(
    config: dict[str, Any], layer: str, normal: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    weights, parts = {}, [f"{layer}mlp."]
    if "num_experts" in config:
        ffn = config["moe_intermediate_size"]
        weights[f"{layer}mlp.gate.weight"] = 5 * normal(config["num_experts"], hidden)
        parts = [f"{layer}mlp.experts.{index}." for index in range(config["num_experts"])]
    for part in parts:
        weights[f"{part}gate_proj.weight"] = normal(ffn, hidden)
        weights[f"{part}up_proj.weight"] = normal(ffn, hidden)
        weights[f"{part}down_proj.weight"] = normal(hidden, ffn)
    return weights
