"""What a transformers model keeps for its backward pass."""

from types import SimpleNamespace

import pytest
import torch

from libra.errors import ConfigError
from libra.trainer.fsdp.model import checkpoint_layers, load_language_model
from tiny_models import make_other_architectures

pytestmark = pytest.mark.system

TOKENS = torch.arange(64).reshape(2, 32)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    make_other_architectures(directory)
    return directory / "olmo2"


def backward(model):
    """Numbers kept for the backward pass, and the gradients."""
    kept = 0

    def keep(tensor):
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.base_model(input_ids=TOKENS, use_cache=False).last_hidden_state
    num_kept = kept
    hidden.square().sum().backward()
    return num_kept, {name: it.grad for name, it in model.named_parameters()}


def test_layers_keep_their_input_only_and_gradients_stay_the_same(path):
    plain, checkpointed = load_language_model(path), load_language_model(path)
    checkpoint_layers(checkpointed)
    much, wanted = backward(plain)
    little, got = backward(checkpointed)
    assert little < much / 5
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (gradient is None) == (got[name] is None), name
        assert gradient is None or torch.equal(got[name], gradient), name


def test_a_model_that_does_not_name_its_layers_is_refused():
    with pytest.raises(ConfigError, match="fsdp_gradient_checkpointing: false"):
        checkpoint_layers(SimpleNamespace(_no_split_modules=None, modules=list))
