"""Verb -> what does it. Errors end here: one message, the exit code of their kind."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from io import TextIOWrapper

from libra.errors import LibraError
from libra_supervisor.cli.arguments import parser

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the process's exit code."""
    _print_whatever_comes()
    options = parser().parse_args(arguments)
    try:
        return _verb_of(options)(options)
    except LibraError as error:
        sys.stderr.write(f"libra-supervisor {options.verb}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left; that is its right.
        return 0


def _print_whatever_comes() -> None:
    """Names of files need not be text, nor need the terminal know every letter."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _verb_of(options: Namespace) -> Callable[[Namespace], int]:
    """Import only what the verb needs."""
    # ruff: noqa: PLC0415
    match options.verb:
        case "run":
            from libra_supervisor.cli.run import run

            return run
        case "validate" | "plan" | "doctor" | "schema":
            from libra_supervisor.cli import inspection

            verbs: dict[str, Callable[[Namespace], int]] = {
                "validate": inspection.validate,
                "plan": inspection.plan,
                "doctor": inspection.doctor,
                "schema": inspection.schema,
            }
            return verbs[options.verb]
        case "simulate":
            from libra_supervisor.cli.simulation import simulate

            return simulate
        case "score":
            from libra_supervisor.cli.scoring import score

            return score
        case "trace":
            from libra_supervisor.cli.tracing import trace

            return trace
        case "logs":
            from libra_supervisor.cli.logs import logs

            return logs
        case _:
            from libra_supervisor.cli.remote import speak

            return speak
