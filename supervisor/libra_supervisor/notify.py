"""sd_notify: what systemd is told about this process, without a library.

notifier = Notifier.from_environment(environ)   # a Notifier that says nothing elsewhere
notifier.ready("training step 1")
...
tasks.start_soon(notifier.keep_alive)           # from the loop whose life it proves
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from typing import Final

from libra import clock

_MICROSECONDS: Final = 1_000_000
_PINGS_PER_TIMEOUT: Final = 3
_EXTENSION_S: Final = 60.0
_EXTENSION_PERIOD_S: Final = 5.0


class Notifier:
    """Sends states to the service manager; does nothing when there is none.

    systemd takes them from the unit's main process only (NotifyAccess=main), so a wrapper script
    around the supervisor has to `exec` it.
    """

    def __init__(self, address: str, *, watchdog_s: float | None) -> None:
        self._address = address
        self._watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Notifier":
        """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID (if another process's, ignored)."""
        watchdog_s = None
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        if is_ours and (usec := environ.get("WATCHDOG_USEC", "")).isdigit():
            watchdog_s = int(usec) / _MICROSECONDS
        return cls(environ.get("NOTIFY_SOCKET", ""), watchdog_s=watchdog_s)

    @property
    def ping_period_s(self) -> float | None:
        """A third of the watchdog's timeout; None when nobody watches."""
        return None if self._watchdog_s is None else self._watchdog_s / _PINGS_PER_TIMEOUT

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={_one_line(status)}")

    def status(self, sentence: str) -> None:
        self._send(f"STATUS={_one_line(sentence)}")

    def extend_start(self, seconds: float) -> None:
        """Ask for `seconds` more from now on; call it again while the start makes progress."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * _MICROSECONDS)}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={_one_line(status)}")

    def ping(self) -> None:
        self._send("WATCHDOG=1")

    async def keep_alive(self) -> None:
        """Ping from the event loop until cancelled; returns at once when nobody watches."""
        period_s = self.ping_period_s
        if period_s is None:
            return
        while True:
            self.ping()
            await clock.sleep(period_s)

    def _send(self, *assignments: str) -> None:
        if not self._address:
            return
        # A leading @ is systemd's way to write the zero byte of an abstract address.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            try:
                sender.sendto("\n".join(assignments).encode(), address)
            except OSError:
                # A full or vanished socket must not stop a run; the watchdog is the judge.
                return


@contextmanager
def start_extended(notifier: Notifier, *, at_most_s: float) -> Iterator[None]:
    """Ask for more time to start while the block runs, which may block: reading data, planning.

    Not for longer than `at_most_s`, so that a start that hangs still ends.
    """
    is_over = Event()

    def extend() -> None:
        for _ in range(max(1, round(at_most_s / _EXTENSION_PERIOD_S))):
            notifier.extend_start(_EXTENSION_S)
            if is_over.wait(_EXTENSION_PERIOD_S):
                return

    thread = Thread(target=extend, name="start-extension", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _one_line(text: str) -> str:
    return " ".join(text.split())
