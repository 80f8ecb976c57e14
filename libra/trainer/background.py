"""Work that goes on behind the training, one piece at a time, in the order in which it is begun."""

import threading
from collections.abc import Callable
from typing import Final

MAX_WAITING: Final = 1
"""Pieces that wait for the one that goes on; each has what it will write in host memory."""


class BackgroundWork:
    """A thread for each piece of work; the next one waits for the one before."""

    def __init__(self, *, on_error: Callable[[Exception], None]) -> None:
        """`on_error` is called in the thread of work that raises, which is all that is heard."""
        self._on_error = on_error
        self._threads: list[threading.Thread] = []
        """Oldest first; those that have ended may be among them."""

    def make_room(self) -> None:
        """Return when `start` would return at once."""
        while len(self._threads) > MAX_WAITING:
            self._threads.pop(0).join()

    def start(self, work: Callable[[], None], *, name: str) -> None:
        """Begin `work`, after what was begun before; returns at once, or when there is room."""
        self._threads = [it for it in self._threads if it.is_alive()]
        self.make_room()
        before = self._threads[-1] if self._threads else None
        # A daemon: a rank that fails must not stay for a disk that does not answer.
        thread = threading.Thread(target=self._run, args=(work, before), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        """Return when nothing is going on."""
        while self._threads:
            self._threads.pop(0).join()

    def _run(self, work: Callable[[], None], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the top of the thread
            self._on_error(error)
