"""YAML text to a tree that remembers where each value was written. Runs nothing it reads.

The scalar types are YAML 1.1's without its traps: `1:30`, `010` and dates stay text. Duplicate
keys, foreign tags, and aliases that contain themselves or multiply without end are problems.
"""

import re
from collections.abc import Iterator
from typing import TypeAlias

import msgspec
import yaml

from libra.config.problems import Place, Problem

MAX_DEPTH = 50
MAX_NODES = 100_000
MAX_NUMBER_CHARACTERS = 400
_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(
    r"^(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$"
)
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*)?\.[0-9]+(?:[eE][-+][0-9]+)?"
    r"|[-+]?[0-9][0-9_]*\.(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_TRUE_WORDS = frozenset({"yes", "true", "on"})


class Scalar(msgspec.Struct, frozen=True):
    """Text, number, boolean or null."""

    value: str | int | float | bool | None
    place: Place
    is_plain: bool = False
    """Written without quotes, so that text such as `1e-6` may have been meant as a number."""


class ListNode(msgspec.Struct, frozen=True):
    items: tuple["Node", ...]
    place: Place


class MapNode(msgspec.Struct, frozen=True):
    entries: dict[str | int, "Node"]
    """Each entry's node carries the place of its key."""

    place: Place


Node: TypeAlias = Scalar | ListNode | MapNode


class _Loader(yaml.SafeLoader):
    """Composes nodes only: no constructor of it is ever called."""

    # Its own table: the inherited one would be shared with every user of PyYAML.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Keep a written tag as it was written: such a node is of no type that we read."""
        written = getattr(self.peek_event(), "tag", None)  # type: ignore[no-untyped-call]
        node: yaml.Node | None = super().compose_node(parent, index)
        if node is not None and written is not None:
            node.tag = written.replace(_TAG, "!!", 1)
        return node


_Loader.add_implicit_resolver(f"{_TAG}null", _NULL, ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", _BOOL, list("yYnNtTfFoO"))
_Loader.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver(f"{_TAG}merge", re.compile(r"^<<$"), ["<"])


def parse_document(
    text: str, place: Place, *, lines_matter: bool = True
) -> tuple[Node, tuple[Problem, ...]]:
    """Tree of one YAML document and every problem found on the way.

    `place` names the source; nodes carry its line unless `lines_matter` is false. An empty
    document is null. What cannot be read at all is replaced by null and reported.
    """
    reader = _Reader(place, lines_matter=lines_matter)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        reader.report(f"not valid YAML: {_one_line(exc)}", line=mark.line + 1 if mark else None)
    except (yaml.YAMLError, ValueError, OverflowError) as exc:
        # PyYAML lets ValueError and OverflowError out for escapes beyond Unicode.
        reader.report(f"not valid YAML: {_one_line(exc)}", line=None)
    except RecursionError:
        reader.report("nested too deeply to be read", line=None)
    else:
        if root is not None:
            return reader.read(root, line=root.start_mark.line + 1), tuple(reader.problems)
    return Scalar(None, place), tuple(reader.problems)


def _one_line(exc: Exception) -> str:
    if isinstance(exc, yaml.MarkedYAMLError):
        return ", ".join(part for part in (exc.context, exc.problem) if part)
    return " ".join(str(exc).split())


class _Reader:
    """Turns PyYAML's nodes into ours."""

    def __init__(self, place: Place, *, lines_matter: bool) -> None:
        self.problems: list[Problem] = []
        self._place = place
        self._lines_matter = lines_matter
        self._open: set[int] = set()
        self._num_nodes = 0

    def report(self, what: str, *, line: int | None, path: str = "", hint: str = "") -> None:
        self.problems.append(Problem(path=path, what=what, hint=hint, place=self._at(line)))

    def _at(self, line: int | None) -> Place:
        if not self._lines_matter:
            return self._place
        return Place(self._place.source, line, self._place.directory)

    def read(self, node: yaml.Node, *, line: int, path: str = "") -> Node:
        """`line` is where the node belongs: its key's line inside a mapping."""
        if not self._may_enter(node, line, path):
            return Scalar(None, self._at(line))
        self._open.add(id(node))
        try:
            match node:
                case yaml.MappingNode(tag="tag:yaml.org,2002:map"):
                    return self._read_mapping(node, line, path)
                case yaml.SequenceNode(tag="tag:yaml.org,2002:seq"):
                    return self._read_list(node, line, path)
                case yaml.ScalarNode():
                    return self._read_scalar(node, line, path)
                case _:
                    self._refuse_tag(node, line, path)
                    return Scalar(None, self._at(line))
        finally:
            self._open.discard(id(node))

    def _may_enter(self, node: yaml.Node, line: int, path: str) -> bool:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            if self._num_nodes == MAX_NODES + 1:
                self.report(f"more than {MAX_NODES} values once aliases are expanded", line=line)
            return False
        if id(node) in self._open:
            self.report("an alias contains itself", line=line, path=path)
            return False
        if len(self._open) >= MAX_DEPTH:
            self.report(f"nested more than {MAX_DEPTH} levels deep", line=line, path=path)
            return False
        return True

    def _refuse_tag(self, node: yaml.Node, line: int, path: str) -> None:
        self.report(
            f"the YAML tag {node.tag!r} is not allowed", line=line, path=path, hint="remove it"
        )

    def _read_list(self, node: yaml.SequenceNode, line: int, path: str) -> ListNode:
        items = tuple(
            self.read(item, line=item.start_mark.line + 1, path=f"{path}[{index}]")
            for index, item in enumerate(node.value)
        )
        return ListNode(items, self._at(line))

    def _read_mapping(self, node: yaml.MappingNode, line: int, path: str) -> MapNode:
        entries: dict[str | int, Node] = {}
        merged: dict[str | int, Node] = {}
        line_of: dict[str | int, int] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if key_node.tag == f"{_TAG}merge":
                # Earlier merges win over later ones, and every own key over all of them.
                for source in self._merge_sources(value_node, key_line, path):
                    merged = {**source.entries, **merged}
                continue
            key = self._read_key(key_node, key_line, path)
            if key is None:
                continue
            child_path = f"{path}.{key}" if path else str(key)
            if key in entries:
                self.report(
                    f"written twice, first on line {line_of[key]}", line=key_line, path=child_path
                )
                continue
            line_of[key] = key_line
            entries[key] = self.read(value_node, line=key_line, path=child_path)
        return MapNode({**merged, **entries}, self._at(line))

    def _merge_sources(self, node: yaml.Node, line: int, path: str) -> Iterator[MapNode]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            read = self.read(source, line=line, path=path)
            if isinstance(read, MapNode):
                yield read
            else:
                self.report("`<<` merges mappings only", line=line, path=path)

    def _read_key(self, node: yaml.Node, line: int, path: str) -> str | int | None:
        if isinstance(node, yaml.ScalarNode):
            scalar = self._read_scalar(node, line, path)
            if isinstance(scalar.value, str) or type(scalar.value) is int:
                return scalar.value
        text = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        self.report(f"{text!r} cannot be a key", line=line, path=path, hint="write it in quotes")
        return None

    def _read_scalar(self, node: yaml.ScalarNode, line: int, path: str) -> Scalar:
        try:
            value = self._value_of(node)
        except ValueError as exc:
            self.report(str(exc), line=line, path=path)
            value = None
        return Scalar(value, self._at(line), is_plain=node.style is None)

    def _value_of(self, node: yaml.ScalarNode) -> str | int | float | bool | None:
        text: str = node.value
        match node.tag.removeprefix(_TAG):
            case "str":
                return _checked_text(text)
            case "null" if _NULL.fullmatch(text):
                return None
            case "bool" if _BOOL.fullmatch(text):
                return text.lower() in _TRUE_WORDS
            case "int" if _INT.match(text):
                return int(_checked_number(text), 0)
            case "float" if _FLOAT.match(text) or _INT.match(text):
                return _float(_checked_number(text))
            case _:
                raise ValueError(f"the YAML tag {node.tag!r} is not allowed on {text[:40]!r}")


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no text") from None
    if "\0" in text:
        raise ValueError("holds a NUL character")
    return text


def _checked_number(text: str) -> str:
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise ValueError(f"a number of {len(text)} characters")
    return text.replace("_", "")


def _float(text: str) -> float:
    lowered = text.lower()
    if lowered.endswith((".inf", ".nan")):
        return float(lowered.replace(".", ""))
    return float(int(text, 0)) if text.lower().startswith(("0x", "-0x", "+0x")) else float(text)
