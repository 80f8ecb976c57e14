"""How many parameters a decoder-only transformer has, whole and per training rank."""

import msgspec

from libra.config.model_arch import ModelArchConfig


class LayerParameters(msgspec.Struct, frozen=True, kw_only=True):
    """One transformer block, split by what each kind of parallelism divides."""

    sharded: int
    """Divided by tensor parallelism: projections and the dense MLP."""

    experts: int
    """Divided by expert parallelism (and tensor parallelism): all routed experts together."""

    replicated: int
    """On every rank of a tensor-parallel group: norms and the expert router."""

    @property
    def total(self) -> int:
        return self.sharded + self.experts + self.replicated


def attention_width(arch: ModelArchConfig) -> int:
    """Columns of the query projection."""
    return arch.num_attention_heads * arch.head_dim


def key_value_width(arch: ModelArchConfig) -> int:
    """Columns of the key projection; the value projection has as many."""
    return arch.num_key_value_heads * arch.head_dim


def layer_parameters(arch: ModelArchConfig) -> LayerParameters:
    """Gated MLP (three matrices), grouped-query attention, two RMS norms."""
    hidden, query, key_value = arch.hidden_size, attention_width(arch), key_value_width(arch)
    attention = hidden * (query + 2 * key_value) + query * hidden
    if arch.attention_bias:
        attention += query + 2 * key_value
    norms = 2 * hidden + (2 * arch.head_dim if arch.qk_norm else 0)
    if arch.num_experts:
        return LayerParameters(
            sharded=attention,
            experts=arch.num_experts * expert_parameters(arch),
            replicated=norms + hidden * arch.num_experts,
        )
    mlp = 3 * hidden * arch.intermediate_size
    return LayerParameters(sharded=attention + mlp, experts=0, replicated=norms)


def expert_parameters(arch: ModelArchConfig) -> int:
    """One routed expert of one block."""
    return 3 * arch.hidden_size * arch.moe_intermediate_size


def embedding_parameters(arch: ModelArchConfig) -> int:
    """The embedding matrix; an untied output head has as many again."""
    return arch.vocab_size * arch.hidden_size


def total_parameters(arch: ModelArchConfig) -> int:
    """Parameters as stored in the checkpoint."""
    num_matrices = 1 if arch.tied_embeddings else 2
    return (
        arch.num_layers * layer_parameters(arch).total
        + num_matrices * embedding_parameters(arch)
        + arch.hidden_size
    )


def active_layer_parameters(arch: ModelArchConfig) -> int:
    """Matrix parameters of one block that one token meets."""
    layer = layer_parameters(arch)
    if not arch.num_experts:
        return layer.sharded
    routed = arch.num_experts_per_token * expert_parameters(arch)
    return layer.sharded + routed + arch.hidden_size * arch.num_experts


def rank_parameters(arch: ModelArchConfig, *, tp: int, pp: int, ep: int) -> tuple[int, int]:
    """(dense, expert) parameters of the fullest training rank.

    Blocks are divided evenly over stages; the first stage also holds the embedding and the last
    the output head, so with one stage a rank holds both (once when tied).
    """
    layer, per_stage = layer_parameters(arch), -(-arch.num_layers // pp)
    matrices = 2 if pp == 1 and not arch.tied_embeddings else 1
    dense = per_stage * (layer.sharded // tp + layer.replicated)
    dense += matrices * embedding_parameters(arch) // tp + arch.hidden_size
    return dense, per_stage * layer.experts // (ep * tp)
