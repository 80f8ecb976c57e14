"""An option's meaning, type and default in words, from its struct."""

import ast
import inspect as source_inspect
import json
from collections.abc import Mapping
from functools import cache
from math import isinf
from textwrap import dedent
from typing import Any

import msgspec
from msgspec import inspect

from libra.config.base import INFINITY, PATH
from libra.config.document import ListNode, Scalar, parse_document
from libra.config.nodes import NodeAddress
from libra.config.problems import Place


@cache
def field_docs(cls: type[msgspec.Struct]) -> Mapping[str, str]:
    """Docstring below each field of `cls`, in one line."""
    tree = ast.parse(dedent(source_inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)  # noqa: S101 - the source of a class is one
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def type_words(kind: inspect.Type) -> str:
    """Type and range of an option."""
    extra: Mapping[str, Any] = {}
    if isinstance(kind, inspect.Metadata):
        extra = kind.extra or {}
        kind = kind.type
    match kind:
        case inspect.UnionType(types=types):
            return " or ".join(type_words(member) for member in types)
        case inspect.IntType():
            return f"integer{_range(kind)}"
        case inspect.FloatType():
            return f"number{_range(kind)}{' or `.inf`' if INFINITY in extra else ''}"
        case inspect.StrType():
            return "path" if PATH in extra else "text"
        case inspect.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in values)
        case _:
            return _container_words(kind)


def _container_words(kind: inspect.Type) -> str:
    match kind:
        case inspect.ListType(item_type=item):
            return f"list of {type_words(item)}"
        case inspect.DictType(value_type=inspect.AnyType()):
            return "mapping of anything"
        case inspect.DictType(key_type=key, value_type=value):
            return f"mapping from {type_words(key)} to {type_words(value)}"
        case inspect.StructType(cls=cls):
            short = "text or " if cls is NodeAddress else ""
            return f"{short}`{{{', '.join(field_docs(cls))}}}`"
        case inspect.BoolType():
            return "`true`, `false`"
        case inspect.NoneType():
            return "null"
        case _:
            raise TypeError(f"no words for {kind}")


def value_words(value: Any) -> str:
    """Value as YAML writes it on one line, in backquotes."""
    if value is msgspec.NODEFAULT:
        return "required"
    if value == "":
        return "empty"
    return f"`{yaml_words(value)}`"


def yaml_words(value: Any) -> str:
    """Value as YAML writes it on one line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return f"{'-' if value < 0 else ''}.inf" if isinf(value) else _float_words(value)
        case list():
            return f"[{', '.join(yaml_words(item) for item in value)}]"
        case dict():
            pairs = (f"{key}: {yaml_words(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        case str():
            return value if reads_as_itself(value) else json.dumps(value, ensure_ascii=False)
        case _:
            return str(value)


def _float_words(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def reads_as_itself(text: str) -> bool:
    """Whether YAML takes `text` for exactly this text, without quotes, inside a list too."""
    node, problems = parse_document(f"[{text}]", Place(""))
    if problems or not isinstance(node, ListNode) or len(node.items) != 1:
        return False
    item = node.items[0]
    return isinstance(item, Scalar) and item.is_plain and item.value == text


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    bounds = (("from", kind.ge), ("above", kind.gt), ("to", kind.le), ("under", kind.lt))
    return "".join(f" {word} {limit:g}" for word, limit in bounds if limit is not None)
