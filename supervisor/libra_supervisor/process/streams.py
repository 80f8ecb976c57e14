"""The streams that a log holds."""

from enum import IntEnum


class Stream(IntEnum):
    OUT = 0
    ERR = 1
    LIBRA = 2
    """Our own remarks, such as how many bytes were dropped."""
