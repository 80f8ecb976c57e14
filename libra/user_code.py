"""User code by name: `module:function`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from libra.errors import ConfigError


def function_at(name: str) -> Callable[..., Any]:
    """The function that `module:function` names. Raises ConfigError when there is none."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"{name!r} is not of the form module:function")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does while it is imported
        raise ConfigError(
            f"{name}: importing {module_name} failed: {type(error).__name__}: {error}; is its "
            "directory on PYTHONPATH?"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{name}: module {module_name} has no function {function_name}")
    found: Callable[..., Any] = function
    return found
