"""What a rank whose first layer is the third of the model calls its parameters."""

import pytest

from libra.trainer.tensor_map import name_in_rules

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    ("called", "wanted"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.linear_fc1.weight", "mlp.linear_fc1.weight"),
        ("pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
        ("mlp.experts.linear_fc1.weight0", "mlp.experts.local_experts.8.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight11", "mlp.experts.local_experts.19.linear_fc2.weight"),
        (
            "mlp.experts.local_experts.1.linear_fc1.weight",
            "mlp.experts.local_experts.9.linear_fc1.weight",
        ),
    ],
)
def test_a_parameter_has_one_name_whatever_the_layers_are_made_of(called, wanted):
    name = name_in_rules(f"decoder.layers.1.{called}", layers=[2, 3], first_expert=8)
    assert name == f"decoder.layers.3.{wanted}"
