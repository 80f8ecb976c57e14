"""How many tokens an answer had, read off the bytes that pass by."""

import re

USAGE_KEY = b'"completion_tokens":'
"""Inside a JSON string its quotes would be escaped, so this is never a part of somebody's text."""

EVENT_END = b"\n\n"
DONE = b"\ndata: [DONE]"
ERROR = b'\ndata: {"error"'
TAIL_BYTES = 4096
NUMBER = re.compile(rb"\s*(\d+)")


def tokens_in_answer(body: bytes) -> int | None:
    """`usage.completion_tokens` of a whole answer; None when it has none."""
    at = body.rfind(USAGE_KEY)
    if at < 0:
        return None
    number = NUMBER.match(body, at + len(USAGE_KEY))
    return None if number is None else int(number[1])


class StreamCount:
    """Counts a stream's tokens: what its usage says if it has one, else its events.

    An event carries at least one token, so the count without usage may be low. JSON has no raw
    newline, so what follows one is the server's framing and never a part of somebody's text.
    """

    def __init__(self) -> None:
        self._num_events = 0
        self._tail = b"\n"
        self.has_error = False
        """The server reported an error inside the stream."""

    def feed(self, chunk: bytes) -> None:
        # A mark may be cut in two: look at the end of what came before as well.
        before = self._tail
        self._num_events += (before[-1:] + chunk).count(EVENT_END)
        self.has_error |= ERROR in before[1 - len(ERROR) :] + chunk
        self._tail = (before + chunk)[-TAIL_BYTES:]

    @property
    def num_tokens(self) -> int:
        told = tokens_in_answer(self._tail)
        return told if told is not None else max(0, self._num_events - (DONE in self._tail))
