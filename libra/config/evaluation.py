"""Evaluation during training: how often, and what counts as solved."""

from libra.config.base import Config, PositiveCount


class EvaluationConfig(Config, frozen=True, kw_only=True):
    """Flat keys of evaluation. Sampling, workflow and reward are those of training."""

    eval_interval: PositiveCount = 10
    """Training steps between evaluations of the served version; the first and the last version of a
    run are evaluated too."""

    eval_samples: PositiveCount = 1
    """Trajectories (samples) per row of eval_data: the k of avg@k, and the largest of pass@k."""

    eval_pass_reward: float = 1.0
    """Reward from which on a trajectory counts as a pass for pass@k."""
