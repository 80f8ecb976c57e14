import pytest

from libra.models.architecture import architecture_of, num_parameters
from libra.models.flops import forward_flops, head_token_flops, layer_token_flops
from libra.models.kv_capacity import kv_bytes_per_token
from libra.models.parameters import layer_parameters, rank_parameters, total_parameters
from planner_cases import (
    LLAMA_3_1_8B,
    MEASURED_1_8B,
    QWEN2_5_7B,
    QWEN3_14B,
    QWEN3_30B_A3B,
    SMOLLM2_135M,
)


@pytest.mark.parametrize(
    ("arch", "published"),
    [
        (QWEN2_5_7B, 7_615_616_512),
        (QWEN3_14B, 14_768_307_200),
        (QWEN3_30B_A3B, 30_532_122_624),
        (LLAMA_3_1_8B, 8_030_261_248),
        (SMOLLM2_135M, 134_515_008),
    ],
)
def test_parameter_counts_are_those_of_the_published_checkpoints(arch, published):
    assert total_parameters(arch) == published


@pytest.mark.parametrize("arch", [QWEN2_5_7B, QWEN3_14B, QWEN3_30B_A3B, SMOLLM2_135M])
def test_one_rank_without_parallelism_holds_every_parameter(arch):
    assert sum(rank_parameters(arch, tp=1, pp=1, ep=1)) == total_parameters(arch)


def test_expert_parallelism_divides_experts_and_nothing_else():
    dense, experts = rank_parameters(QWEN3_30B_A3B, tp=1, pp=1, ep=1)
    assert rank_parameters(QWEN3_30B_A3B, tp=1, pp=1, ep=8) == (dense, experts // 8)


def test_tensor_parallelism_leaves_norms_whole_on_every_rank():
    whole = rank_parameters(QWEN3_14B, tp=1, pp=1, ep=1)[0]
    quarter = rank_parameters(QWEN3_14B, tp=4, pp=1, ep=1)[0]
    replicated = QWEN3_14B.num_layers * layer_parameters(QWEN3_14B).replicated + 5120
    assert quarter == (whole - replicated) // 4 + replicated


def test_a_larger_model_takes_more_operations_per_token():
    assert forward_flops(QWEN3_14B, 4096) > 7 * forward_flops(MEASURED_1_8B, 4096)


def test_doubling_a_sequence_more_than_doubles_its_operations():
    short, long = forward_flops(QWEN3_14B, 8192), forward_flops(QWEN3_14B, 16384)
    assert long > 2 * short
    per_token = 40 * layer_token_flops(QWEN3_14B) + head_token_flops(QWEN3_14B)
    assert long - 2 * short == 2 * 8192**2 * 40 * 2 * 5120
    assert short == 8192 * per_token + 8192**2 * 40 * 2 * 5120


def test_a_token_of_a_mixture_meets_only_its_own_experts():
    routed = 8 * 3 * 2048 * 768
    attention = 2048 * (4096 + 2 * 512) + 4096 * 2048
    assert layer_token_flops(QWEN3_30B_A3B) == 2 * (attention + routed + 2048 * 128)


def test_cache_per_gpu_stops_shrinking_when_ranks_outnumber_key_value_heads():
    arch = architecture_of(QWEN3_14B)
    per_gpu = [kv_bytes_per_token(arch, tp=tp, kv_dtype_bytes=2) for tp in (1, 2, 4, 8, 16)]
    assert per_gpu == [163_840, 81_920, 40_960, 20_480, 20_480]


@pytest.mark.parametrize("arch", [QWEN2_5_7B, QWEN3_14B, QWEN3_30B_A3B, LLAMA_3_1_8B, SMOLLM2_135M])
def test_the_engine_side_counts_the_same_model(arch):
    assert num_parameters(architecture_of(arch)) == pytest.approx(total_parameters(arch), rel=1e-5)
