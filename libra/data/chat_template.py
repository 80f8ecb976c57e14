"""Chat templates as Hugging Face writes them, rendered without transformers."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from libra import clock
from libra.errors import DataError

Message = Mapping[str, Any]
"""`role`, `content`, and whatever else the template reads (`tool_calls`, `tool_call_id`, ...)."""

_MARK = "\u2063libra-mark\u2063"
"""Stands for the answer; invisible separators keep it from turning up in a template."""

_NS_PER_S = 10**9


class ChatTemplate:
    """One compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: str) -> None:
        self._origin = origin
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"{origin}: the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> str:
        """The conversation as text that ends where the assistant's next answer begins.

        Raises DataError when the template refuses the messages or cannot digest them.
        """
        try:
            return self._template.render(
                messages=list(messages),
                tools=tools,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise DataError(f"{self._origin}: the chat template failed: {error}") from error
        except Exception as error:  # of Python, where a template computes with what is no text
            raise DataError(
                f"{self._origin}: the chat template failed: {type(error).__name__}: {error}"
            ) from error

    def render_after_answer(self, messages: Sequence[Message]) -> str:
        """What stands between an answer and the next one when `messages` come in between.

        Begins with whatever ends an assistant's turn. The answer's own text is not rendered, so
        that its tokens can be kept as the engine sampled them.
        """
        first = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": _MARK}
        text = self.render([first, answer, *messages])
        if text.count(_MARK) != 1:
            raise DataError(
                f"{self._origin}: the chat template does not keep an assistant's text as it is, "
                "so a conversation cannot be continued token by token; use a single-turn workflow"
            )
        return text.partition(_MARK)[2]


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for other programs; text passes."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> Node:
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_pass_through")
        return CallBlock(call, [], [], body).set_lineno(line_number)

    def _pass_through(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> jinja2.Environment:
    # The options and names that templates published with models are written for.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    # One instant for the life of the template: prompts must not change when midnight passes.
    started_at = datetime.fromtimestamp(clock.wall_ns() / _NS_PER_S, tz=UTC)
    environment.globals["strftime_now"] = started_at.strftime
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which models were not trained on. The signature is that
    # of transformers.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
