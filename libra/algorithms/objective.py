"""The numbers that a policy loss needs, worked out once from the configuration.

The loss itself, in torch, is `libra.trainer.loss`; it takes an `Objective` and nothing else.
"""

from typing import Literal, TypeAlias, assert_never

import msgspec

from libra.config.algorithm import AlgorithmConfig

PolicyLoss: TypeAlias = Literal["ppo_clip", "gspo", "cispo"]
Aggregation: TypeAlias = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
Correction: TypeAlias = Literal["none", "token_tis", "sequence_tis", "sequence_mask", "icepop"]
KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within this before exp: exp(20) is 5e8, still finite in any sum."""

KL_LIMIT = 10.0
"""One token's KL estimate is held within this, so that one outlier cannot own the loss."""


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the loss of one token depends on besides its log probabilities."""

    policy_loss: PolicyLoss
    ratio_low: float
    """1 - clip_ratio_low."""

    ratio_high: float
    """1 + clip_ratio_high."""

    dual_clip: float | None
    """Cap of loss / |advantage| for negative advantages."""

    correction: Correction
    correction_cap: float
    correction_floor: float
    kl_coefficient: float
    kl_estimator: KlEstimator
    kl_is_unbiased: bool
    """Weight the estimate by pi / pi_old, as samples of pi_old need for the KL of pi."""

    entropy_coefficient: float
    temperature: float
    """Logits are divided by it, as the sampler did."""

    top_p: float
    """Probabilities are those within the smallest set of tokens with this mass, as the sampler's
    were; 1 for the whole vocabulary."""


def objective(config: AlgorithmConfig, *, temperature: float, top_p: float) -> Objective:
    """Work out the numbers of `config`.

    The form is the decoupled one of arXiv 2505.24298, whose case without a correction is PPO.
    """
    return Objective(
        policy_loss=config.policy_loss,
        ratio_low=1 - config.clip_ratio_low,
        ratio_high=1 + config.clip_ratio_high,
        dual_clip=config.clip_ratio_dual or None,
        correction=config.importance_correction,
        correction_cap=config.importance_cap,
        correction_floor=config.importance_floor,
        kl_coefficient=config.kl_coefficient,
        kl_estimator=config.kl_estimator,
        kl_is_unbiased=config.kl_unbiased,
        entropy_coefficient=config.entropy_coefficient,
        temperature=temperature,
        top_p=top_p,
    )


def token_weight(
    aggregation: Aggregation,
    *,
    num_tokens: int,
    global_num_tokens: int,
    global_num_sequences: int,
    horizon_tokens: int,
) -> float:
    """Return what each loss of a sequence with `num_tokens` sampled tokens is multiplied by.

    The weighted losses of a whole mini-batch, summed over every micro-batch and rank, are the
    mini-batch's loss: the counts are global, so the split cannot change it. Sequences without a
    sampled token are in no count. Denominators are at least 1. `horizon_tokens` is the fixed
    length of Dr. GRPO (arXiv 2503.20783).
    """
    sequences = max(global_num_sequences, 1)
    match aggregation:
        case "token-mean":
            return 1 / max(global_num_tokens, 1)
        case "seq-mean-token-mean":
            return 1 / (sequences * max(num_tokens, 1))
        case "seq-mean-token-sum":
            return 1 / sequences
        case "seq-mean-token-sum-norm":
            return 1 / (sequences * max(horizon_tokens, 1))
        case _:
            assert_never(aggregation)
