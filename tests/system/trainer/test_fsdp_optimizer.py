"""What AdamW over a transformers model leaves alone."""

import msgspec
import pytest
import torch
from torch import nn

from libra.config.training import TrainingConfig
from libra.trainer.fsdp.optimizer import build_optimizer

pytestmark = pytest.mark.system


def test_weight_decay_leaves_biases_and_norms_alone():
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    given = {"weight_decay": 0.5, "learning_rate": 0.1}
    build_optimizer(model, msgspec.convert(given, TrainingConfig)).step()
    moved = {name for name, it in model.named_parameters() if not it.eq(1).all()}
    assert moved == {"0.weight"}
    assert model[0].weight.eq(0.95).all()
