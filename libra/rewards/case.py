"""What a reward sees of one finished trajectory."""

from typing import Any

import msgspec


class RewardCase(msgspec.Struct, frozen=True, kw_only=True):
    """One response with the row it answers."""

    prompt_id: str
    prompt_text: str
    """The string prompt, or the content of its last message."""

    response_text: str
    """The last answer, without special tokens."""

    answer: Any
    """The row's answer field as it is in the data."""

    extras: dict[str, Any]
    """Every other field of the row."""

    finish_reason: str
    """`stop`, or `length` when the response was cut at its token limit."""

    num_response_tokens: int
    num_turns: int
