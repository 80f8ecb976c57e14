"""One engine request of a sample, and how partial answers are put together."""

from itertools import pairwise

import msgspec

from libra.errors import InvariantError
from libra.ids import InstanceId, PromptId, RequestId
from libra.rollouts.trajectory import Completion
from libra.wire.instance import Sampling, VersionSpan


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the router is asked for."""

    request_id: RequestId
    prompt_id: PromptId | None
    """Names a prefix that siblings share. None on a second try: affinity must not lead it back to
    the instance that failed."""

    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    avoided: frozenset[InstanceId] = frozenset()
    """Had the request before and did not answer: they get it only when nobody else can serve."""


def joined(first: Completion, rest: Completion) -> Completion:
    """One answer from two pieces, the second asked for with prompt and first piece as prompt."""
    shift = len(first.token_ids)
    if rest.num_prompt_tokens != first.num_prompt_tokens + shift:
        raise InvariantError(
            f"a continuation has {rest.num_prompt_tokens} prompt tokens, not "
            f"{first.num_prompt_tokens} and {shift}"
        )
    moved = tuple(
        VersionSpan(span.policy_version, span.start + shift, span.end + shift)
        for span in rest.version_spans
    )
    return msgspec.structs.replace(
        rest,
        token_ids=first.token_ids + rest.token_ids,
        logprobs=first.logprobs + rest.logprobs,
        version_spans=first.version_spans + moved,
        num_prompt_tokens=first.num_prompt_tokens,
        num_cached_tokens=first.num_cached_tokens,
    )


def completion_error(completion: Completion) -> str | None:
    """What is wrong with an engine's answer, or None."""
    length = len(completion.token_ids)
    if len(completion.logprobs) != length:
        return f"{length} token ids and {len(completion.logprobs)} logprobs"
    if completion.finish_reason == "error":
        return "the engine reported an error"
    bounds = [0, *(edge for s in completion.version_spans for edge in (s.start, s.end)), length]
    # Pairs of bounds alternate: a gap between spans (must be empty), then a span.
    gaps = list(pairwise(bounds))[::2]
    if any(start != end for start, end in gaps):
        return f"version spans {completion.version_spans} do not cover {length} tokens"
    return None
