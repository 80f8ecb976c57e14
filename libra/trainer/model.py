"""Megatron's model for an architecture, of Transformer Engine's layers or Megatron's and ours."""

import logging
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu

from libra.config.run import RunConfig
from libra.trainer.architecture import Architecture
from libra.trainer.capabilities import uses_transformer_engine
from libra.trainer.layers import RmsNorm, Rotary, SdpaAttention
from libra.trainer.rope import inverse_frequencies
from libra.trainer.tensor_map import padded_vocab_size
from libra.trainer.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

logging.getLogger("megatron").setLevel(logging.ERROR)


def torch_dtype(name: str) -> torch.dtype:
    """`float32` or `bfloat16` as torch's own value."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def seed_everything(seed: int, step: int) -> None:
    """Make all chance of one training step a function of the run's seed and the step.

    So a resumed step draws what it drew before, on any layout, without stored generator states.
    """
    mixed = (seed * 1_000_003 + step) % 2**31
    torch.manual_seed(mixed)
    model_parallel_cuda_manual_seed(mixed, force_reset_rng=True)


def transformer_config(
    config: RunConfig, architecture: Architecture, world: World
) -> TransformerConfig:
    """Megatron's settings; everything that needs apex is off."""
    has_engine = uses_transformer_engine(config, is_cuda=world.device.type == "cuda")
    wants_grouped_gemm = config.megatron.megatron_grouped_gemm
    dtype = torch_dtype(config.training.train_dtype)
    sizes = world.sizes
    recompute: dict[str, Any] = {}
    if config.megatron.megatron_recompute_granularity != "none":
        recompute["recompute_granularity"] = config.megatron.megatron_recompute_granularity
    if config.megatron.megatron_recompute_granularity == "full":
        recompute |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        softmax_scale=_softmax_scale(architecture),
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.has_qkv_bias,
        qk_layernorm=architecture.has_qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        sequence_parallel=config.megatron.megatron_sequence_parallel and sizes.tensor > 1,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        # Micro-batches are padded to their own longest row, so stages tell each other the shape.
        variable_seq_lengths=sizes.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - the only one for variable lengths
        # The loss is already divided by the global counts: gradients are summed, never averaged.
        calculate_per_token_loss=True,
        use_cpu_initialization=(
            world.device.type == "cpu" or config.megatron.megatron_use_cpu_initialization
        ),
        perform_initialization=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        # One compiled kernel for SwiGLU; on the CPU there is no compiler to count on.
        bias_activation_fusion=world.device.type == "cuda",
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        batch_p2p_comm=False,
        **recompute,
        **_expert_settings(architecture, has_grouped_gemm=has_engine and wants_grouped_gemm),
    )


def _softmax_scale(architecture: Architecture) -> float | None:
    """None: one over the root of the head's size."""
    factor = architecture.rope.attention_factor
    # Queries and keys are multiplied by it: their products get it twice.
    return None if factor == 1.0 else factor**2 / sqrt(architecture.head_dim)


def _expert_settings(architecture: Architecture, *, has_grouped_gemm: bool) -> dict[str, Any]:
    if architecture.experts is None:
        return {}
    return {
        "num_moe_experts": architecture.experts.num_experts,
        "moe_router_topk": architecture.experts.num_per_token,
        "moe_ffn_hidden_size": architecture.ffn_size,
        # The softmax before the choice leaves the weights of the chosen as they are; after it,
        # they sum to 1, which is what dividing them by their sum comes to.
        "moe_router_pre_softmax": not architecture.experts.has_normalized_weights,
        # Policy gradients are the only loss: no term pulls the router towards balance.
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_permute_fusion": False,
        "moe_grouped_gemm": has_grouped_gemm,
    }


def build_model(config: RunConfig, architecture: Architecture, world: World) -> Any:
    """Build this rank's part of the model in `train_dtype` on its device, weights not set."""
    settings = transformer_config(config, architecture, world)
    layer = _local_layer(settings)
    if uses_transformer_engine(config, is_cuda=world.device.type == "cuda"):
        layer = _engine_layer(settings)
    layers_here = architecture.num_layers // world.sizes.pipeline
    model = GPTModel(
        config=settings,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer] * layers_here, layer_norm=RmsNorm
        ),
        vocab_size=padded_vocab_size(architecture, world.sizes.tensor),
        max_sequence_length=architecture.max_positions,
        pre_process=world.is_first_stage,
        post_process=world.is_last_stage,
        share_embeddings_and_output_weights=architecture.has_tied_embeddings,
        position_embedding_type="rope",
    )
    model.rotary_pos_emb = Rotary(inverse_frequencies(architecture).to(world.device))
    model.to(world.device)
    if settings.bf16:
        model = Float16Module(settings, model)
    return model


def _local_layer(settings: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=settings.num_moe_experts,
        qk_layernorm=settings.qk_layernorm,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = RmsNorm
    layer.submodules.pre_mlp_layernorm = RmsNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SdpaAttention
    if settings.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return layer


def _engine_layer(settings: TransformerConfig) -> ModuleSpec:
    """Transformer Engine's linear layers, with the norms before them inside, and its experts.

    Attention stays torch's, which knows packed sequences and shares them over context parallelism.
    """
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=settings.num_moe_experts,
        moe_grouped_gemm=settings.moe_grouped_gemm,
        qk_layernorm=settings.qk_layernorm,
    )
    layer.submodules.self_attention.submodules.core_attention = SdpaAttention
    # Checkpoints name norms alike, whichever layers wrote them.
    layer.submodules.sharded_state_dict_keys_map = _local_layer(
        settings
    ).submodules.sharded_state_dict_keys_map
    return layer


def bare(model: Any) -> Any:
    """Find the GPTModel under the wrappers for precision and gradients."""
    while not isinstance(model, GPTModel):
        model = model.module
    return model


class GradientSeam:
    """Where a rank's own gradient sums are about to be reduced over the world."""

    def __init__(self) -> None:
        self.before: Callable[[], bool] | None = None
        """Called then; when it returns False, nothing is reduced."""

    def finalize(self, model: list[Any], _num_tokens: Any, **options: Any) -> None:
        if self.before is None or self.before():
            # Megatron would divide by the number of tokens it counted; the loss has it in already.
            finalize_model_grads(model, None, **options)


def with_gradients(model: torch.nn.Module, config: RunConfig, seam: GradientSeam) -> Any:
    """Wrap `model` for training: gradients are summed in float32 over data parallelism."""
    settings = bare(model).config
    wrapped = DistributedDataParallel(
        settings,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            # Without overlap there is one bucket, and parameters are never stale after a step.
            # More buckets than one can silently corrupt a resharded distributed optimizer.
            overlap_grad_reduce=False,
            use_distributed_optimizer=config.megatron.megatron_use_distributed_optimizer,
        ),
        model,
    )
    settings.finalize_model_grads_func = seam.finalize
    return wrapped
