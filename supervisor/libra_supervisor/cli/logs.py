"""`libra-supervisor logs`: what the children of a run wrote, of a running one or afterwards."""

import re
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Final, Never

import anyio

from libra import clock
from libra.errors import ConfigError, InvariantError, SiteError
from libra.ids import ChildId
from libra_supervisor.process.log_reader import (
    LogLine,
    LogQuery,
    children_logged,
    follow_lines,
    read_lines,
)
from libra_supervisor.ranks.torchrun import is_of_core
from libra_supervisor.run_directory import RunDirectory

RUNS = Path("runs")
NS_PER_S: Final = 1_000_000_000
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def logs(options: Namespace) -> int:
    """Print the wanted lines in order of time; with `--follow` those to come as well."""
    root = (options.run_dir or _newest()).resolve()
    directory = RunDirectory(root).logs
    if not directory.is_dir():
        raise SiteError(f"{root} has no logs; name a run with --run-dir")
    query = LogQuery(
        directory=directory,
        child_ids=_named(directory, options),
        is_of_kind=_KINDS[options.role],
        rank=options.rank,
        since_ns=0 if options.since is None else since_ns(options.since, now_ns=clock.wall_ns()),
    )
    if options.follow:
        anyio.run(_follow, query)
    for line in read_lines(query):
        _print(line)
    return 0


async def _follow(query: LogQuery) -> Never:
    async with aclosing(follow_lines(query, with_past=True)) as lines:  # type: ignore[type-var]
        async for line in lines:
            _print(line)
            sys.stdout.flush()
    raise InvariantError("the following of logs ended by itself")


def since_ns(text: str, *, now_ns: int) -> int:
    """Wall time of `30s`, `10m`, `2h`, `1d` ago, or of a local date and time in ISO 8601.

    Raises ConfigError for anything else.
    """
    ago = re.fullmatch(r"(\d+)([smhd])", text)
    if ago is not None:
        return now_ns - int(ago[1]) * _UNIT_S[ago[2]] * NS_PER_S
    try:
        return int(datetime.fromisoformat(text).timestamp() * NS_PER_S)
    except ValueError:
        raise ConfigError(
            f"--since {text}: give 30s, 10m, 2h, 1d or a time like 2030-01-31T12:00:00"
        ) from None


def line_text(line: LogLine) -> str:
    """One line as it is printed; a time of 0 is not known."""
    at = datetime.fromtimestamp(line.at_ns / NS_PER_S).astimezone()
    time = at.strftime("%H:%M:%S.%f")[:-3] if line.at_ns else "--:--:--.---"
    rank = "" if line.rank is None else f" rank {line.rank}"
    return f"{time} {line.child_id}{rank} {line.stream.name.lower()} | {line.text}"


def _print(line: LogLine) -> None:
    sys.stdout.write(line_text(line) + "\n")


def _named(directory: Path, options: Namespace) -> tuple[ChildId, ...]:
    """Children asked for by name. Raises ConfigError for one that has no log."""
    there = children_logged(directory)
    unknown = [name for name in options.child if name not in there]
    if unknown:
        raise ConfigError(f"no log of {', '.join(unknown)}; there are {', '.join(there) or 'none'}")
    return tuple(ChildId(name) for name in options.child)


def _is_not_of_core(child_id: ChildId) -> bool:
    return not is_of_core(child_id)


_KINDS: Final[dict[str | None, Callable[[ChildId], bool] | None]] = {
    None: None,
    "trainer": is_of_core,
    "rollout": _is_not_of_core,
}
"""By `--role`."""


def _newest() -> Path:
    """The run that wrote to its logs last. Raises SiteError when there is none."""
    found = sorted(RUNS.glob("*/logs"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SiteError(f"no run in {RUNS.resolve()}; name its --run-dir")
    return found[-1].parent
