import pytest

from config_files import ARCH, MOE, broken_rules, config_from, only_problem
from libra.config.model_arch import ModelArchConfig


def test_ranks_divide_into_whole_replicas():
    problem = only_problem(train_gpus="6", train_tp_size="2", train_pp_size="2")
    assert problem.path == "train_gpus"
    assert problem.hint == "nearest: 4 or 8"


def test_expert_parallel_divides_experts_and_data_parallel_size():
    assert "no experts" in only_problem(ARCH, train_gpus="2", train_ep_size="2").what
    assert not broken_rules(MOE, train_gpus="2", train_ep_size="2")
    assert "the experts, 6" in only_problem(MOE, train_gpus="4", train_ep_size="4").what
    assert "data-parallel size, 4" in only_problem(MOE, train_gpus="4", train_ep_size="3").what


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train_gpus": "8", "train_tp_size": "8"}, "8 does not divide the attention heads, 12"),
        ({"train_gpus": "6", "train_tp_size": "6"}, "6 neither divides nor is a multiple"),
        ({"train_gpus": "4", "train_pp_size": "4"}, "4 does not divide the layers, 6"),
    ],
)
def test_training_degrees_fit_the_model(options: dict[str, str], said: str):
    assert said in only_problem(ARCH, **options).what


def test_key_value_heads_are_replicated_evenly():
    assert not broken_rules(ARCH, train_gpus="12", train_tp_size="12", batch_size="8")
    assert "MLP" in only_problem(ARCH.replace("768", "770"), train_gpus="4", train_tp_size="4").what


def test_every_rollout_degree_fits_the_model():
    text = (
        f"{ARCH}\nheterogeneous_rollout: {{instances: [{{tp: 4, count: 1}}, {{tp: 5, count: 1}}]}}"
    )
    found = broken_rules(text, rollout_gpus="9")
    assert set(found) == {"heterogeneous_rollout.instances[1].tp"}
    three = ARCH.replace("num_key_value_heads: 4", "num_key_value_heads: 3")
    text = f"{three}\nheterogeneous_rollout: {{instances: [{{tp: 3, count: 1}}]}}"
    assert "vLLM's padded vocabulary, 512" in only_problem(text, rollout_gpus="3").what


def test_sequence_parallel_needs_a_group():
    assert only_problem(megatron_sequence_parallel="true").related == ("train_tp_size",)


def test_a_tensor_parallel_moe_splits_its_sequence_too():
    options = {"train_gpus": "2", "train_tp_size": "2"}
    assert only_problem(MOE, **options).path == "megatron_sequence_parallel"
    assert not broken_rules(MOE, **options, megatron_sequence_parallel="true")


def test_a_precision_aware_optimizer_is_a_distributed_one():
    assert only_problem(megatron_use_precision_aware_optimizer="true").related == (
        "megatron_use_distributed_optimizer",
    )


def test_a_head_that_cpu_attention_lacks_is_the_installed_stacks_limit():
    text = ARCH.replace("head_dim: 32", "head_dim: 16")
    assert "installed stack cannot" in only_problem(text, device="cpu").what
    assert not broken_rules(text, device="cuda")


def test_a_shape_is_a_struct_that_rules_can_build_on():
    arch = config_from(ARCH).model_arch
    assert isinstance(arch, ModelArchConfig)
    assert arch.num_experts == 0
