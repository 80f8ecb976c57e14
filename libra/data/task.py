"""Rows -> tasks: a prompt as token ids, the answer, and everything else for the reward."""

from typing import Any

import msgspec

from libra.data.source import Record
from libra.data.tokenizer import PromptTokenizer
from libra.errors import DataError, TokenizerError
from libra.ids import PromptId


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What one group works on."""

    prompt_id: PromptId
    prompt_token_ids: tuple[int, ...]
    """As the workflow sends them first, tools that the chat template shows included."""

    messages: tuple[dict[str, Any], ...]
    """The conversation so far; empty for a prompt that is plain text."""

    prompt_text: str
    """The string prompt, or the content of the last message."""

    answer: Any
    """The row's answer field as it is in the data; None when rows have none."""

    extras: dict[str, Any]
    """Every other field of the row."""


class PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """How to read a row."""

    prompt: str = "prompt"
    answer: str = "answer"
    """Empty: rows have no answer."""

    apply_chat_template: bool = True
    """Render a string prompt as one user message."""

    tools: tuple[dict[str, Any], ...] | None = None
    """What the workflow has chat templates show of its tools; None: it shows none."""


class RowRefusedError(DataError):
    """The row cannot become a task; the message says which field and why."""


def task_of(
    record: Record, prompt_id: PromptId, *, fields: PromptFields, tokenizer: PromptTokenizer
) -> Task:
    """The task of one row. Raises RowRefusedError for a row that has none."""
    prompt = _field(record, fields.prompt)
    answer = _field(record, fields.answer) if fields.answer else None
    messages, text = _conversation(prompt, fields)
    extras = {k: v for k, v in record.items() if k not in (fields.prompt, fields.answer)}
    for name, value in {fields.answer: answer, **extras}.items():
        _check_sendable(name, value)
    return Task(
        prompt_id=prompt_id,
        prompt_token_ids=_token_ids(messages, text, fields, tokenizer),
        messages=messages,
        prompt_text=text,
        answer=answer,
        extras=extras,
    )


def _token_ids(
    messages: tuple[dict[str, Any], ...],
    text: str,
    fields: PromptFields,
    tokenizer: PromptTokenizer,
) -> tuple[int, ...]:
    tools = None if fields.tools is None else list(fields.tools)
    try:
        if not messages:
            return tuple(tokenizer.encode_text(text))
        return tuple(tokenizer.encode_chat(messages, tools=tools))
    except TokenizerError:
        # Not this row's fault: no row could be read.
        raise
    except DataError as error:
        raise RowRefusedError(str(error)) from error


def _check_sendable(name: str, value: Any) -> None:
    """Refuse what cannot be carried to a reward's process, before anything has been generated."""
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RowRefusedError(f"{name!r} cannot be handed to a reward: {error}") from error


def _field(record: Record, name: str) -> Any:
    if name not in record:
        present = ", ".join(sorted(record)) or "none"
        raise RowRefusedError(f"no field {name!r} (fields here: {present})")
    return record[name]


def _conversation(prompt: object, fields: PromptFields) -> tuple[tuple[dict[str, Any], ...], str]:
    """Messages (none for plain text) and the text of the last one."""
    match prompt:
        case str():
            if not prompt.strip():
                raise RowRefusedError(f"{fields.prompt!r} is empty")
            if not fields.apply_chat_template:
                return (), prompt
            return ({"role": "user", "content": prompt},), prompt
        case [_, *_]:
            messages = tuple(_message(m, i, fields.prompt) for i, m in enumerate(prompt))
            content = messages[-1].get("content")
            return messages, content if isinstance(content, str) else ""
        case _:
            raise RowRefusedError(
                f"{fields.prompt!r} is {prompt!r:.40}; expected a string or a list of messages"
            )


def _message(message: object, index: int, field: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowRefusedError(f"{field}[{index}] is not a message with a role")
    calls_tools = message["role"] == "assistant" and message.get("tool_calls")
    if message.get("content") is None and not calls_tools:
        raise RowRefusedError(f"{field}[{index}] has no content")
    return message
