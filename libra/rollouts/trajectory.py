"""One finished trajectory: the token ids the engine produced, kept verbatim."""

from typing import Literal

import msgspec

from libra.ids import GroupId, InstanceId, PolicyVersion, PromptId, TrajectoryId
from libra.wire.instance import VersionSpan

FinishReason = Literal["stop", "length", "abort", "error"]


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
