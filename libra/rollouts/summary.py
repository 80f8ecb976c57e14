"""What one batch looks like: the rollout half of a line of metrics.jsonl."""

from collections.abc import Sequence
from statistics import fmean, pstdev

import msgspec

from libra.ids import PolicyVersion
from libra.rollouts.group import CompleteGroup
from libra.rollouts.staleness import staleness


class BatchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one training batch before it is trained on."""

    num_trajectories: int
    reward_mean: float
    reward_std: float
    """Population standard deviation over all trajectories of the batch."""

    frac_zero_std: float
    """Share of groups whose rewards are all equal; they add nothing to the gradient."""

    response_tokens_mean: float
    """Sampled tokens per trajectory."""

    response_tokens_max: int
    truncated_fraction: float
    """Share of trajectories that ran into the token limit."""

    num_turns_mean: float
    staleness_mean: float
    """Over trajectories: version trained on minus the oldest version in the trajectory."""

    staleness_max: int
    num_tokens: int
    """Prompt and response tokens of the whole batch."""


def summarize(groups: Sequence[CompleteGroup], *, version: PolicyVersion) -> BatchSummary:
    """Numbers of a batch consumed by the policy at `version`; `groups` is not empty."""
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.reward or 0.0 for t in trajectories]
    responses = [t.num_response_tokens for t in trajectories]
    ages = [staleness(consumed_at=version, oldest=t.oldest_version) for t in trajectories]
    return BatchSummary(
        num_trajectories=len(trajectories),
        reward_mean=fmean(rewards),
        reward_std=pstdev(rewards),
        frac_zero_std=fmean(group.is_flat for group in groups),
        response_tokens_mean=fmean(responses),
        response_tokens_max=max(responses),
        truncated_fraction=fmean(t.finish_reason == "length" for t in trajectories),
        num_turns_mean=fmean(t.num_turns for t in trajectories),
        staleness_mean=fmean(ages),
        staleness_max=max(ages),
        num_tokens=sum(len(t.token_ids) for t in trajectories),
    )
