"""JSON lines, read by byte offset: only a newline byte ends a line, whatever the text holds."""

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from libra.data.source import BadRow, Record
from libra.errors import DataError


class JsonlSource:
    """The non-blank lines of one .jsonl or .jsonl.gz file.

    A plain file is indexed once and read again line by line; a compressed one is kept in memory,
    because it has no offsets to seek to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_compressed = path.suffix == ".gz"
        digest = xxhash.xxh3_128()
        self._line_numbers: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self._lines: list[bytes] = []
        start = 0
        for number, line in enumerate(_lines(path, is_compressed=self._is_compressed), start=1):
            digest.update(line)
            if number == 1 and line.startswith(BOM_UTF8):
                start += len(BOM_UTF8)
                line = line.removeprefix(BOM_UTF8)  # noqa: PLW2901
            if line.strip():
                self._line_numbers.append(number)
                self._keep(start, line)
            start += len(line)
        self._fingerprint = digest.hexdigest()

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._line_numbers)

    def location(self, index: int) -> str:
        return self._at(index, 1)

    def record(self, index: int) -> Record | BadRow:
        line = self._line(index)
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            column, reason = _why_malformed(line, str(error))
            return BadRow(self._at(index, column), reason)
        if not isinstance(value, dict):
            column = 1 + len(line) - len(line.lstrip())
            return BadRow(self._at(index, column), f"expected an object, found {_kind(value)}")
        return value

    def _keep(self, start: int, line: bytes) -> None:
        if self._is_compressed:
            self._lines.append(line)
        else:
            self._spans.append((start, len(line)))

    def _line(self, index: int) -> bytes:
        if self._is_compressed:
            return self._lines[index]
        start, length = self._spans[index]
        try:
            with self._path.open("rb") as file:
                file.seek(start)
                line = file.read(length)
        except OSError as error:
            raise DataError(f"{self._path}: {error.strerror}") from error
        if len(line) < length:
            raise DataError(f"{self._path}: the file became shorter while the run was using it")
        return line

    def _at(self, index: int, column: int) -> str:
        return f"{self._path}:{self._line_numbers[index]}:{column}"


def _lines(path: Path, *, is_compressed: bool) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") if is_compressed else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {error}") from error


def _why_malformed(line: bytes, strict_reason: str) -> tuple[int, str]:
    """Column (in characters, from 1) and reason for a line that is no JSON value."""
    try:
        # The parser counts columns from the last newline, which is the one at the end.
        text = line.rstrip(b"\r\n").decode()
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode()) + 1
        return column, f"byte 0x{line[error.start]:02x} is not UTF-8"
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.colno, error.msg
    except RecursionError:
        return 1, "nested too deeply"
    # The lenient parser of the standard library takes what JSON does not allow (NaN, Infinity).
    for constant in ("-Infinity", "Infinity", "NaN"):
        if constant in text:
            return text.index(constant) + 1, f"{constant} is not JSON"
    return 1, strict_reason


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return type(value).__name__
