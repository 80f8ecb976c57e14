"""A workflow by name, checked before the run starts."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from libra.data.tokenizer import PromptTokenizer
from libra.errors import ConfigError
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


def warning_of(name: str, arguments: Mapping[str, Any], tokenizer: PromptTokenizer) -> str | None:
    """What works but is probably not meant about a workflow that `load_workflow` has taken."""
    tools = arguments.get("tools")
    if BUILT_IN.get(name) is not multi_turn or not tools:
        return None
    schemas = Toolbox([function_at(tool) for tool in tools], timeout_s=1.0).schemas()
    question = [{"role": "user", "content": "?"}]
    if tokenizer.encode_chat(question, tools=schemas) != tokenizer.encode_chat(question):
        return None
    return (
        "workflow_args: the chat template leaves tools out, so the policy is not told of "
        f"{', '.join(tools)}; take a model whose template shows tools, or describe them in the "
        "prompts"
    )
