"""What routing needs to know of an OpenAI request. The body itself is passed on untouched."""

from typing import Any, Literal, TypeAlias

import msgspec

from libra.errors import RejectedError

Route: TypeAlias = Literal["/v1/completions", "/v1/chat/completions"]

COMPLETIONS_DEFAULT_TOKENS = 16
"""OpenAI's default of max_tokens on /v1/completions."""

MAX_COUNT = 2**31


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One request's size. Exactly one of the two prompt sizes is known."""

    num_prompt_tokens: int | None
    num_prompt_chars: int
    max_new_tokens: int
    """Over all choices."""


class _Body(msgspec.Struct):
    """The fields that are read. Their types are the engine's business: any value is let through."""

    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None


_decoder = msgspec.json.Decoder(_Body)


def read_question(body: bytes, route: Route, *, chat_default_tokens: int) -> Question:
    """Size up a request. Raises RejectedError when the body is not a JSON object."""
    try:
        fields = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RejectedError(f"the body is not a JSON object: {exc}") from exc
    default = COMPLETIONS_DEFAULT_TOKENS if route == "/v1/completions" else chat_default_tokens
    limit = _count(fields.max_completion_tokens) or _count(fields.max_tokens) or default
    tokens, chars = _prompt_size(bytes(fields.prompt), bytes(fields.messages))
    return Question(
        num_prompt_tokens=tokens,
        num_prompt_chars=chars,
        max_new_tokens=limit * max(1, _count(fields.n)),
    )


def _prompt_size(prompt: bytes, messages: bytes) -> tuple[int | None, int]:
    """Tokens of a list of token ids, else characters. Counted in the raw JSON, never parsed."""
    if prompt.startswith(b"[") and b'"' not in prompt:
        is_empty = not prompt.strip(b"[] \t\r\n")
        return (0 if is_empty else prompt.count(b",") + 1), 0
    return None, len(prompt) + len(messages)


def _count(value: object) -> int:
    """A usable count, else 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0
    return int(value) if 0 < value < MAX_COUNT else 0
