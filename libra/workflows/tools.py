"""Functions that the policy may call in the middle of an answer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import anyio
import anyio.lowlevel
import msgspec
from anyio import to_thread
from anyio.lowlevel import RunVar

from libra.errors import ConfigError
from libra.user_code import error_in_words

MAX_TOOL_THREADS = 256
"""Calls of plain functions at a time; more wait, which counts against their time limit."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_limiter_of_loop: RunVar[anyio.CapacityLimiter | None] = RunVar("tool_threads")
_JSON_TYPES: Mapping[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
}


class ToolCall(msgspec.Struct, frozen=True):
    """One call as the policy wrote it: a JSON object with `name` and `arguments`."""

    name: str
    arguments: dict[str, Any] = {}


class MalformedCall(msgspec.Struct, frozen=True):
    """Something between the tags that is not a call."""

    reason: str


def calls_in(text: str) -> list[ToolCall | MalformedCall]:
    """The calls of one answer in the order in which they were written."""
    calls: list[ToolCall | MalformedCall] = []
    for piece in text.split(_OPEN)[1:]:
        body, closed, _ = piece.partition(_CLOSE)
        try:
            if not closed:
                calls.append(MalformedCall(f"no {_CLOSE}"))
                continue
            calls.append(msgspec.json.decode(body, type=ToolCall))
        except msgspec.MsgspecError as error:
            calls.append(MalformedCall(str(error)))
    return calls


class Toolbox:
    """The tools of a workflow, by function name. Plain functions run in threads."""

    def __init__(self, functions: Sequence[Callable[..., Any]], *, timeout_s: float) -> None:
        self._function_of = {f.__name__: f for f in functions}
        if len(self._function_of) < len(functions):
            raise ConfigError("two tools have the same function name; rename one")
        self._timeout_s = timeout_s

    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates want them."""
        return [_schema(name, function) for name, function in self._function_of.items()]

    async def answers(self, calls: Sequence[ToolCall | MalformedCall]) -> list[str]:
        """What each call returned, in the order of `calls` whichever finished first.

        A tool that fails or takes too long answers with a sentence that says so.
        """
        texts = [""] * len(calls)

        async def answer(index: int) -> None:
            texts[index] = await self._answer(calls[index])

        async with anyio.create_task_group() as tasks:
            for index in range(len(calls)):
                tasks.start_soon(answer, index)
        return texts

    async def _answer(self, call: ToolCall | MalformedCall) -> str:
        if isinstance(call, MalformedCall):
            return f"error: not a tool call: {call.reason}"
        function = self._function_of.get(call.name)
        if function is None:
            return f"error: no tool {call.name!r}; there are {', '.join(self._function_of)}"
        with anyio.move_on_after(self._timeout_s):
            try:
                answer = str(await _called(function, call.arguments))
                # A tokenizer takes no halves of characters, which pages of the web may hold.
                return answer.encode(errors="replace").decode()
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - its answer
                return f"error: {error_in_words(error)}"
            except anyio.get_cancelled_exc_class():
                # Ours goes on here; that of something which the tool had cancelled itself does not.
                await anyio.lowlevel.checkpoint_if_cancelled()
                return "error: it waited for something that was cancelled"
        return f"error: {call.name} took longer than {self._timeout_s} s"


async def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    # The thread of a tool that hangs is left behind; the answer does not wait for it.
    return await to_thread.run_sync(
        lambda: function(**arguments), abandon_on_cancel=True, limiter=_tool_threads()
    )


def _tool_threads() -> anyio.CapacityLimiter:
    """The event loop's own: slow tools must not take the threads in which everything else works."""
    limiter = _limiter_of_loop.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(MAX_TOOL_THREADS)
        _limiter_of_loop.set(limiter)
    return limiter


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": inspect.getdoc(function) or "",
            "parameters": {
                "type": "object",
                "properties": {
                    p: {"type": _JSON_TYPES.get(hints.get(p), "string")} for p in parameters
                },
                "required": [p for p, v in parameters.items() if v.default is v.empty],
            },
        },
    }
