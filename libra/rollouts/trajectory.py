"""One finished trajectory: the token ids the engine produced, kept verbatim."""

from itertools import compress
from math import isfinite
from operator import not_
from typing import Literal

import msgspec

from libra.ids import GroupId, InstanceId, PolicyVersion, PromptId, TrajectoryId
from libra.wire.instance import VersionSpan

FinishReason = Literal["stop", "length", "abort", "error"]

FailureKind = Literal[
    "engine", "timeout", "workflow", "prefix", "alignment", "reward", "lease", "cancelled"
]
"""Why a sample gave no trajectory: no engine answered; one went silent; the workflow raised; a turn
did not start with the ids of the turn before; lengths or spans disagree; the reward failed; the
sample was lost track of; the run is stopping."""

NOT_THE_PROMPTS: frozenset[FailureKind] = frozenset({"engine", "timeout", "lease", "cancelled"})
"""What happens to every prompt while servers crash, hang or are moved."""


class SampleFailed(msgspec.Struct, frozen=True):
    """The value a failed sample leaves behind instead of a trajectory."""

    kind: FailureKind
    message: str


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One engine answer: n output tokens, exactly as sampled."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Same length as `token_ids`."""

    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    """Cover [0, n) without gaps, in order."""

    instance_id: InstanceId
    num_prompt_tokens: int
    num_cached_tokens: int


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt and response tokens of one sample; all per-token fields have the same length L."""

    trajectory_id: TrajectoryId
    prompt_id: PromptId
    group_id: GroupId
    sample_index: int
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 only on tokens the policy sampled, the end-of-sequence token included."""

    rollout_logprobs: tuple[float, ...]
    """The engine's logprob where the mask is 1, else 0.0."""

    version_spans: tuple[VersionSpan, ...]
    """Over positions of `token_ids`; sampled tokens only, in order."""

    num_prompt_tokens: int
    finish_reason: FinishReason
    reward: float | None = None
    """None until scored."""

    num_turns: int = 1
    instance_ids: tuple[InstanceId, ...] = ()
    response_text: str = ""

    @property
    def oldest_version(self) -> PolicyVersion:
        """The version staleness is counted from."""
        return min(span.policy_version for span in self.version_spans)

    @property
    def num_response_tokens(self) -> int:
        return sum(self.loss_mask)


def alignment_error(trajectory: Trajectory) -> str | None:
    """What is wrong with the per-token fields, or None when they describe the same tokens.

    Checked once at the border between workflows, which users write, and everything behind them.
    """
    length = len(trajectory.token_ids)
    if len(trajectory.loss_mask) != length or len(trajectory.rollout_logprobs) != length:
        return (
            f"{length} token ids, {len(trajectory.loss_mask)} mask entries and "
            f"{len(trajectory.rollout_logprobs)} logprobs"
        )
    if any(trajectory.loss_mask[: trajectory.num_prompt_tokens]):
        return f"a loss mask inside the {trajectory.num_prompt_tokens} prompt tokens"
    if not 0 < trajectory.num_prompt_tokens <= length:
        return f"{trajectory.num_prompt_tokens} prompt tokens in {length} tokens"
    return _span_error(trajectory) or _logprob_error(trajectory)


def _span_error(trajectory: Trajectory) -> str | None:
    covered = [0] * len(trajectory.token_ids)
    end_of_last = 0
    for span in trajectory.version_spans:
        if not end_of_last <= span.start < span.end <= len(covered):
            return f"version span [{span.start}, {span.end}) after position {end_of_last}"
        covered[span.start : span.end] = [1] * (span.end - span.start)
        end_of_last = span.end
    if tuple(covered) != trajectory.loss_mask:
        return "version spans that cover other tokens than the loss mask"
    return None if trajectory.version_spans else "no sampled token"


def _logprob_error(trajectory: Trajectory) -> str | None:
    logprobs, mask = trajectory.rollout_logprobs, trajectory.loss_mask
    # Trajectories are long and this runs in the event loop: `map` stays out of the interpreter.
    if not all(map(isfinite, logprobs)):
        position = next(i for i, logprob in enumerate(logprobs) if not isfinite(logprob))
        return f"logprob {logprobs[position]} at position {position}"
    if any(compress(logprobs, map(not_, mask))):
        return "a logprob at a position that the policy did not sample"
    return None
