"""Slurm's short form of many host names, written out. Pure."""

import re
from collections.abc import Iterator
from typing import Final

from libra.errors import ConfigError

MAX_HOSTS: Final = 65536
_MAX_PIECE: Final = 37
"""Two numbers of 18 digits: int() of longer ones is refused by Python only after long work."""

_PART: Final = re.compile(r"([^\[\],]*)(?:\[([^\[\]]*)\])?")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """`gpu[01-03,7]-ib,login` to gpu01-ib, gpu02-ib, gpu03-ib, gpu7-ib, login.

    Raises ConfigError for what Slurm does not write, and for more than 65536 hosts.
    """
    hosts: list[str] = []
    for item in _items(text):
        for host in _expanded(item, text):
            hosts.append(host)
            if len(hosts) > MAX_HOSTS:
                raise ConfigError(f"more than {MAX_HOSTS} hosts in {text[:60]!r}")
    return tuple(hosts)


def _items(text: str) -> Iterator[str]:
    """Cut at the commas outside brackets."""
    item, depth = "", 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _refused(text)
        if letter == "," and not depth:
            yield item
            item = ""
        else:
            item += letter
    if depth:
        raise _refused(text)
    yield item


def _expanded(item: str, text: str) -> Iterator[str]:
    """Every host of one item; of several brackets the last one turns fastest, as Slurm has it."""
    if not item:
        raise _refused(text)
    match = _PART.match(item)
    if match is None or match.end() == 0:
        raise _refused(text)
    prefix, ranges = match[1], match[2]
    rest = item[match.end() :]
    for middle in _numbers(ranges, text) if ranges is not None else ("",):
        if not rest:
            yield f"{prefix}{middle}"
        else:
            yield from (f"{prefix}{middle}{tail}" for tail in _expanded(rest, text))


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None or len(piece) > _MAX_PIECE:
            raise _refused(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_HOSTS:
            raise _refused(text)
        # Leading zeros say how wide every number of the range is.
        width = len(match[1])
        yield from (f"{number:0{width}d}" for number in range(first, last + 1))


def _refused(text: str) -> ConfigError:
    return ConfigError(f"{text[:60]!r} is no list of hosts as Slurm writes them")
