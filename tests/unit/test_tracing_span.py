import json
import os

import pytest

from libra import clock
from libra.errors import DataError
from libra.tracing.chrome import labels_for, read_trace, trace_files, write_chrome_trace
from libra.tracing.span import Phase, SpanWriter, trace_path
from libra_supervisor.cli.main import main


def write_run(run_dir, *, ranks=2, attempt=1):
    for rank in range(ranks):
        path = trace_path(run_dir / "phase_trace", rank)
        writer = SpanWriter(path, rank=rank, run_id="r", attempt=attempt)
        with writer.span(Phase.GRPO_UPDATE, step=3), writer.span(Phase.RECOMPUTE_LOGPROBS, step=3):
            pass
        writer.close()


def test_a_span_is_one_json_line_of_the_documented_shape(tmp_path):
    before_ns = clock.wall_ns()
    write_run(tmp_path, ranks=1)
    header, inner, outer = (
        json.loads(line)
        for line in trace_path(tmp_path / "phase_trace", 0).read_text().splitlines()
    )
    assert (header["schema"], header["version"], header["rank"]) == ("libra.phase_trace", 1, 0)
    assert set(outer) == {"phase", "at_ns", "dur_ns", "track", "args"}
    assert (outer["phase"], outer["args"], outer["track"]) == ("grpo_update", {"step": 3}, "main")
    assert before_ns - 10**6 <= outer["at_ns"] <= inner["at_ns"]
    assert inner["at_ns"] + inner["dur_ns"] <= outer["at_ns"] + outer["dur_ns"]


def test_a_block_that_raises_is_recorded_too(tmp_path):
    writer = SpanWriter(trace_path(tmp_path, 0), rank=0, run_id="r")
    with pytest.raises(KeyError), writer.span(Phase.WEIGHT_EXPORT):
        raise KeyError
    ((_, spans),) = read_trace(trace_path(tmp_path, 0))
    assert [span.phase for span in spans] == ["weight_export"]


def test_torn_lines_are_skipped_and_a_new_life_starts_on_a_line_of_its_own(tmp_path):
    path = trace_path(tmp_path, 0)
    SpanWriter(path, rank=0, run_id="r", attempt=1).record("grpo_update", 1.0, 2.0)
    with path.open("ab") as file:
        file.write(b'{"phase":"grpo_update","at_n')
    SpanWriter(path, rank=0, run_id="r", attempt=2).record("grpo_update", 1.0, 3.0)
    lives = read_trace(path)
    assert [(header.attempt, len(spans)) for header, spans in lives] == [(1, 1), (2, 1)]
    assert lives[1][1][0].dur_ns == 2_000_000_000


def test_without_a_path_nothing_is_written_and_the_same_calls_work(tmp_path):
    writer = SpanWriter(None, rank=0, run_id="r")
    with writer.span(Phase.GRPO_UPDATE):
        writer.record("grpo_update", 0.0, 1.0)
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_spans_and_is_counted():
    writer = SpanWriter(None, rank=0, run_id="r")
    writer._fd = os.open("/dev/full", os.O_WRONLY)
    with writer.span(Phase.GRPO_UPDATE):
        pass
    writer.close()
    assert writer.num_lost == 1


def test_two_runs_are_laid_side_by_side_from_zero(tmp_path):
    for name in ("baseline", "new"):
        write_run(tmp_path / name)
    out = tmp_path / "trace.json"
    sources = labels_for([tmp_path / "baseline", tmp_path / "new"])
    num_events = write_chrome_trace(sources, out)
    trace = json.loads(out.read_text())
    events = trace["traceEvents"]
    assert len(events) == num_events
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == [
        "baseline: trainer rank 0",
        "baseline: trainer rank 1",
        "new: trainer rank 0",
        "new: trainer rank 1",
    ]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 8
    for run in ("baseline", "new"):
        pids = [pid for pid, name in names.items() if name.startswith(run)]
        assert min(e["ts"] for e in spans if e["pid"] in pids) == 0
    assert {e["name"] for e in spans} == {"grpo_update", "recompute_logprobs"}


def test_the_verb_writes_one_file_and_names_what_holds_no_trace(tmp_path, capsys):
    write_run(tmp_path / "run")
    out = tmp_path / "trace.json"
    assert main(["trace", str(tmp_path / "run"), "--output", str(out)]) == 0
    num_events = len(json.loads(out.read_text())["traceEvents"])
    assert capsys.readouterr().out == f"{out}: {num_events} events\n"
    (tmp_path / "empty").mkdir()
    assert main(["trace", str(tmp_path / "empty"), "--output", str(tmp_path / "none.json")]) == 2
    assert str(tmp_path / "empty") in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


def test_tracks_of_one_process_become_named_threads(tmp_path):
    writer = SpanWriter(trace_path(tmp_path, -1), rank=-1, run_id="r", role="control")
    writer.record("reload", 0.0, 1.0, track="vllm-0")
    writer.record("reload", 0.5, 1.5, track="vllm-1")
    out = tmp_path / "trace.json"
    write_chrome_trace({"run": tmp_path}, out)
    events = json.loads(out.read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {1: "vllm-0", 2: "vllm-1"}
    assert [e["tid"] for e in events if e["ph"] == "X"] == [1, 2]


def test_what_is_no_trace_is_named(tmp_path):
    with pytest.raises(DataError, match="phase_trace_enabled"):
        trace_files(tmp_path)
    stranger = tmp_path / "phase_trace_rank0.jsonl"
    stranger.write_text('{"a": 1}\n')
    with pytest.raises(DataError, match=r"holds no libra\.phase_trace header"):
        read_trace(stranger)


def test_a_trace_of_a_newer_version_is_refused_with_both_versions(tmp_path):
    write_run(tmp_path, ranks=1)
    path = trace_path(tmp_path / "phase_trace", 0)
    path.write_text(path.read_text().replace('"version":1', '"version":2'))
    with pytest.raises(DataError, match=r"version 2.*up to version 1"):
        read_trace(path)


def test_runs_of_the_same_name_get_labels_of_their_own(tmp_path):
    labels = labels_for([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert sorted(labels) == ["run", "run (2)"]
