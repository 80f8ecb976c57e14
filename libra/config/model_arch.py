"""The model's shape: `model_arch`, a file named by `model_arch_config`, or config.json's."""

from libra.config.base import Config, Count, PositiveCount


class ModelArchConfig(Config, frozen=True, kw_only=True):
    """`model_arch`: numbers of a decoder-only transformer, under Hugging Face's meanings."""

    architecture: str
    """Class name in config.json's `architectures`."""

    num_layers: PositiveCount
    """Transformer blocks."""

    hidden_size: PositiveCount
    """Width of the residual stream."""

    num_attention_heads: PositiveCount
    """Query heads."""

    num_key_value_heads: PositiveCount
    """Key and value heads; fewer than query heads means grouped-query attention."""

    head_dim: PositiveCount
    """Width of one head; not always hidden_size / num_attention_heads."""

    intermediate_size: PositiveCount
    """Width of the gated MLP of a dense block."""

    vocab_size: PositiveCount
    """Rows of the embedding as stored, before any padding for tensor parallelism."""

    tied_embeddings: bool = False
    """The output head is the embedding matrix."""

    attention_bias: bool = False
    """Query, key and value projections have biases."""

    qk_norm: bool = False
    """Queries and keys are normalised per head."""

    num_experts: Count = 0
    """Routed experts of a mixture-of-experts block; 0 for a dense model."""

    num_experts_per_token: Count = 0
    """Experts that process one token."""

    moe_intermediate_size: Count = 0
    """Width of one expert's gated MLP."""

    max_position_embeddings: Count = 0
    """Longest context the model was made for, in tokens; 0 when unknown."""
