"""Verb -> what does it. Errors end here: one message, the exit code of their kind."""

import errno
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import Final, NoReturn

from libra.errors import LibraError, SiteError
from libra_supervisor.cli.arguments import parser

INTERRUPTED = 130


def program() -> NoReturn:
    """One verb, then the process's end, whatever threads a user's tools have left behind."""
    exit_code = main()
    others = set(threading.enumerate()) - {threading.current_thread()}
    if any(not thread.daemon for thread in others):
        # Python would wait for them, and so for ever for a tool that hangs.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the process's exit code."""
    _print_whatever_comes()
    options = parser().parse_args(arguments)
    try:
        exit_code = _verb_of(options)(options)
        sys.stdout.flush()
    except LibraError as error:
        sys.stderr.write(f"libra-supervisor {options.verb}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left; that is its right.
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        return _on_full_disk(options.verb, error)
    return exit_code


def _on_full_disk(verb: str, error: OSError) -> int:
    sys.stderr.write(f"libra-supervisor {verb}: writing failed: {error}\n")
    # What is still buffered would fail once more when Python leaves.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return SiteError.exit_code


def _print_whatever_comes() -> None:
    """Names of files need not be text, nor need the terminal know every letter."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


FUNCTIONS: Final = {
    "run": "run:run",
    "fork": "run:fork",
    "eval": "run:evaluate",
    "export": "checkpoints:export",
    "validate": "inspection:validate",
    "plan": "inspection:plan",
    "doctor": "inspection:doctor",
    "schema": "inspection:schema",
    "simulate": "simulation:simulate",
    "score": "scoring:score",
    "trace": "tracing:trace",
    "logs": "logs:logs",
}
"""Module below this package, and function; every other verb is said to a control plane."""


def _verb_of(options: Namespace) -> Callable[[Namespace], int]:
    """Import only what the verb needs."""
    module, _, name = FUNCTIONS.get(options.verb, "remote:speak").partition(":")
    function: Callable[[Namespace], int]
    function = getattr(import_module(f"libra_supervisor.cli.{module}"), name)
    return function
