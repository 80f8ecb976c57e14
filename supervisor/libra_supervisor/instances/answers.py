"""A vLLM completion's JSON -> Completion, checked: nothing is repaired."""

from collections.abc import Sequence

import msgspec

from libra.errors import PeerError
from libra.ids import InstanceId
from libra.rollouts.trajectory import Completion, FinishReason
from libra.wire.decoding import decoded_json
from libra.wire.instance import VersionSpan


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: tuple[float | None, ...]


class _Choice(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    logprobs: _Logprobs | None
    finish_reason: FinishReason
    libra_version_spans: tuple[VersionSpan, ...]


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...]
    usage: _Usage


def completion_of(content: bytes, instance_id: InstanceId, *, num_prompt_tokens: int) -> Completion:
    """Read one choice. Raises PeerError when it lacks ids, logprobs or whole version spans."""
    try:
        answer = decoded_json(content, _Answer)
    except PeerError as exc:
        raise PeerError(f"{instance_id} gave an answer that is no completion: {exc}") from exc
    problem = _problem(answer, num_prompt_tokens)
    if problem is not None:
        raise PeerError(f"{instance_id} gave a completion {problem}")
    (choice,) = answer.choices
    details = answer.usage.prompt_tokens_details
    return Completion(
        token_ids=choice.token_ids,
        logprobs=_logprobs(choice),
        finish_reason=choice.finish_reason,
        version_spans=choice.libra_version_spans,
        instance_id=instance_id,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=0 if details is None else details.cached_tokens or 0,
    )


class _PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float


class _ProbeChoice(msgspec.Struct, frozen=True):
    prompt_logprobs: tuple[dict[str, _PromptLogprob] | None, ...]


class _ProbeAnswer(msgspec.Struct, frozen=True):
    choices: tuple[_ProbeChoice]


def prompt_logprobs_of(
    content: bytes, instance_id: InstanceId, token_ids: Sequence[int]
) -> tuple[float, ...]:
    """Logprob of each of `token_ids` but the first, given those before. Raises PeerError."""
    try:
        answer = decoded_json(content, _ProbeAnswer)
    except PeerError as exc:
        raise PeerError(f"{instance_id} gave no prompt logprobs: {exc}") from exc
    entries = answer.choices[0].prompt_logprobs[1:]
    found = [
        None if entry is None else entry.get(str(token_id))
        for entry, token_id in zip(entries, token_ids[1:], strict=False)
    ]
    logprobs = tuple(entry.logprob for entry in found if entry is not None)
    if len(logprobs) != len(token_ids) - 1:
        raise PeerError(
            f"{instance_id} gave {len(logprobs)} prompt logprobs for {len(token_ids)} tokens"
        )
    return logprobs


def _problem(answer: _Answer, num_prompt_tokens: int) -> str | None:
    if len(answer.choices) != 1:
        return f"with {len(answer.choices)} choices instead of one"
    (choice,) = answer.choices
    if answer.usage.prompt_tokens != num_prompt_tokens:
        return f"of {answer.usage.prompt_tokens} prompt tokens; {num_prompt_tokens} were sent"
    if len(_logprobs(choice)) != len(choice.token_ids):
        return f"of {len(choice.token_ids)} tokens with {len(_logprobs(choice))} logprobs"
    if not _is_cover(choice.libra_version_spans, len(choice.token_ids)):
        return f"of {len(choice.token_ids)} tokens whose version spans do not cover them"
    return None


def _logprobs(choice: _Choice) -> tuple[float, ...]:
    given = () if choice.logprobs is None else choice.logprobs.token_logprobs
    return tuple(value for value in given if value is not None)


def _is_cover(spans: tuple[VersionSpan, ...], num_tokens: int) -> bool:
    at = 0
    for span in spans:
        if span.start != at or span.end <= span.start:
            return False
        at = span.end
    return at == num_tokens
