"""The options as users write them: which keys are flat, which are nested, and what each holds."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import inspect

from libra.config.run import RunConfig

FLAT_SECTIONS: Final = (
    "model",
    "control",
    "data",
    "evaluation",
    "training",
    "megatron",
    "algorithm",
    "rollout",
    "weights",
    "tracing",
    "cluster",
)
"""Sections of RunConfig whose fields are top-level keys; the names of these are no keys."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One value that a user may write."""

    path: str
    """Dotted, as in YAML."""

    owner: type[msgspec.Struct]
    """The struct that holds it."""

    field: inspect.Field

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def default(self) -> Any:
        """`msgspec.NODEFAULT` for an option that must be written."""
        if self.field.default_factory is not msgspec.NODEFAULT:
            return self.field.default_factory()
        return self.field.default


@cache
def section_types() -> Mapping[str, inspect.StructType]:
    """Type of each section of RunConfig by its field's name."""
    return {field.name: struct_of(field.type) for field in _fields(RunConfig)}


@cache
def flat_options() -> Mapping[str, Option]:
    """Top-level options by name."""
    return {
        field.name: Option(path=field.name, owner=section_types()[section].cls, field=field)
        for section in FLAT_SECTIONS
        for field in section_types()[section].fields
    }


@cache
def nested_sections() -> Mapping[str, inspect.StructType]:
    """Top-level sections by name."""
    return {name: kind for name, kind in section_types().items() if name not in FLAT_SECTIONS}


@cache
def all_options() -> Mapping[str, Option]:
    """Every option by dotted path. What a list of structs holds is part of the list's option."""
    options = dict(flat_options())
    for name, kind in nested_sections().items():
        options.update(_options_below(name, kind))
    return options


def _options_below(prefix: str, kind: inspect.StructType) -> dict[str, Option]:
    options: dict[str, Option] = {}
    for field in kind.fields:
        path = f"{prefix}.{field.name}"
        if isinstance(field.type, inspect.StructType):
            options.update(_options_below(path, field.type))
        else:
            options[path] = Option(path=path, owner=kind.cls, field=field)
    return options


def paths_named(name: str) -> list[str]:
    """Full paths of the options whose last segment is `name`."""
    return [path for path in all_options() if path.rpartition(".")[2] == name]


def value_of(config: RunConfig, path: str) -> Any:
    """Value of the option at a dotted path of `all_options`; None inside an absent section."""
    value: Any = config
    first = path.partition(".")[0]
    if first in flat_options():
        value = getattr(config, section_of(first))
    for segment in path.split("."):
        if value is None:
            return None
        value = getattr(value, segment)
    return value


@cache
def section_of(name: str) -> str:
    """Section of RunConfig that holds a flat option."""
    return next(
        section
        for section in FLAT_SECTIONS
        if any(field.name == name for field in section_types()[section].fields)
    )


def struct_of(kind: inspect.Type) -> inspect.StructType:
    """Struct behind a field that is one, or is one or null."""
    match kind:
        case inspect.StructType():
            return kind
        case inspect.UnionType(types=types):
            return next(member for member in types if isinstance(member, inspect.StructType))
        case _:
            raise TypeError(f"no section: {kind}")


def _fields(cls: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    kind = inspect.type_info(cls)
    assert isinstance(kind, inspect.StructType)  # noqa: S101 - type_info of a Struct is one
    return kind.fields
