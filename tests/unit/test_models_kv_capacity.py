import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import ConfigError
from libra.models.architecture import architecture_from_config, num_parameters
from libra.models.kv_capacity import (
    GIB,
    RolloutMemory,
    kv_bytes_per_token,
    kv_capacity_tokens,
    measured_kv_capacity_tokens,
)

QWEN2_5_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
LLAMA_3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMOLLM2_135M = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (QWEN2_5_7B, 7.616),
        (LLAMA_3_8B, 8.030),
        (SMOLLM2_135M, 0.1345),
        (QWEN3_30B_A3B, 30.53),
        (MIXTRAL_8X7B, 46.70),
    ],
)
def test_parameters_match_the_published_sizes(config, billions):
    arch = architecture_from_config(config, source="config.json")
    assert num_parameters(arch) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_kv_bytes_follow_layers_heads_and_dtype():
    arch = architecture_from_config(LLAMA_3_8B, source="config.json")
    assert kv_bytes_per_token(arch, tp=1, kv_dtype_bytes=2) == 2 * 32 * 8 * 128 * 2
    assert kv_bytes_per_token(arch, tp=4, kv_dtype_bytes=1) == 2 * 32 * 2 * 128


def test_heads_are_replicated_when_the_degree_exceeds_them():
    arch = architecture_from_config(QWEN2_5_7B, source="config.json")
    at_four = kv_bytes_per_token(arch, tp=4, kv_dtype_bytes=2)
    assert kv_bytes_per_token(arch, tp=8, kv_dtype_bytes=2) == at_four
    assert kv_bytes_per_token(arch, tp=2, kv_dtype_bytes=2) == 2 * at_four


def test_latent_attention_keeps_one_vector_whatever_the_degree():
    config = {**LLAMA_3_8B, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    arch = architecture_from_config(config, source="config.json")
    assert kv_bytes_per_token(arch, tp=8, kv_dtype_bytes=2) == 32 * 576 * 2


def test_capacity_is_what_weights_and_reserve_leave_of_the_usable_share():
    arch = architecture_from_config(LLAMA_3_8B, source="config.json")
    memory = RolloutMemory(
        device_bytes=80 * GIB, utilization_fraction=0.9, activation_reserve_bytes=4 * GIB
    )
    left = int(80 * GIB * 0.9) - num_parameters(arch) * 2 - 4 * GIB
    assert kv_capacity_tokens(arch, memory, tp=1) == left // (2 * 32 * 8 * 128 * 2)


def test_a_model_that_leaves_no_room_has_no_capacity():
    arch = architecture_from_config(MIXTRAL_8X7B, source="config.json")
    memory = RolloutMemory(
        device_bytes=80 * GIB, utilization_fraction=0.9, activation_reserve_bytes=4 * GIB
    )
    assert kv_capacity_tokens(arch, memory, tp=1) == 0
    assert kv_capacity_tokens(arch, memory, tp=2) > 0


def test_a_configured_cache_size_is_taken_as_it_is():
    arch = architecture_from_config(SMOLLM2_135M, source="config.json")
    memory = RolloutMemory(
        device_bytes=1,
        utilization_fraction=0.9,
        activation_reserve_bytes=0,
        kv_cache_bytes=64 * 2**20,
    )
    per_token = 2 * 30 * 3 * 64 * 2
    assert kv_capacity_tokens(arch, memory, tp=1) == 64 * 2**20 // per_token


@given(tp=st.sampled_from([1, 2, 4, 8, 16]), more=st.integers(0, 64))
def test_more_memory_never_holds_fewer_tokens(tp, more):
    arch = architecture_from_config(LLAMA_3_8B, source="config.json")

    def capacity(device_gib):
        memory = RolloutMemory(
            device_bytes=device_gib * GIB,
            utilization_fraction=0.9,
            activation_reserve_bytes=4 * GIB,
        )
        return kv_capacity_tokens(arch, memory, tp=tp)

    assert capacity(16 + more) >= capacity(16)


def test_a_servers_own_tokens_win_over_its_blocks():
    assert (
        measured_kv_capacity_tokens(kv_cache_size_tokens=1536, num_gpu_blocks=9, block_size=32)
        == 1536
    )
    assert (
        measured_kv_capacity_tokens(kv_cache_size_tokens=None, num_gpu_blocks=48, block_size=32)
        == 1536
    )
    assert (
        measured_kv_capacity_tokens(kv_cache_size_tokens=None, num_gpu_blocks=48, block_size=None)
        is None
    )


def test_a_config_without_layers_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"m/config.json: num_hidden_layers is None"):
        architecture_from_config(
            {"num_attention_heads": 1, "hidden_size": 8}, source="m/config.json"
        )


def test_a_nested_language_model_is_found():
    arch = architecture_from_config({"text_config": LLAMA_3_8B}, source="config.json")
    assert arch.num_layers == 32
