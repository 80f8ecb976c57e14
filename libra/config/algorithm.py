"""The objective: advantages, clipping, aggregation, corrections. Formulas in libra.algorithms."""

from typing import Literal

from libra.config.base import Config, Count, NonNegativeFloat, PositiveCount, PositiveFloat


class AlgorithmConfig(Config, frozen=True, kw_only=True):
    """Flat keys of the policy-gradient objective."""

    n_samples: PositiveCount = 8
    """Rollouts per prompt group for GRPO, in samples; divides batch_size."""

    max_flat_drops: Count = 0
    """Dynamic sampling: groups of equal rewards, which teach nothing, that are dropped per batch
    for others to take their place; further ones are kept, so a step always ends. 0 keeps all."""

    advantage: Literal["grpo", "grpo_population_std", "dr_grpo", "rloo", "loo_std", "maxrl"] = (
        "grpo"
    )
    """How rewards of a group become advantages; the formulas are in libra.algorithms.advantage."""

    advantage_eps: PositiveFloat = 1e-6
    """Added to the standard deviation (grpo, grpo_population_std and loo_std)."""

    policy_loss: Literal["ppo_clip", "gspo", "cispo"] = "ppo_clip"
    """Surrogate objective: token ratios clipped (ppo_clip), sequence ratios (gspo), or clipped
    weights with the gradient kept (cispo)."""

    clip_ratio_low: PositiveFloat = 0.2
    """How far below 1 the ratio may count; 0.2 is PPO's. cispo has no lower bound."""

    clip_ratio_high: PositiveFloat = 0.2
    """How far above 1 the ratio may count; 0.28 with clip_ratio_low 0.2 is DAPO's clip-higher."""

    clip_ratio_dual: NonNegativeFloat = 0.0
    """Dual clip: cap of loss over |advantage| for negative advantages; 0 turns it off. Not with
    cispo."""

    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How token losses become one number; always over the global mini-batch."""

    importance_correction: Literal[
        "none", "token_tis", "sequence_tis", "sequence_mask", "icepop"
    ] = "token_tis"
    """Correction for engine-trainer mismatch and staleness: weights pi_old / pi_rollout."""

    importance_cap: PositiveFloat = 2.0
    """Upper bound of the importance weight."""

    importance_floor: NonNegativeFloat = 0.5
    """Lower bound of the importance weight for icepop; weights outside the bounds count as 0."""

    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL term to the reference policy; 0 loads no reference."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term; k3 is unbiased and never negative."""

    kl_unbiased: bool = False
    """Weight each token's KL estimate by pi / pi_old, so that its gradient is that of the KL;
    without it only k2's is, and only before the first update of a step."""

    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""

    mask_truncated: bool = False
    """Loss mask 0 on trajectories cut at max_new_tokens; they stay in the group's baseline."""
