"""A workflow by name, checked before the run starts."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from libra.data.tokenizer import PromptTokenizer
from libra.errors import ConfigError, DataError
from libra.user_code import function_at
from libra.workflows.client import Workflow
from libra.workflows.multi_turn import check_multi_turn, multi_turn
from libra.workflows.single_turn import single_turn
from libra.workflows.tools import Toolbox

BUILT_IN = {"single_turn": single_turn, "multi_turn": multi_turn}


def load_workflow(name: str, arguments: Mapping[str, Any]) -> Workflow:
    """The built-in workflow or `module:function` of that name, bound to its keyword arguments.

    Raises ConfigError when there is none, when it is not asynchronous, or when it does not take
    `(task, client, **arguments)`.
    """
    function = BUILT_IN.get(name)
    if function is None:
        if ":" not in name:
            known = ", ".join(BUILT_IN)
            raise ConfigError(f"workflow: no {name!r}; use one of {known}, or module:function")
        function = function_at(name)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"workflow: {name} is not an `async def`")
    try:
        inspect.signature(function).bind("task", "client", **arguments)
    except TypeError as error:
        raise ConfigError(f"workflow_args: {name}(task, client, ...): {error}") from error
    if function is multi_turn:
        check_multi_turn(**arguments)
    return partial(function, **arguments)


def tools_shown(name: str, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """What chat templates are given of the tools of a workflow that `load_workflow` has taken.

    None: the workflow gives them none.
    """
    if BUILT_IN.get(name) is not multi_turn:
        return None
    functions = [function_at(tool) for tool in arguments["tools"]]
    return tuple(Toolbox(functions, timeout_s=1.0).schemas())


def check_tokenizer(name: str, tokenizer: PromptTokenizer) -> None:
    """Raise ConfigError when the workflow could not go on after the first answer."""
    if BUILT_IN.get(name) is not multi_turn:
        return
    if not tokenizer.has_chat_template:
        raise ConfigError(
            "workflow: multi_turn has the chat template write what tools answer, and the "
            "tokenizer has none: add chat_template.jinja, or use a workflow of your own"
        )
    answer = {"role": "tool", "name": "tool", "content": "?"}
    try:
        tokenizer.encode_after_answer([answer], answer_token_ids=())
    except DataError as error:
        raise ConfigError(f"workflow: multi_turn cannot give tools' answers: {error}") from error


def warning_of(
    name: str, arguments: Mapping[str, Any], tokenizer: PromptTokenizer, *, is_plain: bool = False
) -> str | None:
    """What works but is probably not meant about a workflow that `load_workflow` has taken.

    `is_plain`: prompts are text that no chat template renders.
    """
    schemas = tools_shown(name, arguments)
    if not schemas:
        return None
    tools = ", ".join(arguments["tools"])
    if is_plain:
        return (
            "apply_chat_template: prompts are sent as they are, so the policy is told of "
            f"{tools} only where they describe them"
        )
    question = [{"role": "user", "content": "?"}]
    if tokenizer.encode_chat(question, tools=schemas) != tokenizer.encode_chat(question):
        return None
    return (
        f"workflow_args: the chat template leaves tools out, so the policy is not told of {tools}; "
        "take a model whose template shows tools, or describe them in the prompts"
    )
