"""A reader of the Prometheus text format that parses only the series it is asked for. Pure.

A vLLM page has a thousand lines, most of them histogram buckets, and is read every few seconds
from every server; the wanted dozen is picked by name before anything is parsed.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping

import msgspec

_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPED = re.compile(r"\\(.)")
_UNESCAPED = {"n": "\n", '"': '"', "\\": "\\"}


class Sample(msgspec.Struct, frozen=True):
    labels: dict[str, str]
    value: float


def read_samples(text: str, names: Collection[str]) -> dict[str, list[Sample]]:
    """Samples of the series in `names`; a series that is absent from the page has no key.

    NaN says "no value" and is dropped, and so is a line that is not of the format: what cannot be
    read is unknown, not 0. A name is matched whole: `x` is not `x_created` or `x_total`. Of lines
    with the same labels the last one counts.
    """
    # A page is searched for each name: that is several times faster than looking at each line.
    text = "\n" + text
    found: dict[str, list[Sample]] = {}
    for name in names:
        samples = [sample for rest in _rests(text, name) if (sample := _sample(rest)) is not None]
        if len(samples) > 1:
            samples = list({frozenset(s.labels.items()): s for s in samples}.values())
        if samples:
            found[name] = samples
    return found


def _rests(text: str, name: str) -> Iterator[str]:
    """What follows `name` on each line that begins with it as a whole word."""
    begin = "\n" + name
    at = text.find(begin)
    while at >= 0:
        at += len(begin)
        end = text.find("\n", at)
        rest = text[at:] if end < 0 else text[at:end]
        if rest.startswith(("{", " ", "\t")):
            yield rest
        at = -1 if end < 0 else text.find(begin, end)


def total(samples: Mapping[str, list[Sample]], name: str, **labels: str) -> float | None:
    """Sum over the samples whose labels include `labels`; None when there is none."""
    values = _values(samples, name, labels)
    return math.fsum(values) if values else None


def largest(samples: Mapping[str, list[Sample]], name: str, **labels: str) -> float | None:
    return max(_values(samples, name, labels), default=None)


def _values(
    samples: Mapping[str, list[Sample]], name: str, labels: Mapping[str, str]
) -> list[float]:
    return [s.value for s in samples.get(name, ()) if labels.items() <= s.labels.items()]


def _sample(rest: str) -> Sample | None:
    """Read what follows the name: `{label="x",...} value [timestamp]`."""
    labels: dict[str, str] = {}
    at = 0
    if rest.startswith("{"):
        at = 1
        while match := _LABEL.match(rest, at):
            labels[match[1]] = _ESCAPED.sub(lambda m: _UNESCAPED.get(m[1], m[0]), match[2])
            at = match.end()
        if rest[at : at + 1] != "}":
            return None
        at += 1
    fields = rest[at:].split()
    try:
        value = float(fields[0])
    except (IndexError, ValueError):
        return None
    return None if math.isnan(value) else Sample(labels, value)
