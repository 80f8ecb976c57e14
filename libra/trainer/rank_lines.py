r"""Every line that a rank prints begins with `[rank N] `, so that `logs --rank N` finds it.

All ranks print into one file, so a line goes out whole, in one write. What C code writes past
Python (NCCL, a dump of the stacks) has no prefix; the log's index knows its rank all the same.
"""

import io
import re
import sys
from threading import Lock
from typing import Final, TextIO

MOST_HELD_CHARACTERS: Final = 8192
_LINE_STARTS: Final = re.compile(r"(?<=[\n\r])(?=[^\n\r])")


class RankLines(io.TextIOBase):
    """A text stream over `stream`. Text without its newline waits for it, or for `flush`."""

    def __init__(self, stream: TextIO, rank: int) -> None:
        self._stream = stream
        self._prefix = f"[rank {rank}] "
        self._held = ""
        self._is_at_line_start = True
        self._lock = Lock()

    def write(self, text: str, /) -> int:
        with self._lock:
            whole, newline, rest = (self._held + text).rpartition("\n")
            self._held = rest
            if newline:
                self._put(whole + newline)
            if len(self._held) > MOST_HELD_CHARACTERS:
                self._put_held()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            self._put_held()
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def _put_held(self) -> None:
        held, self._held = self._held, ""
        if held:
            self._put(held)

    def _put(self, text: str) -> None:
        first = self._prefix if self._is_at_line_start else ""
        self._is_at_line_start = text.endswith(("\n", "\r"))
        # A progress bar begins its line anew with every carriage return.
        self._stream.write(first + _LINE_STARTS.sub(self._prefix, text))


def mark_output(rank: int) -> None:
    """Put the prefix before all that this process prints from now on."""
    sys.stdout = RankLines(sys.stdout, rank)
    sys.stderr = RankLines(sys.stderr, rank)
