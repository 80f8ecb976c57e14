"""What the supervisor and its log relay say to each other: framed msgpack over a Unix socket.

File descriptors travel beside `Attach` (supervisor to relay) and `Held` (relay to supervisor):
per child the read ends of stdout and stderr, in this order.
"""

from typing import TypeAlias

import msgspec

from libra.ids import ChildId


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Drain two pipes into the child's log; two descriptors travel with it."""

    child_id: ChildId
    log_path: str
    max_bytes: int
    num_kept: int
    """Rotated files kept beside the current one."""

    rank: int | None = None
    """Whose pipes these are, beside those that all of the child shares (None)."""


class AskTail(msgspec.Struct, frozen=True, tag=True):
    request: int
    child_id: ChildId
    num_lines: int


class AskHeld(msgspec.Struct, frozen=True, tag=True):
    """Ask for the open pipes: a supervisor that starts anew holds them from then on, too."""

    request: int


RelayCommand: TypeAlias = Attach | AskTail | AskHeld


class Tail(msgspec.Struct, frozen=True, tag=True):
    request: int
    lines: tuple[str, ...]


class Held(msgspec.Struct, frozen=True, tag=True):
    """Two descriptors per child travel with it; a stream that has ended comes as /dev/null."""

    request: int
    children: tuple[Attach, ...]


class SinkFailed(msgspec.Struct, frozen=True, tag=True):
    child_id: ChildId
    reason: str
    dropped_bytes: int


class SinkRecovered(msgspec.Struct, frozen=True, tag=True):
    child_id: ChildId
    dropped_bytes: int


RelayReport: TypeAlias = Tail | Held | SinkFailed | SinkRecovered
