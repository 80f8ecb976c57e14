"""The shape of a decoder model, read from Hugging Face's config.json.

Only what Libra's Megatron model computes exactly is accepted; anything else is refused by name,
because a model that is nearly right trains silently against its own engine.
"""

from math import log
from pathlib import Path
from typing import Any, Literal

import msgspec

from libra.errors import DataError
from libra.storage.digest import hash_bytes

SUPPORTED_MODEL_TYPES = ("qwen2", "llama", "qwen3", "qwen3_moe")


class Yarn(msgspec.Struct, frozen=True, kw_only=True):
    """What YaRN (arXiv 2309.00071) needs beyond a factor and the original length."""

    attention_factor: float
    """That queries and keys are multiplied by."""

    beta_fast: float = 32.0
    """Turns over the original length from which on a wave is kept."""

    beta_slow: float = 1.0
    """Turns up to which a wave is slowed by the whole factor."""

    truncates: bool = True
    """Whether the bounds between the two are whole dimensions."""


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding. `factor` is read by all kinds but `default`, the next two by `llama3`."""

    kind: Literal["default", "linear", "llama3", "yarn"]
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    """Read by `llama3` and `yarn`."""

    yarn: Yarn | None = None

    @property
    def attention_factor(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return 1.0 if self.yarn is None else self.yarn.attention_factor


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Every layer's feed-forward part as a mixture of experts."""

    num_experts: int
    num_per_token: int
    has_normalized_weights: bool
    """Whether the chosen experts' weights are made to sum to 1."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    """Of one expert, where there are experts."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    rope: Rope
    experts: Experts | None

    @property
    def hash(self) -> str:
        """Equal for two models whose checkpoints can be exchanged."""
        content = msgspec.to_builtins(self)
        if self.rope.yarn is None:
            # Hashes that are in checkpoints already were made before there was this field.
            del content["rope"]["yarn"]
        return hash_bytes(msgspec.json.encode(content))


class _HfConfig(msgspec.Struct, kw_only=True):
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    use_sliding_window: bool = False
    partial_rotary_factor: float | None = None
    quantization_config: Any = None
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = []

    @property
    def has_experts(self) -> bool:
        return self.model_type == "qwen3_moe"


def read_architecture(model_path: Path) -> Architecture:
    """Read the shape of a model directory. Raises DataError naming what is missing or odd."""
    path = model_path / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_HfConfig)
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; model_path must name a model directory in Hugging Face "
            "format"
        ) from error
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: {error}") from error
    if problems := _problems(config):
        raise DataError(f"{path}: " + "; ".join(problems))
    return Architecture(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_size=config.moe_intermediate_size if config.has_experts else config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        has_tied_embeddings=config.tie_word_embeddings,
        has_qkv_bias=config.model_type == "qwen2",
        has_qk_norm=config.model_type in {"qwen3", "qwen3_moe"},
        rope=_rope(path, config),
        experts=_experts(config),
    )


def _experts(config: _HfConfig) -> Experts | None:
    if not config.has_experts:
        return None
    return Experts(
        num_experts=config.num_experts,
        num_per_token=config.num_experts_per_tok,
        has_normalized_weights=config.norm_topk_prob,
    )


def _problems(config: _HfConfig) -> list[str]:
    checks = {
        f"model_type {config.model_type} is not one of {', '.join(SUPPORTED_MODEL_TYPES)}": (
            config.model_type not in SUPPORTED_MODEL_TYPES
        ),
        f"hidden_act {config.hidden_act} is not supported, only silu": config.hidden_act != "silu",
        "attention_bias (a bias on the output projection) is not supported": config.attention_bias,
        "mlp_bias is not supported": config.mlp_bias,
        "use_sliding_window is not supported": config.use_sliding_window,
        "partial_rotary_factor is not supported": config.partial_rotary_factor not in {None, 1.0},
        "quantized weights cannot be trained": config.quantization_config is not None,
        "layers without experts among layers with experts are not supported": config.has_experts
        and (config.decoder_sparse_step != 1 or bool(config.mlp_only_layers)),
        "num_experts, num_experts_per_tok and moe_intermediate_size must be above 0": (
            config.has_experts
            and min(config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
            < 1
        ),
    }
    return [message for message, applies in checks.items() if applies]


def _rope(path: Path, config: _HfConfig) -> Rope:
    # transformers 5 writes rope_parameters with the theta inside, older ones two separate keys.
    given = config.rope_parameters or config.rope_scaling or {}
    theta = float(given.get("rope_theta", config.rope_theta))
    kind = given.get("rope_type", given.get("type", "default"))
    keys = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    }
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": tuple(keys),
        "yarn": ("factor", "original_max_position_embeddings"),
    }
    names = needed.get(kind)
    if names is None:
        raise DataError(f"{path}: rope type {kind} is not supported, only {', '.join(needed)}")
    if missing := [name for name in names if name not in given]:
        raise DataError(f"{path}: rope type {kind} needs {', '.join(missing)}")
    values = {keys[name]: given[name] for name in names}
    if kind == "yarn":
        values["yarn"] = _yarn(given)
    return msgspec.convert({"kind": kind, "theta": theta} | values, Rope)


def _yarn(given: dict[str, Any]) -> dict[str, Any]:
    """As transformers fills in what config.json leaves out."""
    return {
        "attention_factor": given.get("attention_factor") or _attention_factor(given),
        "beta_fast": given.get("beta_fast") or 32.0,
        "beta_slow": given.get("beta_slow") or 1.0,
        "truncates": given.get("truncate", True),
    }


def _attention_factor(given: dict[str, Any]) -> float:
    def scale(weight: float) -> float:
        factor = float(given["factor"])
        return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0

    above, below = given.get("mscale"), given.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)
