"""Our own events: one JSON line each in the control log, one human line each on stderr.

    set_up_logging(path, human=sys.stderr, run_id=...)
    log = get_log()
    log.warning("child_exited", child_id="vllm-0", reason="exited with code 1")

An event's name is fixed and in snake_case; what varies is in fields. A sentence in place of a
name is kept as `message` under the name `remark`. Warnings of libraries that use the standard
`logging` arrive as `library_log`.
"""

import logging
import os
import re
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import msgspec
import structlog

from libra import clock

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_NS_PER_S: Final = 1_000_000_000
_HUMAN_SKIPS: Final = frozenset({"at", "level", "event", "run_id", "role", "message", "instances"})
"""Said elsewhere in the line, or (`instances`) tables for programs."""

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

EventDict: TypeAlias = MutableMapping[str, Any]
Show: TypeAlias = Callable[[str], None]
"""Takes one human line, without its newline."""


class EventLog:
    """Where events go. A disk that refuses costs the line and is counted, never raised."""

    def __init__(self, path: Path | None, show: Show | None) -> None:
        self.num_lost = 0
        self._show = show
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._fd: int | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o640)

    def write(self, event: EventDict) -> None:
        if self._fd is not None:
            line = self._encoded(event) + b"\n"
            try:
                is_whole = os.write(self._fd, line) == len(line)
            except OSError:
                is_whole = False
            self.num_lost += not is_whole
        if self._show is not None:
            self._show(human_line(event))

    def _encoded(self, event: EventDict) -> bytes:
        try:
            return self._encoder.encode(event)
        except (ValueError, TypeError, OverflowError, RecursionError):
            # What a user's exception or a file's name holds need not be text.
            return self._encoder.encode({name: _as_text(value) for name, value in event.items()})

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def set_up_logging(
    path: Path | None, *, show: Show | None = None, level: str = "info", **bound: str
) -> EventLog:
    """Send every event to `path` as JSON and to `show` as text; `bound` is on each of them.

    What is below `level` (debug, info, warning, error, critical) goes nowhere.
    """
    event_log = EventLog(path, show)
    threshold = _LEVELS[level]

    def emit(_logger: object, method: str, event: EventDict) -> EventDict:
        event_log.write(_completed(event, method, bound))
        raise structlog.DropEvent

    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, emit],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_FromLogging()]
    root.setLevel(max(threshold, logging.WARNING))
    return event_log


def get_log(**bound: Any) -> structlog.typing.FilteringBoundLogger:
    """A logger whose events carry `bound`, such as child_id or rank."""
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger(**bound))


def human_line(event: EventDict) -> str:
    """`12:30:01 WARNING child_exited child_id=vllm-0 reason="exited with code 1"`."""
    moment = str(event["at"])[11:19]
    level = "" if event["level"] == "info" else f"{str(event['level']).upper()} "
    words = [event["message"]] if "message" in event else []
    words += [f"{k}={_shown(v)}" for k, v in event.items() if k not in _HUMAN_SKIPS]
    return f"{moment} {level}{event['event']} {' '.join(words)}".rstrip()


class _FromLogging(logging.Handler):
    """Carries records of the standard `logging` over."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "warning" if record.levelno < logging.ERROR else "error"
        fields: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = logging.Formatter().formatException(record.exc_info)
        getattr(get_log(), level)("library_log", **fields)


def _completed(event: EventDict, method: str, bound: dict[str, str]) -> EventDict:
    name = str(event.pop("event"))
    fields: dict[str, Any] = {"at": _now_text(), "level": method, "event": name, **bound, **event}
    if not _NAME.fullmatch(name):
        fields |= {"event": "remark", "message": name}
    return fields


def _now_text() -> str:
    seconds, ns = divmod(clock.wall_ns(), _NS_PER_S)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ns // 1_000_000:03d}Z"


def _as_text(value: object) -> str:
    return str(value).encode(errors="backslashreplace").decode()


def _shown(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text or not text else text
