"""Which Hugging Face tensors make which Megatron parameter, and how both are cut.

A rule joins whole tensors of the checkpoint into one whole Megatron parameter, which is then cut
over tensor parallelism; the inverse goes back, name for name.
"""

import re
from collections.abc import Sequence
from functools import partial
from math import lcm
from typing import Literal, assert_never

import msgspec
import torch

from libra.trainer.architecture import Architecture
from libra.trainer.backend import HfTensor

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this whatever the layout, so that a checkpoint fits
another tensor-parallel size."""

Kind = Literal["replicated", "rows", "columns", "qkv", "gate_up", "vocabulary"]
"""How a whole parameter is cut: not at all; along dimension 0; along dimension 1; along 0 with
query, key and value interleaved by group; along 0 in two halves; along 0 after padding."""


_ENGINE_NAMES = {
    r"self_attention\.linear_qkv\.layer_norm_weight$": "input_layernorm.weight",
    r"mlp\.linear_fc1\.layer_norm_weight$": "pre_mlp_layernorm.weight",
    r"experts\.(linear_fc[12])\.weight(\d+)$": r"experts.local_experts.\2.\1.weight",
}
"""What Transformer Engine's layers call their parameters: norms belong to the layer behind them,
experts lie in one module."""


class Rule(msgspec.Struct, frozen=True):
    """One Megatron parameter, named as on a rank that holds all layers and all experts."""

    parameter: str
    kind: Kind
    sources: tuple[HfTensor, ...]
    expert: int | None = None
    """Index of the expert it belongs to; None for what every rank of a stage has."""


def padded_vocab_size(architecture: Architecture, tensor_size: int) -> int:
    """Rows of the embedding in Megatron; rows past the vocabulary are zero and never scored."""
    multiple = lcm(VOCAB_MULTIPLE, tensor_size)
    return -(-architecture.vocab_size // multiple) * multiple


def embedding_rule(architecture: Architecture) -> Rule:
    shape = (architecture.vocab_size, architecture.hidden_size)
    source = HfTensor("model.embed_tokens.weight", shape)
    return Rule("embedding.word_embeddings.weight", "vocabulary", (source,))


def output_rule(architecture: Architecture) -> Rule:
    """Return the head's rule; with tied embeddings it is made of the embedding's tensor."""
    shape = (architecture.vocab_size, architecture.hidden_size)
    name = "model.embed_tokens.weight" if architecture.has_tied_embeddings else "lm_head.weight"
    return Rule("output_layer.weight", "vocabulary", (HfTensor(name, shape),))


def final_norm_rule(architecture: Architecture) -> Rule:
    source = HfTensor("model.norm.weight", (architecture.hidden_size,))
    return Rule("decoder.final_layernorm.weight", "replicated", (source,))


def layer_rules(architecture: Architecture, layer: int) -> list[Rule]:
    """Return the rules of the layer with index `layer`, counted from 0 over the whole model."""
    return [*_attention_rules(architecture, layer), *_feed_forward_rules(architecture, layer)]


def _layer_rule(
    layer: int, parameter: str, kind: Kind, *sources: tuple[str, tuple[int, ...]]
) -> Rule:
    return Rule(
        f"decoder.layers.{layer}.{parameter}",
        kind,
        tuple(HfTensor(f"model.layers.{layer}.{name}", shape) for name, shape in sources),
    )


def _attention_rules(architecture: Architecture, layer: int) -> list[Rule]:
    hidden = architecture.hidden_size
    rule = partial(_layer_rule, layer)
    queries = architecture.num_heads * architecture.head_dim
    keys = architecture.num_kv_heads * architecture.head_dim

    qkv = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    rules = [
        rule("input_layernorm.weight", "replicated", ("input_layernorm.weight", (hidden,))),
        rule(
            "self_attention.linear_qkv.weight",
            "qkv",
            *((f"self_attn.{name}.weight", (rows, hidden)) for name, rows in qkv),
        ),
        rule(
            "self_attention.linear_proj.weight",
            "columns",
            ("self_attn.o_proj.weight", (hidden, queries)),
        ),
        rule(
            "pre_mlp_layernorm.weight",
            "replicated",
            ("post_attention_layernorm.weight", (hidden,)),
        ),
    ]
    if architecture.has_qkv_bias:
        biases = ((f"self_attn.{name}.bias", (rows,)) for name, rows in qkv)
        rules.append(rule("self_attention.linear_qkv.bias", "qkv", *biases))
    if architecture.has_qk_norm:
        for letter in "qk":
            source = (f"self_attn.{letter}_norm.weight", (architecture.head_dim,))
            rules.append(rule(f"self_attention.{letter}_layernorm.weight", "replicated", source))
    return rules


def _feed_forward_rules(architecture: Architecture, layer: int) -> list[Rule]:
    if architecture.experts is None:
        return _swiglu_rules(architecture, layer, "mlp", "mlp")
    num_experts = architecture.experts.num_experts
    router = ("mlp.gate.weight", (num_experts, architecture.hidden_size))
    rules = [_layer_rule(layer, "mlp.router.weight", "replicated", router)]
    for expert in range(num_experts):
        of_expert = _swiglu_rules(
            architecture,
            layer,
            f"mlp.experts.local_experts.{expert}",
            f"mlp.experts.{expert}",
        )
        rules += [msgspec.structs.replace(rule, expert=expert) for rule in of_expert]
    return rules


def _swiglu_rules(
    architecture: Architecture, layer: int, parameter_prefix: str, source_prefix: str
) -> list[Rule]:
    hidden, ffn = architecture.hidden_size, architecture.ffn_size
    return [
        _layer_rule(
            layer,
            f"{parameter_prefix}.linear_fc1.weight",
            "gate_up",
            (f"{source_prefix}.gate_proj.weight", (ffn, hidden)),
            (f"{source_prefix}.up_proj.weight", (ffn, hidden)),
        ),
        _layer_rule(
            layer,
            f"{parameter_prefix}.linear_fc2.weight",
            "columns",
            (f"{source_prefix}.down_proj.weight", (hidden, ffn)),
        ),
    ]


def model_rules(architecture: Architecture) -> list[Rule]:
    """Every parameter of the model once, in the order in which it is exported."""
    rules = [embedding_rule(architecture)]
    for layer in range(architecture.num_layers):
        rules += layer_rules(architecture, layer)
    rules.append(final_norm_rule(architecture))
    if not architecture.has_tied_embeddings:
        rules.append(output_rule(architecture))
    return rules


def name_in_rules(name: str, *, layers: Sequence[int], first_expert: int) -> str:
    """Name one of a rank's parameters as its `Rule` does.

    `layers`: the index in the whole model of each layer on this rank; `first_expert`: that of this
    rank's first expert. Whether the layers are Megatron's or Transformer Engine's makes no
    difference.
    """
    for pattern, ours in _ENGINE_NAMES.items():
        name = re.sub(pattern, ours, name)

    def renumbered(match: re.Match[str]) -> str:
        if match["kind"] == "local_experts":
            return f"local_experts.{int(match['index']) + first_expert}."
        return f"decoder.layers.{layers[int(match['index'])]}."

    return re.sub(r"(?P<kind>decoder\.layers|local_experts)\.(?P<index>\d+)\.", renumbered, name)


def join(
    rule: Rule, sources: Sequence[torch.Tensor], architecture: Architecture, tensor_size: int
) -> torch.Tensor:
    """Whole checkpoint tensors -> the whole Megatron parameter."""
    match rule.kind:
        case "replicated" | "rows" | "columns":
            return sources[0]
        case "gate_up":
            return torch.cat(list(sources))
        case "vocabulary":
            missing = padded_vocab_size(architecture, tensor_size) - architecture.vocab_size
            padding = sources[0].new_zeros(missing, architecture.hidden_size)
            return torch.cat([sources[0], padding])
        case "qkv":
            groups = architecture.num_kv_heads
            by_group = [source.reshape(groups, -1, *source.shape[1:]) for source in sources]
            return torch.cat(by_group, dim=1).flatten(0, 1)
        case _:
            assert_never(rule.kind)


def separate(rule: Rule, parameter: torch.Tensor, architecture: Architecture) -> list[torch.Tensor]:
    """Take a whole Megatron parameter apart into checkpoint tensors, in the sources' order."""
    match rule.kind:
        case "replicated" | "rows" | "columns":
            return [parameter]
        case "gate_up":
            return list(parameter.chunk(2))
        case "vocabulary":
            return [parameter[: architecture.vocab_size]]
        case "qkv":
            groups = architecture.num_kv_heads
            rows = [source.shape[0] // groups for source in rule.sources]
            by_group = torch.split(parameter.reshape(groups, -1, *parameter.shape[1:]), rows, dim=1)
            return [part.flatten(0, 1) for part in by_group]
        case _:
            assert_never(rule.kind)


def cut(rule: Rule, parameter: torch.Tensor, *, size: int, index: int) -> torch.Tensor:
    """Cut out the slice of a whole parameter that tensor-parallel rank `index` of `size` holds."""
    match rule.kind:
        case "replicated":
            return parameter
        case "columns":
            return parameter.chunk(size, 1)[index]
        case "rows" | "qkv" | "vocabulary":
            return parameter.chunk(size)[index]
        case "gate_up":
            return torch.cat([half.chunk(size)[index] for half in parameter.chunk(2)])
        case _:
            assert_never(rule.kind)


def mend(rule: Rule, slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Slices of all tensor-parallel ranks, in order -> the whole parameter."""
    match rule.kind:
        case "replicated":
            return slices[0]
        case "columns":
            return torch.cat(list(slices), dim=1)
        case "rows" | "qkv" | "vocabulary":
            return torch.cat(list(slices))
        case "gate_up":
            halves = zip(*(part.chunk(2) for part in slices), strict=True)
            return torch.cat([part for half in halves for part in half])
        case _:
            assert_never(rule.kind)
