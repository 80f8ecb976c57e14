"""Everything that can happen, one frozen struct each. Pure.

This page holds what happens to child processes; `at` is seconds on the event loop's clock.
"""

from typing import TypeAlias

import msgspec

from libra.ids import ChildId, Incarnation


class ChildStarted(msgspec.Struct, frozen=True, tag=True):
    """The process exists; it is not ready yet unless it was adopted."""

    child_id: ChildId
    pid: int
    start_ticks: int
    """With the pid and the boot id it proves who the process is."""

    incarnation: Incarnation
    at: float
    is_adopted: bool = False


class ChildWaiting(msgspec.Struct, frozen=True, tag=True):
    """A start is put off (a device is still busy). Costs nothing of the restart budget."""

    child_id: ChildId
    reason: str
    at: float


class ChildReady(msgspec.Struct, frozen=True, tag=True):
    child_id: ChildId
    incarnation: Incarnation
    start_s: float
    """From spawn to ready; 0 for an adopted process."""

    at: float


class ChildSuspected(msgspec.Struct, frozen=True, tag=True):
    """The process runs but does not do its work (start deadline missed, hang); it will be ended."""

    child_id: ChildId
    incarnation: Incarnation
    reason: str
    at: float


class ChildExited(msgspec.Struct, frozen=True, tag=True):
    """The process and all its descendants are gone, or named in a ChildUnkillable before this."""

    child_id: ChildId
    incarnation: Incarnation
    exit_code: int | None
    signal: int | None
    """Both None: the process was adopted, so its status went to another parent."""

    asked_for: bool
    """False is a failure, exit code 0 included."""

    reason: str
    """A sentence: `exited with code 1`, `killed by SIGKILL (out of memory)`, ..."""

    last_lines: tuple[str, ...]
    at: float


class ChildRestartScheduled(msgspec.Struct, frozen=True, tag=True):
    child_id: ChildId
    delay_s: float
    num_recent_restarts: int
    """Restarts within the intensity window, this one included."""

    at: float


class ChildGaveUp(msgspec.Struct, frozen=True, tag=True):
    """The restart budget is spent; the child stays down."""

    child_id: ChildId
    reason: str
    first_cause: str
    num_failures: int
    last_lines: tuple[str, ...]
    at: float


class ChildUnkillable(msgspec.Struct, frozen=True, tag=True):
    """Processes that outlived SIGKILL; what they hold (devices, ports) must not be used again."""

    child_id: ChildId
    incarnation: Incarnation
    pids: tuple[int, ...]
    detail: str
    at: float


class LogSinkFailing(msgspec.Struct, frozen=True, tag=True):
    """A child's log cannot be written; the child goes on and what it prints is dropped."""

    child_id: ChildId
    reason: str
    dropped_bytes: int
    at: float


class LogSinkRecovered(msgspec.Struct, frozen=True, tag=True):
    child_id: ChildId
    dropped_bytes: int
    """Bytes lost since the sink began to fail; the log file says so too."""

    at: float


ChildEvent: TypeAlias = (
    ChildStarted
    | ChildWaiting
    | ChildReady
    | ChildSuspected
    | ChildExited
    | ChildRestartScheduled
    | ChildGaveUp
    | ChildUnkillable
    | LogSinkFailing
    | LogSinkRecovered
)
