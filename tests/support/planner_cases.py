"""Models, devices and configurations that planner tests share. Numbers are public ones."""

from typing import Any, TypedDict, Unpack

import msgspec

from libra.config.hardware import HardwareConfig
from libra.config.model_arch import ModelArchConfig
from libra.config.run import RunConfig

QWEN2_5_7B = ModelArchConfig(
    architecture="Qwen2ForCausalLM",
    num_layers=28,
    hidden_size=3584,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=18944,
    vocab_size=152064,
    attention_bias=True,
)
QWEN3_14B = ModelArchConfig(
    architecture="Qwen3ForCausalLM",
    num_layers=40,
    hidden_size=5120,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=17408,
    vocab_size=151936,
    qk_norm=True,
)
QWEN3_30B_A3B = ModelArchConfig(
    architecture="Qwen3MoeForCausalLM",
    num_layers=48,
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    vocab_size=151936,
    qk_norm=True,
    num_experts=128,
    num_experts_per_token=8,
    moe_intermediate_size=768,
)
LLAMA_3_1_8B = ModelArchConfig(
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
)
SMOLLM2_135M = ModelArchConfig(
    architecture="LlamaForCausalLM",
    num_layers=30,
    hidden_size=576,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    tied_embeddings=True,
)
MEASURED_1_8B = ModelArchConfig(
    architecture="Qwen2ForCausalLM",
    num_layers=28,
    hidden_size=1536,
    num_attention_heads=12,
    num_key_value_heads=2,
    head_dim=128,
    intermediate_size=8960,
    vocab_size=151936,
    attention_bias=True,
)
"""The shape of the H200 measurements that the cost model was set against."""

A100_80G = HardwareConfig(
    device_name="NVIDIA A100-SXM4-80GB",
    memory_bytes=80 * 2**30,
    dense_bf16_flops=312e12,
    memory_bandwidth_bytes_per_s=2.039e12,
    intra_node_bandwidth_bytes_per_s=300e9,
    inter_node_bandwidth_bytes_per_s=25e9,
    gpus_per_node=8,
    nodes=6,
)
H200_141G = HardwareConfig(
    device_name="NVIDIA H200",
    memory_bytes=141 * 10**9,
    dense_bf16_flops=989e12,
    memory_bandwidth_bytes_per_s=4.8e12,
    intra_node_bandwidth_bytes_per_s=450e9,
    inter_node_bandwidth_bytes_per_s=50e9,
)


class Sections(TypedDict, total=False):
    """Single options that a test overrides, by section."""

    training: dict[str, Any]
    megatron: dict[str, Any]
    planner: dict[str, Any]
    rollout: dict[str, Any]


def grp_config(
    *,
    num_gpus: int = 48,
    arch: ModelArchConfig = QWEN3_14B,
    hardware: HardwareConfig = A100_80G,
    batch_size: int = 512,
    max_new_tokens: int = 16384,
    **sections: Unpack[Sections],
) -> RunConfig:
    """A run that lets the planner choose."""
    given = {
        "model": {"model_path": "/models/policy"},
        "training": {
            "train_gpus": num_gpus // 2,
            "batch_size": batch_size,
            **sections.get("training", {}),
        },
        "megatron": {
            "megatron_use_distributed_optimizer": True,
            "megatron_sequence_parallel": True,
            "megatron_recompute_granularity": "full",
            **sections.get("megatron", {}),
        },
        "rollout": {
            "rollout_gpus": num_gpus - num_gpus // 2,
            "max_model_len": max_new_tokens + 2048,
            "max_new_tokens": max_new_tokens,
            "max_concurrent_rollouts": batch_size,
            **sections.get("rollout", {}),
        },
        "global_resource_planner": {
            "initial_allocation_strategy": "grp",
            "allocation_granularity_gpus": 8,
            **sections.get("planner", {}),
        },
        "hardware": msgspec.to_builtins(hardware),
        "model_arch": msgspec.to_builtins(arch),
    }
    return msgspec.convert(given, RunConfig)
