"""Paints the progress: rich on a terminal, a plain line per change elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from libra_supervisor.display.progress import Progress, plain_line, rows


class Display(Protocol):
    def show(self, progress: Progress) -> None:
        """Paint one look at the run; cheap, called a few times a second at most."""

    def log(self, line: str) -> None:
        """Print one line of the control log above what is painted."""


class PlainDisplay:
    """A line when the step or what is waited for changes, and nothing otherwise."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._last: tuple[int, str] | None = None

    def log(self, line: str) -> None:
        self._write(line + "\n")

    def show(self, progress: Progress) -> None:
        current = (progress.step, progress.phase)
        if current == self._last:
            return
        is_new_step = self._last is None or progress.step != self._last[0]
        self._last = current
        # Phases between two steps last fractions of a second; only start-up's are worth a line.
        if is_new_step or progress.step == 0:
            self._write(plain_line(progress) + "\n")


class LiveDisplay:
    """A table that is painted over in place."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def log(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)

    def show(self, progress: Progress) -> None:
        table = Table.grid(padding=(0, 2))
        for label, value in rows(progress):
            table.add_row(f"[bold]{label}[/bold]", value)
        self._live.update(table)


@contextmanager
def display_on(stream: TextIO) -> Iterator[Display]:
    """Return the display that suits `stream`; the terminal is left clean at the end."""
    if not stream.isatty():

        def write(text: str) -> None:
            stream.write(text)
            stream.flush()

        yield PlainDisplay(write)
        return
    with Live(console=Console(file=stream), refresh_per_second=4) as live:
        yield LiveDisplay(live)
