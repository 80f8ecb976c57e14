"""Reads back what an earlier supervisor of the same run wrote down."""

import os
from pathlib import Path

import msgspec

TAIL_BYTES = 256 * 1024


class _Line(msgspec.Struct):
    attempt: int


def last_attempt(metrics: Path) -> int:
    """The highest attempt among the last lines of metrics.jsonl; 0 when there are none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    return max((attempt for line in lines if (attempt := _attempt_of(line))), default=0)


def _attempt_of(line: bytes) -> int:
    try:
        return msgspec.json.decode(line, type=_Line).attempt
    except msgspec.DecodeError:
        # Torn by a crash, or the first of the tail.
        return 0
