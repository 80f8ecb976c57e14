"""The signals that stop a program of a run, and the exit code that each asks for."""

import signal
from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from libra_supervisor.app.ending import INTERRUPTED

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""SIGUSR1 is a batch system's notice that the time ends; it stops the run as SIGTERM does."""


@contextmanager
def stop_signals() -> Iterator[AsyncIterable[signal.Signals]]:
    """Receive them from here on; after it none has an effect any more.

    By then all has ended or is ending, and a late signal must not replace the exit code.
    """
    try:
        with anyio.open_signal_receiver(*STOP_SIGNALS) as signals:
            yield signals
    finally:
        for late in STOP_SIGNALS:
            signal.signal(late, signal.SIG_IGN)


def exit_code_of(number: signal.Signals) -> int:
    """Of a run that such a signal has stopped in good order."""
    return INTERRUPTED if number == signal.SIGINT else 0
