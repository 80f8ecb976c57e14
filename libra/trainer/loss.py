"""The policy loss of one micro-batch, in torch. Formulas: `libra.algorithms.objective`.

Works on the n sampled tokens of a micro-batch, never on padded rows: what is masked out is not
multiplied by 0, it is not there, so a NaN under the mask cannot reach the loss or a gradient.
"""

from typing import Any, NamedTuple, assert_never

import torch
import torch.distributed as dist

from libra.algorithms.objective import KL_LIMIT, LOG_RATIO_LIMIT, KlEstimator, Objective
from libra.trainer.batch import MicroBatch


class LossSums(NamedTuple):
    """Sums over the tokens of a micro-batch; each a float32 scalar without gradient."""

    loss: torch.Tensor
    entropy: torch.Tensor
    clipped: torch.Tensor
    ratio: torch.Tensor
    mismatch: torch.Tensor
    """k3 of the policy in this forward against the engine."""


def policy_loss(
    scores: torch.Tensor, batch: MicroBatch, objective: Objective
) -> tuple[torch.Tensor, LossSums]:
    """Compute the micro-batch's share of the mini-batch's loss, and sums for the metrics.

    `scores` is float32[2, n] of `libra.trainer.head`. Shares of all micro-batches and ranks are
    summed; `batch.weights` has the global counts in it.
    """
    logprobs, entropies = scores
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    mismatch = _held(old - batch.rollout_logprobs)
    log_ratio = _held(logprobs - old)
    if objective.policy_loss == "gspo":
        log_ratio = _spread(_sums(log_ratio, batch) / batch.num_sampled.clamp(min=1), batch)
    ratio = log_ratio.exp()
    surrogate = _surrogate(ratio, logprobs, batch.advantages, objective)
    losses = surrogate * correction_weights(mismatch, batch, objective)
    if objective.kl_coefficient:
        if batch.reference_logprobs is None:
            raise ValueError("a KL coefficient above 0 needs the reference's logprobs")
        divergence = kl_estimate(logprobs - batch.reference_logprobs, objective.kl_estimator)
        if objective.kl_is_unbiased:
            divergence = _for_samples_of(old, logprobs, divergence, objective.kl_estimator)
        losses = losses + objective.kl_coefficient * divergence
    if objective.entropy_coefficient:
        losses = losses - objective.entropy_coefficient * entropies
    loss = (losses * batch.weights).sum()
    with torch.no_grad():
        sums = LossSums(
            loss=loss.detach(),
            entropy=entropies.sum(),
            clipped=_is_clipped(ratio, batch.advantages, objective).float().sum(),
            ratio=ratio.sum(),
            mismatch=mismatch_k3(logprobs - batch.rollout_logprobs).sum(),
        )
    return loss, sums


class _SumOverGroup(torch.autograd.Function):
    """Sum of a tensor over ranks, each of which goes on to a loss of its own.

    The ranks' losses are summed, so a rank's gradient is the sum of what all of them ask for.
    """

    @staticmethod
    def forward(ctx: Any, here: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = here.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _surrogate(
    ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, objective: Objective
) -> torch.Tensor:
    match objective.policy_loss:
        case "ppo_clip" | "gspo":
            clipped = ratio.clamp(objective.ratio_low, objective.ratio_high)
            losses = -torch.minimum(ratio * advantages, clipped * advantages)
        case "cispo":
            # The ratio is a capped constant, so that no token ever loses its gradient
            # (MiniMax-M1, arXiv 2506.13585).
            capped = ratio.detach().clamp(max=objective.ratio_high)
            return -capped * advantages * logprobs
        case _:
            assert_never(objective.policy_loss)
    if objective.dual_clip is None:
        return losses
    cap = objective.dual_clip * advantages.abs()
    return torch.where(advantages < 0, torch.minimum(losses, cap), losses)


def _is_clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, objective: Objective
) -> torch.Tensor:
    too_high = (ratio > objective.ratio_high) & (advantages > 0)
    too_low = (ratio < objective.ratio_low) & (advantages < 0)
    return too_high if objective.policy_loss == "cispo" else too_high | too_low


def correction_weights(
    mismatch: torch.Tensor, batch: MicroBatch, objective: Objective
) -> torch.Tensor:
    """float32[n] weights pi_old / pi_rollout, without gradient.

    Tokens that are given weight 0 stay in the denominators of the loss. A sequence's weight is
    the product of its tokens' ratios, never their sum.
    """
    with torch.no_grad():
        match objective.correction:
            case "none":
                return torch.ones_like(mismatch)
            case "token_tis":
                return mismatch.exp().clamp(max=objective.correction_cap)
            case "icepop":
                weights = mismatch.exp()
                is_kept = weights >= objective.correction_floor
                return torch.where(is_kept & (weights <= objective.correction_cap), weights, 0.0)
            case "sequence_tis" | "sequence_mask":
                weights = _held(_sums(mismatch, batch)).exp()
                if objective.correction == "sequence_tis":
                    weights = weights.clamp(max=objective.correction_cap)
                else:
                    weights = torch.where(weights <= objective.correction_cap, weights, 0.0)
                return _spread(weights, batch)
            case _:
                assert_never(objective.correction)


def kl_estimate(difference: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Per-token KL to the reference from d = log pi - log pi_ref (Schulman's k1, k2, k3)."""
    held = _held(difference)
    match estimator:
        case "k1":
            estimate = held
        case "k2":
            estimate = held.square() / 2
        case "k3":
            estimate = _k3(-held)
        case _:
            assert_never(estimator)
    return estimate.clamp(-KL_LIMIT, KL_LIMIT)


def _for_samples_of(
    old: torch.Tensor, logprobs: torch.Tensor, estimate: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """Weight KL estimates at tokens drawn from pi_old for the KL of pi, and its gradient.

    k1 and k3 are estimates of the KL, whose gradient also goes through how likely the token is: the
    ratio keeps its gradient (DeepSeek-V3.2). k2's own gradient, d grad log pi, is the KL's already;
    its ratio is a constant.
    """
    ratio = _held(logprobs - old).exp()
    return estimate * (ratio.detach() if estimator == "k2" else ratio)


def mismatch_k3(mismatch: torch.Tensor) -> torch.Tensor:
    """k3 per token from d = log pi_trainer - log pi_engine, for tokens that the engine drew."""
    return _k3(_held(mismatch))


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    # exp - 1 loses what is left near 0, and comes out below it.
    return torch.expm1(log_ratio) - log_ratio


def _held(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _sums(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sum of each sequence's tokens over all ranks that hold pieces of it, [m]."""
    here: torch.Tensor = torch.segment_reduce(values, "sum", lengths=batch.lengths, unsafe=True)
    context = batch.packing.context
    if context is None:
        return here
    everywhere: torch.Tensor = _SumOverGroup.apply(here, context.group)  # type: ignore[no-untyped-call]
    return everywhere


def _spread(of_rows: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Each sequence's value on every one of its tokens here, [n]."""
    # Both spared the check, or the count, for which a GPU would have to be waited for.
    return of_rows.repeat_interleave(batch.lengths, output_size=len(batch.targets))
