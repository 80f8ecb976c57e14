"""Phase traces as Chrome Trace Event JSON, which chrome://tracing and ui.perfetto.dev read.

Several runs are laid side by side: each (run, process) becomes one named process in the viewer,
and runs start together at zero, so that the same phase of two runs can be compared by eye. An arrow
leads from each sample to the step that trained on it. Format: "Trace Event Format", complete events
("X") in microseconds, metadata ("M"), and flows ("s" to "f") between two of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from libra.errors import DataError
from libra.tracing.span import SCHEMA, VERSION, Header, Phase, Span

Life: TypeAlias = tuple[Header, list[Span]]
"""One start of one process and its spans."""

_INSIDE_US = 0.001
"""Distance of an arrow's ends from the edges of their spans."""

_Record = TypeVar("_Record", Header, Span)
_PATTERN = "phase_trace_*.jsonl"


def read_trace(path: Path) -> list[Life]:
    """The lives recorded in one file; torn lines and unknown fields are skipped.

    Raises DataError when the file is no phase trace or of a newer version.
    """
    lives: list[Life] = []
    with path.open("rb") as file:
        for line in file:
            if (header := _decoded(line, Header)) is not None:
                _check(header, path)
                lives.append((header, []))
            elif lives and (span := _decoded(line, Span)) is not None:
                lives[-1][1].append(span)
    if not lives:
        raise DataError(f"{path} holds no {SCHEMA} header: is it a phase trace?")
    return lives


def trace_files(source: Path) -> list[Path]:
    """The trace files of a run directory, its phase_trace folder, or one file by itself.

    Raises DataError when there is none.
    """
    if source.is_file():
        return [source]
    for directory in (source / "phase_trace", source):
        if found := sorted(directory.glob(_PATTERN)):
            return found
    raise DataError(f"no {_PATTERN} in {source} or {source}/phase_trace; was phase_trace_enabled?")


def chrome_events(runs: Mapping[str, Iterable[Path]]) -> Iterator[dict[str, Any]]:
    """Events of all runs, by label. With one run times are since its first span, too."""
    process = 0
    flows = _Flows()
    for label, paths in runs.items():
        lives = _joined(life for path in paths for life in read_trace(path))
        starts = [span.at_ns for _, spans in lives for span in spans]
        origin_ns = min(starts, default=0)
        for header, spans in lives:
            process += 1
            yield from _process_events(process, _process_name(label, header), header.rank)
            yield from _span_events(process, spans, origin_ns, flows)
        yield from flows.take()


def _joined(lives: Iterable[Life]) -> list[Life]:
    """Lives with the spans of all their files: a full file is followed by another."""
    spans_of: dict[tuple[object, ...], Life] = {}
    for header, spans in lives:
        key = msgspec.structs.astuple(header)
        spans_of.setdefault(key, (header, []))[1].extend(spans)
    return list(spans_of.values())


class _End(NamedTuple):
    """One end of an arrow: an instant inside of a span."""

    pid: int
    tid: int
    ts: float


class _Flows:
    """Samples and the steps that trained on them, of one run."""

    def __init__(self) -> None:
        self._samples: dict[str, list[_End]] = {}
        self._steps: list[tuple[list[str], _End]] = []
        self._num_flows = 0

    def note(self, span: Span, event: dict[str, Any]) -> None:
        """Remember what arrows may lead from or to."""
        pid, tid, begin, duration = event["pid"], event["tid"], event["ts"], event["dur"]
        if span.phase == Phase.ROLLOUT and "group" in span.args:
            inside = max(begin, begin + duration - _INSIDE_US)
            self._samples.setdefault(span.args["group"], []).append(_End(pid, tid, inside))
        elif span.phase == Phase.TRAIN_STEP and span.args.get("outcome") == "trained":
            inside = min(begin + _INSIDE_US, begin + duration)
            self._steps.append((span.args.get("groups", []), _End(pid, tid, inside)))

    def take(self) -> Iterator[dict[str, Any]]:
        """The arrows, and begin anew."""
        for groups, step in self._steps:
            for sample in (end for group in groups for end in self._samples.get(group, ())):
                self._num_flows += 1
                common = {"id": self._num_flows, "name": "trained", "cat": "flow"}
                yield {"ph": "s", **common, **sample._asdict()}
                # Bound to the span around the instant, not to the next one that begins.
                yield {"ph": "f", "bp": "e", **common, **step._asdict()}
        self._samples, self._steps = {}, []


def write_chrome_trace(sources: Mapping[str, Path], output: Path) -> int:
    """Convert the runs in `sources` (label -> run directory or file) into one file.

    Returns the number of events written. Raises DataError as `read_trace` and `trace_files` do.
    """
    runs = {label: trace_files(source) for label, source in sources.items()}
    num_events = 0
    partial = output.with_name(output.name + ".new")
    with partial.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for event in chrome_events(runs):
            file.write((b",\n" if num_events else b"\n") + msgspec.json.encode(event))
            num_events += 1
        file.write(b"\n]}\n")
    partial.replace(output)
    return num_events


def labels_for(sources: Iterable[Path]) -> dict[str, Path]:
    """Name each source by its last path component, numbered where names repeat."""
    labelled: dict[str, Path] = {}
    for source in sources:
        label = source.resolve().name
        if label in labelled:
            label = f"{label} ({len(labelled) + 1})"
        labelled[label] = source
    return labelled


def _process_name(label: str, header: Header) -> str:
    who = header.role if header.rank < 0 else f"{header.role} rank {header.rank}"
    again = f", attempt {header.attempt}" if header.attempt > 1 else ""
    return f"{label}: {who}{again}"


def _process_events(process: int, name: str, rank: int) -> Iterator[dict[str, Any]]:
    common = {"ph": "M", "pid": process}
    yield {**common, "name": "process_name", "args": {"name": name}}
    yield {**common, "name": "process_sort_index", "args": {"sort_index": process * 1000 + rank}}


def _span_events(
    process: int, spans: list[Span], origin_ns: int, flows: _Flows
) -> Iterator[dict[str, Any]]:
    track_number: dict[str, int] = {}
    for span in spans:
        if span.track not in track_number:
            track_number[span.track] = len(track_number) + 1
            yield {
                "ph": "M",
                "pid": process,
                "tid": track_number[span.track],
                "name": "thread_name",
                "args": {"name": span.track},
            }
        event = {
            "ph": "X",
            "pid": process,
            "tid": track_number[span.track],
            "name": span.phase,
            "cat": "phase",
            "ts": (span.at_ns - origin_ns) / 1000,
            "dur": span.dur_ns / 1000,
            "args": span.args,
        }
        flows.note(span, event)
        yield event


def _decoded(line: bytes, kind: type[_Record]) -> _Record | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError:
        return None


def _check(header: Header, path: Path) -> None:
    if header.schema != SCHEMA or header.version > VERSION:
        raise DataError(
            f"{path} is {header.schema} version {header.version}; "
            f"this Libra reads {SCHEMA} up to version {VERSION}"
        )
