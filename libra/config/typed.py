"""The merged tree to RunConfig: every key and every value checked, every problem kept.

Strict: text is never taken for a number, except plain `1e-6` where a float is wanted, which YAML
1.1 reads as text.
"""

import re
from collections.abc import Iterator, Mapping
from math import inf, isinf, isnan
from operator import ge, gt, le, lt
from os.path import normpath
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from libra.config.base import INFINITY, PATH
from libra.config.document import ListNode, MapNode, Node, Scalar
from libra.config.nodes import NodeAddress, split_address
from libra.config.problems import Place, Problem, did_you_mean
from libra.config.run import RunConfig
from libra.config.surface import (
    FLAT_SECTIONS,
    all_options,
    flat_options,
    nested_sections,
    paths_named,
    section_types,
)

_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
_NUMBER = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$")
_DIGITS = re.compile(r"[0-9]")
MAX_LISTED_LEAVES = 20
MAX_SUGGESTIONS = 100
"""Each takes a millisecond, and a file with more unknown options is no configuration."""


class _Invalid:
    """Stands for a value that was reported and cannot be used."""


_INVALID: Final = _Invalid()


class Typed(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration in which each broken option holds its default."""

    config: RunConfig
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    place_of: dict[str, Place]
    """Where each option that somebody wrote was written."""


def to_config(tree: MapNode, *, home: str | None, is_whole: bool = True) -> Typed:
    """Check `tree` against every section. Never raises for what a user wrote.

    With `is_whole` false a file is missing from the tree, so that nothing is said of options that
    nobody set.
    """
    converter = _Converter(home, is_whole=is_whole)
    values = converter.run(tree)
    return Typed(
        config=msgspec.convert(values, RunConfig, strict=True),
        problems=tuple(converter.problems),
        warnings=tuple(converter.warnings),
        place_of=converter.place_of,
    )


class _Converter:
    def __init__(self, home: str | None, *, is_whole: bool) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.place_of: dict[str, Place] = {}
        self._home = home
        self._is_whole = is_whole
        self._num_suggestions = 0

    def run(self, tree: MapNode) -> dict[str, Any]:
        """Values by section, for `msgspec.convert`; broken and absent ones are left out."""
        values: dict[str, Any] = {section: {} for section in FLAT_SECTIONS}
        for key, node in tree.entries.items():
            if key not in flat_options() and key not in nested_sections():
                self._report_unknown(str(key), node, _names_at_top())
        for section in FLAT_SECTIONS:
            self._fields(section_types()[section], tree, "", values[section])
        for name, kind in nested_sections().items():
            if name in tree.entries:
                value = self._section(kind, tree.entries[name], name)
                if not isinstance(value, _Invalid):
                    values[name] = value
        values["model"].setdefault("model_path", "")
        return values

    def _section(self, kind: inspect.StructType, node: Node, path: str) -> Any:
        """Fields of a nested section; invalid when the section cannot be built without them."""
        if not isinstance(node, MapNode):
            self._report(path, f"wants a mapping of options, got {_say(node)}", node.place)
            return _INVALID
        self.place_of[path] = node.place
        known = [field.name for field in kind.fields]
        for key, child in node.entries.items():
            if key not in known:
                self._report_unknown(f"{path}.{key}", child, [f"{path}.{name}" for name in known])
        values: dict[str, Any] = {}
        complete = self._fields(kind, node, f"{path}.", values)
        return values if complete else _INVALID

    def _fields(
        self, kind: inspect.StructType, node: MapNode, prefix: str, values: dict[str, Any]
    ) -> bool:
        """Put what is written and right into `values`; false if a required field is missing."""
        complete = True
        for field in kind.fields:
            path = f"{prefix}{field.name}"
            child = node.entries.get(field.name)
            value: Any = _INVALID
            if child is not None:
                self.place_of[path] = child.place
                value = self._value(field.type, child, path)
            elif field.required and self._is_whole:
                self._report(path, "is required and not set", node.place)
            if not isinstance(value, _Invalid):
                values[field.name] = value
            elif field.required:
                complete = False
        return complete

    def _value(self, kind: inspect.Type, node: Node, path: str) -> Any:  # noqa: C901, PLR0911, PLR0912 - one row for each kind of type
        extra: Mapping[str, Any] = {}
        if isinstance(kind, inspect.Metadata):
            extra = kind.extra or {}
            kind = kind.type
        match kind:
            case inspect.UnionType(types=types):
                if isinstance(node, Scalar) and node.value is None:
                    return None
                inner = next(member for member in types if not isinstance(member, inspect.NoneType))
                return self._value(inner, node, path)
            case inspect.StructType():
                return self._section(kind, _long_form(kind, node), path)
            case inspect.ListType(item_type=item_type):
                return self._list(item_type, node, path)
            case inspect.DictType(value_type=inspect.AnyType()):
                return self._free_mapping(node, path)
            case inspect.DictType():
                return self._mapping(kind, node, path)
            case inspect.IntType():
                return self._int(kind, node, path)
            case inspect.FloatType():
                return self._float(kind, node, path, may_be_infinite=INFINITY in extra)
            case inspect.BoolType():
                return self._scalar(bool, "true or false", node, path)
            case inspect.LiteralType(values=choices):
                return self._choice([str(choice) for choice in choices], node, path)
            case inspect.StrType():
                text = self._scalar(str, "text", node, path)
                return self._absolute(text, node.place) if PATH in extra else text
            case _:
                raise TypeError(f"{path}: no rule for {kind}")

    def _scalar(self, wanted: type, words: str, node: Node, path: str, hint: str = "") -> Any:
        if isinstance(node, Scalar) and type(node.value) is wanted:
            return node.value
        if not hint and wanted is str and isinstance(node, Scalar):
            hint = "write it in quotes" if node.value is not None else "write '' for none"
        return self._report(path, f"wants {words}, got {_say(node)}", node.place, hint)

    def _int(self, kind: inspect.IntType, node: Node, path: str) -> Any:
        hint = ""
        if isinstance(node, Scalar) and isinstance(node.value, float) and node.value.is_integer():
            hint = f"write {int(node.value)}"
        elif isinstance(node, Scalar) and _DIGITS.search(str(node.value)):
            hint = "write a decimal number without quotes or leading zeros"
        value = self._scalar(int, "a whole number", node, path, hint)
        if isinstance(value, int) and value >= 1 << 63:
            return self._report(path, "does not fit in 64 bits", node.place)
        return self._in_range(kind, value, node, path)

    def _float(
        self, kind: inspect.FloatType, node: Node, path: str, *, may_be_infinite: bool
    ) -> Any:
        value: Any = node.value if isinstance(node, Scalar) else None
        if isinstance(value, str) and node_is_plain(node) and _EXPONENT.match(value):
            value = float(value)
        if type(value) is int:
            value = float(value) if abs(value) < 1 << 1000 else inf
        if type(value) is not float:
            is_quoted = isinstance(value, str) and not node_is_plain(node)
            hint = "remove the quotes" if is_quoted and _NUMBER.match(value) else ""
            return self._report(path, f"wants a number, got {_say(node)}", node.place, hint)
        if isnan(value) or (isinf(value) and not may_be_infinite):
            return self._report(path, f"wants a finite number, got {_say(node)}", node.place)
        return self._in_range(kind, value, node, path)

    def _in_range(
        self, kind: inspect.IntType | inspect.FloatType, value: Any, node: Node, path: str
    ) -> Any:
        if isinstance(value, _Invalid):
            return value
        limits = (
            (kind.ge, ge, "at least"),
            (kind.gt, gt, "more than"),
            (kind.le, le, "at most"),
            (kind.lt, lt, "less than"),
        )
        for limit, holds, words in limits:
            if limit is not None and not holds(value, limit):
                hint = f"nearest: {limit:g}" if words in {"at least", "at most"} else ""
                what = f"must be {words} {limit:g}, got {value}"
                return self._report(path, what, node.place, hint)
        return value

    def _choice(self, choices: list[str], node: Node, path: str) -> Any:
        listed = f"one of {', '.join(choices)}"
        value = node.value if isinstance(node, Scalar) else None
        if not isinstance(value, str):
            hint = "null is not the word none" if "none" in choices else ""
            return self._report(path, f"wants {listed}, got {_say(node)}", node.place, hint)
        if value not in choices:
            hint = did_you_mean(value, choices, limit=1)
            return self._report(path, f"wants {listed}, got {value!r}", node.place, hint)
        return value

    def _list(self, item_type: inspect.Type, node: Node, path: str) -> Any:
        if not isinstance(node, ListNode):
            return self._report(path, f"wants a list, got {_say(node)}", node.place)
        items = [
            self._value(item_type, item, f"{path}[{index}]")
            for index, item in enumerate(node.items)
        ]
        return _INVALID if any(isinstance(item, _Invalid) for item in items) else items

    def _mapping(self, kind: inspect.DictType, node: Node, path: str) -> Any:
        if not isinstance(node, MapNode):
            return self._report(path, f"wants a mapping, got {_say(node)}", node.place)
        values: dict[Any, Any] = {}
        for key, child in node.entries.items():
            child_path = f"{path}.{key}"
            checked = self._value(kind.key_type, Scalar(key, child.place), child_path)
            value = self._value(kind.value_type, child, child_path)
            values[key] = _INVALID if isinstance(checked, _Invalid) else value
        broken = any(isinstance(value, _Invalid) for value in values.values())
        return _INVALID if broken else values

    def _free_mapping(self, node: Node, path: str) -> Any:
        if not isinstance(node, MapNode):
            return self._report(path, f"wants a mapping, got {_say(node)}", node.place)
        return self._free(node, path)

    def _free(self, node: Node, path: str) -> Any:
        """Arguments for user code: any values, but only such as JSON and YAML both hold."""
        match node:
            case Scalar(value=value):
                return self._free_scalar(value, node, path)
            case ListNode(items=items):
                values = [self._free(item, f"{path}[{i}]") for i, item in enumerate(items)]
                return _INVALID if any(isinstance(v, _Invalid) for v in values) else values
            case MapNode(entries=entries):
                found: dict[str, Any] = {}
                for key, child in entries.items():
                    found[str(key)] = self._free(child, f"{path}.{key}")
                    if not isinstance(key, str):
                        what = "argument names are text"
                        self._report(f"{path}.{key}", what, child.place, "write it in quotes")
                        found[str(key)] = _INVALID
                return _INVALID if any(isinstance(v, _Invalid) for v in found.values()) else found

    def _free_scalar(self, value: str | float | None, node: Scalar, path: str) -> Any:
        if isinstance(value, float) and isnan(value):
            return self._report(path, "not-a-number cannot be an argument", node.place)
        if isinstance(value, str) and node.is_plain and _EXPONENT.match(value):
            what = f"is the text {value!r}, not a number"
            hint = "write a dot and a signed exponent (1.0e-6) for a number, quotes for text"
            self.warnings.append(Problem(path=path, what=what, hint=hint, place=node.place))
        return value

    def _absolute(self, text: Any, place: Place) -> Any:
        if not isinstance(text, str) or not text:
            return text
        if text.startswith("~/") and self._home:
            return normpath(Path(self._home) / text[2:])
        return normpath(Path(place.directory) / text)

    def _report(self, path: str, what: str, place: Place | None, hint: str = "") -> _Invalid:
        self.problems.append(Problem(path=path, what=what, hint=hint, place=place))
        return _INVALID

    def _report_unknown(self, path: str, node: Node, siblings: list[str]) -> None:
        leaves = list(_leaves(node, path))
        for leaf_path, leaf in leaves[:MAX_LISTED_LEAVES]:
            self._num_suggestions += 1
            few = self._num_suggestions <= MAX_SUGGESTIONS
            hint = _suggest(leaf_path, siblings) if few else ""
            self._report(leaf_path, "unknown option", leaf.place, hint)
        if len(leaves) > MAX_LISTED_LEAVES:
            what = f"and {len(leaves) - MAX_LISTED_LEAVES} more unknown options below"
            self._report(path, what, node.place)


def _long_form(kind: inspect.StructType, node: Node) -> Node:
    """A node's address that is written as text, as the mapping it is short for."""
    if kind.cls is not NodeAddress or not isinstance(node, Scalar):
        return node
    if not isinstance(node.value, str):
        return node
    fields = split_address(node.value)
    return MapNode({name: Scalar(value, node.place) for name, value in fields.items()}, node.place)


def node_is_plain(node: Node) -> bool:
    return isinstance(node, Scalar) and node.is_plain


def _names_at_top() -> list[str]:
    return [
        *flat_options(),
        *nested_sections(),
        "base_config",
        "hardware_config",
        "model_arch_config",
    ]


def _leaves(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    if isinstance(node, MapNode) and node.entries:
        for key, child in node.entries.items():
            yield from _leaves(child, f"{path}.{key}")
    else:
        yield path, node


def _suggest(path: str, siblings: list[str]) -> str:
    """Name what was probably meant: the same name elsewhere, else a close one."""
    name = path.rpartition(".")[2]
    if elsewhere := paths_named(name):
        return f"it is written {' or '.join(elsewhere)}"
    if close := did_you_mean(path, siblings):
        return close
    names = {option.rpartition(".")[2]: option for option in all_options()}
    if close := did_you_mean(name, names, limit=1):
        return f"did you mean {names[close.removeprefix('did you mean ').removesuffix('?')]}?"
    return ""


def _say(node: Node) -> str:
    match node:
        case MapNode():
            return "a mapping"
        case ListNode():
            return "a list"
        case Scalar(value=None):
            return "null"
        case Scalar(value=bool(value)):
            return "true" if value else "false"
        case Scalar(value=str(value)):
            return f"the text {value[:60]!r}"
        case Scalar(value=value):
            return f"{value}"[:60]
