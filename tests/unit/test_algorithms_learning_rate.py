import pytest

from libra.algorithms.learning_rate import decay_steps, learning_rate
from libra.config.training import TrainingConfig
from libra.errors import ConfigError


def rates(config, num_steps, *, total_steps=None):
    end = decay_steps(config, total_steps=total_steps)
    return [learning_rate(config, num_taken=k, decay_steps=end) for k in range(num_steps)]


def config(**changes):
    return TrainingConfig(learning_rate=1.0, **changes)


def test_warm_up_then_cosine_gives_the_published_numbers():
    made = config(lr_schedule="cosine", lr_warmup_steps=2, lr_decay_steps=10, lr_min_fraction=0.1)
    published = [0.5, 1, 1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254]
    assert rates(made, 10) == pytest.approx(published, abs=1e-6)


def test_the_minimum_holds_after_the_end():
    made = config(lr_schedule="linear", lr_decay_steps=4, lr_min_fraction=0.2)
    assert rates(made, 7) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_a_constant_rate_needs_no_end():
    assert rates(config(lr_warmup_steps=2), 4) == [0.5, 1.0, 1.0, 1.0]


def test_the_end_counts_optimizer_steps_not_training_steps():
    made = config(lr_schedule="linear", batch_size=32, mini_batch_size=8)
    assert decay_steps(made, total_steps=10) == 40


def test_a_decay_without_an_end_is_refused_by_name():
    with pytest.raises(ConfigError, match="lr_decay_steps"):
        decay_steps(config(lr_schedule="cosine"), total_steps=None)
