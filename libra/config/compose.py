"""Several files and overrides to one tree: the nearer wins, mappings merge key by key.

`base_config`, `hardware_config` and `model_arch_config` name files relative to the file that
names them. An empty mapping `{}` clears what the files below it said.
"""

from collections.abc import Mapping, Sequence
from os.path import normpath
from pathlib import Path

import msgspec

from libra.config.document import MAX_DEPTH, ListNode, MapNode, Node, Scalar, parse_document
from libra.config.files import Files
from libra.config.problems import Place, Problem

BASE_KEY = "base_config"
SECTION_OF_REFERENCE = {"hardware_config": "hardware", "model_arch_config": "model_arch"}
"""Keys that name a file, and the section which that file fills."""

COMPOSITION_DOCS: Mapping[str, str] = {
    BASE_KEY: "File, or list of files, below this one: mappings merge key by key, this file wins.",
    "hardware_config": "File that fills `hardware`: over what base files say there, under what this"
    " file says. The nearest one named is read; null takes back what base files said.",
    "model_arch_config": "File that fills `model_arch`, in the same way.",
}
MAX_INDEX_DIGITS = 18
MAX_FILES_READ = 100
"""Counted with repetition: files that name a base twice would double the reading level by level."""


class Composed(msgspec.Struct, frozen=True, kw_only=True):
    """What composition found."""

    tree: MapNode
    problems: tuple[Problem, ...]
    sources: tuple[str, ...]
    """Files read, in the order of first reading."""

    is_whole: bool
    """Every file that is named could be read; else options may seem to be missing."""


def compose(
    path: Path,
    files: Files,
    *,
    environment: MapNode,
    overrides: Sequence[MapNode],
    home: str | None = None,
) -> Composed:
    """Tree of `path`, under `environment`, under `overrides`. Problems instead of errors.

    `home` is what `~/` stands for where a file is named.
    """
    composer = _Composer(files, home)
    layers = composer.read(path, named_by=None, chain=())
    place = layers.tree.place
    for layer in (environment, *overrides):
        layers = _over(layers, _Layers(composer.without_base(layer), {}))
    # What nobody set is missing in the file, not in the last override.
    tree = MapNode(composer.with_references(layers).entries, place)
    return Composed(
        tree=tree,
        problems=tuple(composer.problems),
        sources=tuple(composer.sources),
        is_whole=composer.is_whole,
    )


def parse_override(text: str, working_directory: str) -> tuple[MapNode, tuple[Problem, ...]]:
    """`a.b=VALUE` as a tree with one leaf; VALUE is YAML. A segment of digits is a number."""
    # Bytes of a command line that are no text would make the message unprintable.
    shown = text.encode("utf-8", "backslashreplace").decode()
    place = Place(f"-o {shown}", None, working_directory)
    key, equals, value_text = text.partition("=")
    segments = key.strip().split(".")
    what = "" if equals and all(segments) else "an override is KEY=VALUE, the key a dotted path"
    if len(segments) > MAX_DEPTH:
        what = f"nested more than {MAX_DEPTH} levels deep"
    if what:
        return MapNode({}, place), (Problem(path=key, what=what, place=place),)
    node, problems = parse_document(value_text, place, lines_matter=False)
    path = key.strip()
    named = tuple(msgspec.structs.replace(found, path=found.path or path) for found in problems)
    if named and isinstance(node, Scalar):
        # Nothing was read; the null in its place would be one more problem.
        return MapNode({}, place), named
    for segment in reversed(segments):
        node = MapNode({int(segment) if _is_index(segment) else segment: node}, place)
    return node if isinstance(node, MapNode) else MapNode({}, place), named


def merge(far: Node, near: Node) -> Node:
    """`near` over `far`. Two mappings merge key by key, unless `near` is empty: that clears."""
    if not (isinstance(far, MapNode) and isinstance(near, MapNode) and near.entries):
        return near
    return _merge_entries(far, near)


def _merge_entries(far: MapNode, near: MapNode) -> MapNode:
    entries = dict(far.entries)
    for key, node in near.entries.items():
        entries[key] = merge(entries[key], node) if key in entries else node
    return MapNode(entries, near.place)


def _is_index(segment: str) -> bool:
    return segment.isascii() and segment.isdigit() and len(segment) <= MAX_INDEX_DIGITS


class _Layers(msgspec.Struct, frozen=True):
    """Files merged so far; what they name for a section is read when all are merged."""

    tree: MapNode
    below: dict[str, Node | None]
    """By section: what farther files said there than the one that names the section's file."""


def _over(far: _Layers, near: _Layers) -> _Layers:
    entries, below = dict(far.tree.entries), dict(far.below)
    for key, section in SECTION_OF_REFERENCE.items():
        if key in near.tree.entries:
            said = (far.below.get(section), entries.pop(section, None), near.below.get(section))
            below[section] = _merged(said)
    return _Layers(_merge_entries(MapNode(entries, far.tree.place), near.tree), below)


def _merged(parts: Sequence[Node | None]) -> Node | None:
    """Each part over the ones before it; None says nothing."""
    whole: Node | None = None
    for part in parts:
        if part is not None:
            whole = part if whole is None else merge(whole, part)
    return whole


class _Composer:
    def __init__(self, files: Files, home: str | None) -> None:
        self.problems: list[Problem] = []
        self.sources: list[str] = []
        self._files = files
        self._home = home
        self._num_read = 0
        self.is_whole = True

    def read(self, path: Path, *, named_by: Problem | None, chain: tuple[str, ...]) -> _Layers:
        """Read the mapping in `path`, its bases below it; empty when there is none.

        `named_by` is an empty problem at the place that names the file; None for the first one.
        """
        directory = self._files.directory_of(path)
        source = path.as_posix()
        identity = f"{directory}/{path.name}"
        origin = named_by or Problem(path="", what="", place=Place(source, None, directory))
        if identity in chain:
            cycle = " -> ".join([*chain[chain.index(identity) :], identity])
            self._report_lost(origin, f"the files name each other in a cycle: {cycle}")
            return _Layers(MapNode({}, Place(source, None, directory)), {})
        self._num_read += 1
        if self._num_read > MAX_FILES_READ:
            if self._num_read == MAX_FILES_READ + 1:
                what = f"more than {MAX_FILES_READ} files to read, repetitions too"
                self._report_lost(origin, what)
            return _Layers(MapNode({}, Place(source, None, directory)), {})
        node = self._parse(path, Place(source, None, directory), origin)
        return self._with_bases(node, (*chain, identity))

    def without_base(self, layer: MapNode) -> MapNode:
        """Refuse `base_config` in an override: there is no file for a base to be under."""
        if BASE_KEY not in layer.entries:
            return layer
        origin = Problem(path=BASE_KEY, what="", place=layer.place)
        self._report(origin, "cannot be overridden", hint="name that file as CONFIG")
        return MapNode({k: v for k, v in layer.entries.items() if k != BASE_KEY}, layer.place)

    def with_references(self, layers: _Layers) -> MapNode:
        """The tree with `hardware_config` and `model_arch_config` read into their sections."""
        entries = dict(layers.tree.entries)
        for key, section in SECTION_OF_REFERENCE.items():
            node = entries.pop(key, None)
            named = [
                self.with_references(self.read(path, named_by=origin, chain=()))
                for path, origin in self._named_files(key, node)
            ]
            # `hardware_config: null` takes back what farther files said, named or not.
            far = (layers.below.get(section), *named) if named else ()
            whole = _merged((*far, entries.pop(section, None)))
            if whole is not None:
                entries[section] = whole
        return MapNode(entries, layers.tree.place)

    def _with_bases(self, node: MapNode, chain: tuple[str, ...]) -> _Layers:
        entries = dict(node.entries)
        bases = self._named_files(BASE_KEY, entries.pop(BASE_KEY, None))
        layers = _Layers(MapNode({}, node.place), {})
        for base, origin in bases:
            layers = _over(layers, self.read(base, named_by=origin, chain=chain))
        return _over(layers, _Layers(MapNode(entries, node.place), {}))

    def _named_files(self, key: str, node: Node | None) -> list[tuple[Path, Problem]]:
        """Paths that `node` names, each with an empty problem at its place."""
        if node is None:
            return []
        items = node.items if key == BASE_KEY and isinstance(node, ListNode) else (node,)
        found: list[tuple[Path, Problem]] = []
        for item in items:
            origin = Problem(path=key, what="", place=item.place)
            match item:
                case Scalar(value=None) | Scalar(value=""):
                    pass
                case Scalar(value=str(text)):
                    found.append((_beside(item.place, text, self._home), origin))
                case _:
                    self._report_lost(origin, "wants the path of a file")
        return found

    def _parse(self, path: Path, place: Place, origin: Problem) -> MapNode:
        empty = MapNode({}, place)
        try:
            text = self._files.read_text(path)
        except OSError as exc:
            self._report_lost(origin, f"cannot read {path}: {exc.strerror or exc}")
            return empty
        except ValueError as exc:
            self._report_lost(origin, f"cannot read {path}: {exc}")
            return empty
        if place.source not in self.sources:
            self.sources.append(place.source)
        node, problems = parse_document(text, place)
        self.problems += problems
        match node:
            case MapNode():
                return node
            case Scalar(value=None):
                self.is_whole = self.is_whole and not problems
                return empty
            case _:
                self.is_whole = False
                what = "the document is not a mapping of options"
                self.problems.append(Problem(path="", what=what, place=node.place))
                return empty

    def _report_lost(self, origin: Problem, what: str) -> None:
        """Report a file whose options are missing from the tree."""
        self.is_whole = False
        self._report(origin, what)

    def _report(self, origin: Problem, what: str, *, hint: str = "") -> None:
        self.problems.append(msgspec.structs.replace(origin, what=what, hint=hint))


def _beside(place: Place, text: str, home: str | None) -> Path:
    """Path `text` seen from the file that says it, in the words that the user would use."""
    if text.startswith("~/") and home:
        return Path(normpath(Path(home) / text[2:]))
    directory = Path(place.directory) if place.line is None else Path(place.source).parent
    return Path(normpath(directory / text))
