"""The trainer: parallelism, batch, optimizer, Megatron-Core."""

from typing import Literal

from libra.config.base import (
    Config,
    Count,
    DecayRate,
    Fraction,
    NonNegativeFloat,
    PositiveCount,
    PositiveFloat,
)


class TrainingConfig(Config, frozen=True, kw_only=True):
    """Flat keys of the core training pool."""

    train_backend: Literal["megatron_core", "fsdp"] = "megatron_core"
    """Training backend; defaults to megatron_core."""

    fsdp_gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass instead of keeping them; for
    train_backend fsdp what megatron_recompute_granularity: full is for megatron_core."""

    train_gpus: PositiveCount = 1
    """GPUs assigned to the core training pool (on CPU: ranks). The data-parallel size is
    train_gpus / (train_tp_size x train_pp_size x train_cp_size)."""

    train_tp_size: PositiveCount = 1
    """Tensor-parallel size for training; divides the attention heads."""

    train_pp_size: PositiveCount = 1
    """Pipeline-parallel size for training; divides the layers."""

    train_cp_size: PositiveCount = 1
    """Context-parallel size for Megatron-Core."""

    train_ep_size: PositiveCount = 1
    """Expert-parallel size; only for MoE models, divides the experts and the data-parallel size."""

    train_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of parameters in forward and backward; main weights and gradients are float32."""

    batch_size: PositiveCount = 32
    """Global training batch size in trajectories (samples, not prompts) per training step:
    batch_size / n_samples prompts."""

    mini_batch_size: Count = 0
    """Trajectories (samples) per optimizer step; 0 takes the whole batch. Divides batch_size."""

    micro_batch_size: PositiveCount = 1
    """Trajectories (samples) per forward and backward pass on one data-parallel rank."""

    recompute_logprobs: bool = True
    """Recompute log probabilities with the current model before the step (the proximal policy)."""

    recompute_micro_batch_size: PositiveCount = 1
    """Samples in the temporary batch used only by recompute_logprobs; defaults to 1 to bound logits
    memory."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW; 1e-6 is usual for RL post-training."""

    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Decay after warm-up, stepped once per optimizer step."""

    lr_warmup_steps: Count = 0
    """Optimizer steps of linear warm-up from 0."""

    lr_decay_steps: Count = 0
    """Optimizer steps until the minimum is reached; 0 derives it from total_steps."""

    lr_min_fraction: Fraction = 0.0
    """Learning rate at the end of the decay, as a fraction of the peak."""

    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay; none on biases and norms."""

    adam_beta1: DecayRate = 0.9
    """AdamW's decay of the first moment."""

    adam_beta2: DecayRate = 0.95
    """AdamW's decay of the second moment."""

    adam_eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""

    clip_grad: NonNegativeFloat = 1.0
    """Global gradient-norm clip; 0 turns it off."""

    max_skipped_steps: PositiveCount = 3
    """Non-finite optimizer steps in a row after which the run stops with exit code 6."""


class MegatronConfig(Config, frozen=True, kw_only=True):
    """Flat keys that only Megatron-Core reads."""

    megatron_use_precision_aware_optimizer: bool = False
    """Keep optimizer-state precision aligned with mixed precision."""

    megatron_optimizer_cpu_offload: bool = False
    """Offload optimizer state to CPU."""

    megatron_optimizer_offload_fraction: Fraction = 1.0
    """Fraction of optimizer state to offload; needs megatron_optimizer_cpu_offload. By default all
    of it, as Megatron-LM's own command line has it."""

    megatron_use_cpu_initialization: bool = True
    """Build model weights through CPU initialization."""

    megatron_grouped_gemm: bool = False
    """Enable grouped GEMM when available."""

    megatron_use_distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks."""

    megatron_sequence_parallel: bool = False
    """Sequence parallelism inside the tensor-parallel group; needs train_tp_size above 1."""

    megatron_recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass instead of kept."""
