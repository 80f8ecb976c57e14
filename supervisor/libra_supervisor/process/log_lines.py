"""From a child's raw bytes to lines that can be shown. Pure.

Lines are made only when somebody reads: the log file keeps the bytes as the child wrote them.
"""

from typing import Final

MAX_LINE_BYTES: Final = 64 * 1024
_CUT_MARK: Final = b" [libra: line cut at 64 KiB]"


class LineSplitter:
    """Bytes in any cut -> whole lines without their ends. Holds at most MAX_LINE_BYTES.

    A longer line is cut there and marked; its rest is dropped. Of a progress bar (parts of one
    line separated by carriage returns) only the last part is kept, as a terminal would show it.
    """

    def __init__(self) -> None:
        self._partial = bytearray()
        self._is_cut = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Lines that `chunk` completes, in order."""
        *ends, rest = chunk.split(b"\n")
        lines: list[bytes] = []
        for part in ends:
            self._take(part)
            lines.append(self._line())
        self._take(rest)
        return lines

    def flush(self) -> list[bytes]:
        """Return the last line when the stream ends without a newline."""
        return [self._line()] if self._partial else []

    def _take(self, part: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._partial)
        if len(part) > room and b"\r" in part:
            # Fold now: a progress bar may run for hours without one newline.
            part = _folded(part)
            del self._partial[:]
            room = MAX_LINE_BYTES
        self._is_cut |= len(part) > room
        self._partial += part[:room]

    def _line(self) -> bytes:
        line = _folded(bytes(self._partial))
        if self._is_cut:
            line += _CUT_MARK
        self._partial.clear()
        self._is_cut = False
        return line


def _folded(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def shown(line: bytes) -> str:
    """Return the line as text; bytes that are not UTF-8 become escapes, never an error."""
    return line.decode("utf-8", "backslashreplace")
