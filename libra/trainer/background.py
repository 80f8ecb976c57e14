"""Work that goes on behind the training, one piece at a time, in the order in which it is begun."""

import threading
from collections.abc import Callable


class BackgroundWork:
    """A thread for each piece of work; the next one waits for the one before."""

    def __init__(self, *, on_error: Callable[[Exception], None]) -> None:
        """`on_error` is called in the thread of work that raises, which is all that is heard."""
        self._on_error = on_error
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None], *, name: str) -> None:
        """Begin `work`; returns at once, or when what was begun before has ended."""
        self.wait()
        # A daemon: a rank that fails must not stay for a disk that does not answer.
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is going on."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the top of the thread
            self._on_error(error)
