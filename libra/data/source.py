"""Where rows come from: what every reader promises."""

from typing import Any, Protocol, TypeAlias

import msgspec

Record: TypeAlias = dict[str, Any]


class BadRow(msgspec.Struct, frozen=True):
    """A row that cannot be used, and why."""

    location: str
    """`path:line:column` for text, `path:row N` for tables."""

    reason: str


class RowSource(Protocol):
    """Rows in the order of the file. A row is looked at when asked for, not before."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the content does."""

    def __len__(self) -> int: ...

    def record(self, index: int) -> Record | BadRow: ...

    def location(self, index: int) -> str:
        """Where row `index` is, in words an editor understands."""
