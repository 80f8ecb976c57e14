"""JSON Schema of a configuration file, so that editors complete and check it."""

from collections.abc import Iterator
from math import isinf
from typing import Any

import msgspec
from msgspec import inspect

from libra.config.compose import BASE_KEY, COMPOSITION_DOCS, SECTION_OF_REFERENCE
from libra.config.nodes import NodeAddress
from libra.config.run import RunConfig
from libra.config.surface import FLAT_SECTIONS, Option, all_options, section_types
from libra.config.wording import field_docs


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a configuration file, for editors.

    Required options are not marked: a file that others build on may leave them out.
    """
    (_, *_), definitions = msgspec.json.schema_components([RunConfig])
    properties: dict[str, Any] = {
        BASE_KEY: {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            "description": COMPOSITION_DOCS[BASE_KEY],
        }
    }
    for key in SECTION_OF_REFERENCE:
        properties[key] = {"type": "string", "description": COMPOSITION_DOCS[key]}
    root = definitions.pop(RunConfig.__name__)
    for section, kind in section_types().items():
        if section in FLAT_SECTIONS:
            properties.update(definitions.pop(kind.cls.__name__)["properties"])
        else:
            properties[section] = root["properties"][section]
    described = {option.path: option for option in all_options().values()}
    for name, schema in properties.items():
        if name in described:
            _describe(schema, described[name])
    for cls in _nested_structs():
        _describe_struct(definitions[cls.__name__], cls)
    _describe_struct(definitions[NodeAddress.__name__], NodeAddress)
    address = definitions[NodeAddress.__name__]
    definitions[NodeAddress.__name__] = {"anyOf": [{"type": "string"}, address]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Libra run configuration",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }


def _describe(schema: dict[str, Any], option: Option) -> None:
    schema["description"] = field_docs(option.owner)[option.name]
    if isinstance(schema.get("default"), float) and isinf(schema["default"]):
        # JSON has no infinity; the description says it.
        del schema["default"]


def _describe_struct(schema: dict[str, Any], cls: type[msgspec.Struct]) -> None:
    schema.pop("required", None)
    for name, text in field_docs(cls).items():
        field = schema["properties"][name]
        field["description"] = text
        if isinstance(field.get("default"), float) and isinf(field["default"]):
            del field["default"]


def _nested_structs() -> Iterator[type[msgspec.Struct]]:
    pending = [kind for name, kind in section_types().items() if name not in FLAT_SECTIONS]
    while pending:
        kind = pending.pop()
        yield kind.cls
        for field in kind.fields:
            inner = field.type.item_type if isinstance(field.type, inspect.ListType) else field.type
            if isinstance(inner, inspect.StructType):
                pending.append(inner)
