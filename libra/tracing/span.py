"""Phase traces: what each process did when, one JSON line per span, appended as it happens.

Schema `libra.phase_trace`, version 1. A file `phase_trace_rank<N>.jsonl` (the control plane's is
`phase_trace_control.jsonl`, on a node that does not lead `phase_trace_node<N>.jsonl`) holds, for
each start of the process, one header and then its spans:

    {"schema":"libra.phase_trace","version":1,"run_id":"r","rank":0,"role":"trainer","attempt":1,
     "host":"h","pid":7,"started_at_ns":1700000000000000000}
    {"phase":"grpo_update","at_ns":1700000000123456789,"dur_ns":5000000,"track":"main","args":{"step":3}}

`at_ns` is the start as wall time: the header's wall time plus monotonic time since, so durations
and order within a process never jump. Phase names are those of `Phase`; a reader ignores fields
that it does not know, and skips lines that are not whole (a process may die while it writes).
A new version is needed when a field changes its meaning or goes, not when one is added.

A full file is renamed to `phase_trace_rank<N>.1.jsonl`, the one before it to `.2`, and so on; each
begins with the same header, by which a reader puts them together again.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

from libra import clock

SCHEMA: Final = "libra.phase_trace"
VERSION: Final = 1
MAIN_TRACK: Final = "main"
DEFAULT_MAX_BYTES: Final = 256 * 2**20
DEFAULT_NUM_KEPT: Final = 3
_NS_PER_S: Final = 1_000_000_000


class Phase(StrEnum):
    """The names that stay the same from release to release, so that runs can be compared."""

    # A trainer rank
    BUILD_MODEL = "build_model"
    RESTORE = "restore"
    RECOMPUTE_PROBE = "recompute_probe"
    """`memory_budget_dry_run_enabled`: one pass over the largest batch before training."""

    REHEARSE = "rehearse"
    """A hybrid replica's passes before its first step, with nothing to learn from."""

    COLLECT_BATCH = "collect_batch"
    """Waiting for the next batch: nothing to do."""

    RECOMPUTE_LOGPROBS = "recompute_logprobs"
    GRPO_UPDATE = "grpo_update"
    WEIGHT_EXPORT = "weight_export"
    JUDGE_ACKS = "judge_acks"
    SAVE_CHECKPOINT = "save_checkpoint"
    """The state is taken into host memory; training stands still."""

    WRITE_CHECKPOINT = "write_checkpoint"
    """From there to the disk, while training goes on; on a track of its own."""

    # The control plane
    ROLLOUT_WAIT = "rollout_wait"
    """From the end of a step until the batch of the next was complete."""

    TRAIN_STEP = "train_step"
    """From the batch on its way to the ranks until rank 0's metrics."""

    WEIGHT_SYNC = "weight_sync"
    """From the checked export until the last engine's judged ACK."""

    RELOAD_INSTANCE = "reload_instance"
    """One instance's part of it, on a track of its own."""

    RECONFIGURATION = "reconfiguration"
    """A change of the plan, from the first transition to the last; args `outcome`, `stalled_s`."""

    START_CHILD = "start_child"
    RESTART_CHILD = "restart_child"
    """From the end of a child's process until the next one was ready."""

    ROLLOUT = "rollout"
    """One sample from its start until it is scored, on a track of its own; args `group`, `sample`.
    The TRAIN_STEP that trained on it has the group among its `groups`."""

    QUEUE_WAIT = "queue_wait"
    """A request that waited for a place."""

    ROUTE = "route"
    """A request on its instance, from its place to its answer."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes the spans that follow."""

    schema: str
    version: int
    run_id: str
    rank: int
    """-1 for the control plane."""

    role: str
    attempt: int
    host: str
    pid: int
    started_at_ns: int


class Span(msgspec.Struct, frozen=True, kw_only=True):
    phase: str
    at_ns: int
    dur_ns: int
    track: str = MAIN_TRACK
    """Spans of one track nest; things that overlap freely need tracks of their own."""

    args: dict[str, Any] = {}


class SpanWriter:
    """Appends spans to one file. A path of None writes nothing, at the same call sites.

    A span costs one small write; a disk that refuses costs the span and is counted, never raised.
    """

    def __init__(  # noqa: PLR0913 - what a header says, and the bounds of the file
        self,
        path: Path | None,
        *,
        rank: int,
        run_id: str,
        role: str = "trainer",
        attempt: int = 1,
        max_bytes: int = DEFAULT_MAX_BYTES,
        num_kept: int = DEFAULT_NUM_KEPT,
    ) -> None:
        """`num_kept` files of `max_bytes` stay beside the one that is written."""
        self.num_lost = 0
        self._encoder = msgspec.json.Encoder()
        self._fd: int | None = None
        self._path = path
        self._max_bytes, self._num_kept = max_bytes, num_kept
        self._num_bytes = 0
        self._is_torn = False
        self._header = b""
        self._wall_ns = clock.wall_ns()
        self._monotonic_s = clock.monotonic()
        if path is None:
            return
        header = Header(
            schema=SCHEMA,
            version=VERSION,
            run_id=run_id,
            rank=rank,
            role=role,
            attempt=attempt,
            host=os.uname().nodename,
            pid=os.getpid(),
            started_at_ns=self._wall_ns,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._header = self._encoder.encode(header)
        self._open(path)

    @contextmanager
    def span(self, phase: str, *, track: str = MAIN_TRACK, **args: Any) -> Generator[None]:
        """Record the block as one span, also when it raises. `args` must be JSON-able."""
        if self._fd is None:
            yield
            return
        began_at = clock.monotonic()
        try:
            yield
        finally:
            self.record(phase, began_at, clock.monotonic(), track=track, **args)

    def record(
        self, phase: str, began_at: float, ended_at: float, *, track: str = MAIN_TRACK, **args: Any
    ) -> None:
        """Record a span whose ends were taken from `libra.clock.monotonic`."""
        if self._fd is None:
            return
        span = Span(
            phase=phase,
            at_ns=self._wall_ns + round((began_at - self._monotonic_s) * _NS_PER_S),
            dur_ns=round((ended_at - began_at) * _NS_PER_S),
            track=track,
            args=args,
        )
        self._append(self._encoder.encode(span))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self._num_bytes = os.fstat(self._fd).st_size
        # An earlier life may have torn its last line.
        self._is_torn = self._num_bytes > 0
        self._write(self._header)

    def _append(self, line: bytes) -> None:
        if self._num_bytes + len(line) >= self._max_bytes:
            self._rotate()
        self._write(line)

    def _rotate(self) -> None:
        """Begin a new file. A directory that refuses costs the bound, not the trace."""
        if self._fd is None or self._path is None or self._num_bytes <= len(self._header) + 1:
            return
        try:
            for number in reversed(range(1, self._num_kept)):
                if (old := rotated_path(self._path, number)).exists():
                    old.replace(rotated_path(self._path, number + 1))
            self._path.replace(rotated_path(self._path, 1))
            written, self._fd = self._fd, None
            os.close(written)
            self._open(self._path)
        except OSError:
            self.num_lost += 1

    def _write(self, line: bytes) -> None:
        if self._fd is None:
            return
        # A newline ends a torn line, so that it costs no other.
        content = b"\n" * self._is_torn + line + b"\n"
        self._num_bytes += len(content)
        try:
            # One write per line: with O_APPEND two writers never mix inside a line.
            written = os.write(self._fd, content)
        except OSError:
            self.num_lost += 1
            return
        self._is_torn = written != len(content)
        self.num_lost += self._is_torn


def rotated_path(path: Path, number: int) -> Path:
    """Where a full file goes; 1 is the newest."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def node_trace_path(directory: Path, node: int) -> Path:
    """The file of what a node that does not lead says of its requests."""
    return directory / f"phase_trace_node{node}.jsonl"


def trace_path(directory: Path, rank: int) -> Path:
    """The file of one rank; rank -1 is the control plane."""
    return directory / (
        "phase_trace_control.jsonl" if rank < 0 else f"phase_trace_rank{rank}.jsonl"
    )
