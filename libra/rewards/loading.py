"""A reward by name, bound to its arguments."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from libra.errors import ConfigError
from libra.rewards.case import RewardCase
from libra.rewards.character_class import character_class, check_class
from libra.rewards.code import code
from libra.rewards.exact_match import (
    check_exact_match,
    check_number_answer,
    check_text_answer,
    exact_match,
    number_match,
)
from libra.rewards.math import check_formula, math, require_math_verify
from libra.rewards.sandbox import require_sandbox
from libra.user_code import function_at

RewardFunction: TypeAlias = Callable[[RewardCase], Any]
"""What it returns goes through `libra.rewards.coercion`."""

BUILT_IN: Mapping[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "number_match": number_match,
    "character_class": character_class,
    "math": math,
    "code": code,
}

_REQUIREMENTS: Mapping[str, Callable[[], object]] = {
    "math": require_math_verify,
    "code": require_sandbox,
}


_ANSWER_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "exact_match": check_text_answer,
    "number_match": check_number_answer,
    "character_class": check_class,
    "math": check_formula,
}


def answer_error(name: str, answer: Any) -> str | None:
    """Why the built-in reward of that name can score no response against an answer; None: it can.

    Of rewards that are not built in, nothing is known.
    """
    check = _ANSWER_CHECKS.get(name)
    if check is not None:
        try:
            check(answer)
        except ValueError as error:
            return f"reward {name}: {error}"
    return None


def load_reward(name: str, arguments: Mapping[str, Any]) -> RewardFunction:
    """The built-in reward or `module:function` of that name.

    Imports user code: call it in a reward worker. Raises ConfigError when there is no such
    function or it does not take `(case, **arguments)`, and SiteError when what it needs is not
    installed.
    """
    check_reward_name(name)
    function = BUILT_IN.get(name) or function_at(name)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"reward: {name} is an `async def`; rewards are plain functions")
    try:
        inspect.signature(function).bind("case", **arguments)
    except TypeError as error:
        raise ConfigError(f"reward_args: {name}(case, ...): {error}") from error
    if function is exact_match:
        check_exact_match(**arguments)
    require_for(name)
    return partial(function, **arguments)


def require_for(name: str) -> None:
    """Raise SiteError when what the built-in reward of that name needs is not on this machine."""
    if require := _REQUIREMENTS.get(name):
        require()


def check_reward_name(name: str) -> None:
    """Raise ConfigError for a name that can be no reward, without importing anything."""
    if name not in BUILT_IN and ":" not in name:
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"reward: no {name!r}; use one of {known}, or module:function")
