"""A reader of the Prometheus text format that parses only the series it is asked for. Pure.

A vLLM page has a thousand lines, most of them histogram buckets, and is read every few seconds
from every server; the wanted dozen is picked by name before anything is parsed.
"""

import math
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from types import MappingProxyType

import msgspec

_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPED = re.compile(r"\\(.)")
_UNESCAPED = {"n": "\n", '"': '"', "\\": "\\"}

MAX_REMEMBERED_CHARS = 8192
"""Longest set of labels that is kept for the next page; the longest of vLLM's has 1500."""


class Sample(msgspec.Struct, frozen=True):
    labels: Mapping[str, str]
    value: float


class _Labels(msgspec.Struct, frozen=True):
    value_of: Mapping[str, str]
    end: int
    """Where they end in the text that they were read from."""


def read_samples(text: str, names: Collection[str]) -> dict[str, list[Sample]]:
    """Samples of the series in `names`; a series that is absent from the page has no key.

    NaN says "no value" and is dropped, and so is a line that is not of the format: what cannot be
    read is unknown, not 0. A name is matched whole: `x` is not `x_created` or `x_total`. Of lines
    with the same labels the last one counts.
    """
    if not names:
        return {}
    rows: dict[str, list[Sample]] = {}
    for name, rest in _pattern_of(frozenset(names)).findall("\n" + text):
        sample = _sample(rest)
        if sample is not None:
            rows.setdefault(name, []).append(sample)
    return {name: _last_of_each_series(samples) for name, samples in rows.items()}


@lru_cache(maxsize=64)
def _pattern_of(names: frozenset[str]) -> re.Pattern[str]:
    """Finds lines that begin with one of `names` as a whole word: the name and what follows it.

    One pass over the page. Names are grouped by what is before their colon: nearly every line of a
    page begins with `vllm:`, and must not be compared with it once for each name.
    """
    rests_of: dict[str, list[str]] = {}
    for name in names:
        family, colon, rest = name.rpartition(":")
        rests_of.setdefault(family + colon, []).append(re.escape(rest))
    families = [f"{re.escape(f)}(?:{'|'.join(rests)})" for f, rests in rests_of.items()]
    return re.compile(rf"\n({'|'.join(families)})([{{ \t][^\n]*)")


def _last_of_each_series(samples: list[Sample]) -> list[Sample]:
    if len(samples) == 1:
        return samples
    return list({frozenset(s.labels.items()): s for s in samples}.values())


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
    labels = _labels(rest)
    if labels is None:
        return None
    fields = rest[labels.end :].split()
    try:
        value = float(fields[0])
    except (IndexError, ValueError):
        return None
    return None if math.isnan(value) else Sample(labels.value_of, value)


def _labels(rest: str) -> _Labels | None:
    """Read the labels that `rest` begins with; None when they are not of the format.

    A series keeps its labels, so their text is taken for a key. It ends where a page usually has
    a brace and a space. When these are within a label, nothing is found and the line is read whole.
    """
    likely = rest[: rest.find("} ") + 1]
    known = _labels_again(likely) if 0 < len(likely) <= MAX_REMEMBERED_CHARS else None
    return known or _read_labels(rest)


def _read_labels(rest: str) -> _Labels | None:
    labels: dict[str, str] = {}
    if not rest.startswith("{"):
        return _Labels(labels, 0)
    at = 1
    while match := _LABEL.match(rest, at):
        labels[match[1]] = _ESCAPED.sub(lambda m: _UNESCAPED.get(m[1], m[0]), match[2])
        at = match.end()
    if rest[at : at + 1] != "}":
        return None
    # Read-only, since one set of labels is in the samples of many pages.
    return _Labels(MappingProxyType(labels), at + 1)


_labels_again = lru_cache(maxsize=1024)(_read_labels)
