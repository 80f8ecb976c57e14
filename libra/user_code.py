"""User code by name: `module:function`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from libra.errors import ConfigError

MAX_ERROR_CHARS = 500


def error_in_words(error: BaseException) -> str:
    """`Type: message` of what user code raised: short, and text whatever the message holds."""
    name = type(error).__name__
    try:
        said = f"{name}: {error}"
    except Exception:  # noqa: BLE001 - an error that cannot be shown
        said = f"{name}, whose message cannot be shown"
    return said.encode(errors="backslashreplace").decode()[:MAX_ERROR_CHARS]


def function_at(name: str) -> Callable[..., Any]:
    """The function that `module:function` names. Raises ConfigError when there is none."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"{name!r} is not of the form module:function")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does while it is imported
        raise ConfigError(
            f"{name}: importing {module_name} failed: {error_in_words(error)}; is its directory on "
            "PYTHONPATH?"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{name}: module {module_name} has no function {function_name}")
    found: Callable[..., Any] = function
    return found
