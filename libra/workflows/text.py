"""Tokenisation from inside a task: long texts go to a thread, so that the loop never lags."""

from collections.abc import Sequence

from anyio import to_thread

from libra.data.chat_template import Message
from libra.data.tokenizer import PromptTokenizer

LONG_CHARS = 8_000
LONG_TOKENS = 2_000
"""Well under 50 ms of work; a hop to a thread costs more than shorter texts do."""


async def decoded(tokenizer: PromptTokenizer, token_ids: Sequence[int]) -> str:
    if len(token_ids) < LONG_TOKENS:
        return tokenizer.decode(token_ids)
    return await to_thread.run_sync(tokenizer.decode, token_ids)


async def encoded_after_answer(
    tokenizer: PromptTokenizer, messages: Sequence[Message], answer_token_ids: Sequence[int]
) -> list[int]:
    """As `PromptTokenizer.encode_after_answer`."""

    def encode() -> list[int]:
        return tokenizer.encode_after_answer(messages, answer_token_ids=answer_token_ids)

    if sum(len(str(m.get("content"))) for m in messages) < LONG_CHARS:
        return encode()
    return await to_thread.run_sync(encode)
