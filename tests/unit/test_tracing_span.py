import json
import os
import re
from pathlib import Path

import pytest

from libra import clock
from libra.errors import DataError
from libra.tracing.chrome import labels_for, read_trace, trace_files, write_chrome_trace
from libra.tracing.lanes import Lanes
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


def test_a_line_that_the_disk_cut_short_costs_only_itself(tmp_path, monkeypatch):
    path = trace_path(tmp_path, 0)
    writer = SpanWriter(path, rank=0, run_id="r")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, content: write(fd, content[:20]))
    writer.record("grpo_update", 1.0, 2.0, step=1)
    monkeypatch.setattr(os, "write", write)
    writer.record("grpo_update", 2.0, 3.0, step=2)
    writer.record("grpo_update", 3.0, 4.0, step=3)
    ((_, spans),) = read_trace(path)
    assert [span.args["step"] for span in spans] == [2, 3]
    assert writer.num_lost == 1


def test_every_phase_is_in_the_documented_table():
    page = (Path(__file__).parents[2] / "docs/phase-traces.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert sorted(documented) == sorted(Phase)


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


def test_a_full_file_makes_room_and_the_oldest_goes(tmp_path):
    path = trace_path(tmp_path, 0)
    writer = SpanWriter(path, rank=0, run_id="r", max_bytes=1000, num_kept=3)
    for step in range(100):
        writer.record("grpo_update", float(step), step + 0.5, step=step)
    writer.close()
    files = {file.name for file in tmp_path.iterdir()}
    assert files == {
        "phase_trace_rank0.jsonl", "phase_trace_rank0.1.jsonl", "phase_trace_rank0.2.jsonl",
        "phase_trace_rank0.3.jsonl",
    }  # fmt: skip
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    assert writer.num_lost == 0
    # The newest spans are there without a gap, and every file can be read by itself.
    steps = [
        span.args["step"]
        for name in (*(f"phase_trace_rank0.{number}.jsonl" for number in (3, 2, 1)), path.name)
        for _, spans in read_trace(tmp_path / name)
        for span in spans
    ]
    assert steps == list(range(steps[0], 100))


def test_a_later_life_goes_on_in_a_file_that_is_nearly_full(tmp_path):
    for attempt in (1, 2, 3):
        writer = SpanWriter(
            trace_path(tmp_path, 0), rank=0, run_id="r", attempt=attempt, max_bytes=700
        )
        for _ in range(3):
            writer.record("grpo_update", 1.0, 2.0)
        writer.close()
    events = convert(tmp_path)
    assert len([e for e in events if e["ph"] == "X"]) == 9
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert sorted(names) == [
        "r: trainer rank 0", "r: trainer rank 0, attempt 2", "r: trainer rank 0, attempt 3"
    ]  # fmt: skip


def test_a_directory_that_refuses_a_new_file_costs_the_bound_and_no_span(tmp_path, monkeypatch):
    def refused(_self, _target):
        raise OSError(28, "no space left")

    monkeypatch.setattr(Path, "replace", refused)
    path = trace_path(tmp_path, 0)
    writer = SpanWriter(path, rank=0, run_id="r", max_bytes=500)
    for _ in range(20):
        writer.record("grpo_update", 1.0, 2.0)
    writer.close()
    assert len(read_trace(path)[0][1]) == 20
    assert writer.num_lost > 0


def convert(source):
    out = source.parent / f"{source.name}.json"
    write_chrome_trace({"r": source}, out)
    return json.loads(out.read_text())["traceEvents"]


def test_an_arrow_leads_from_each_sample_to_the_step_that_trained_it(tmp_path):
    writer = SpanWriter(trace_path(tmp_path, -1), rank=-1, run_id="r", role="control")
    for sample in range(2):
        track = f"rollouts #{sample}"
        writer.record(Phase.ROLLOUT, 1.0, 2.0, track=track, group="g1", sample=sample)
    writer.record(Phase.ROLLOUT, 1.0, 2.0, track="rollouts #2", group="g2", sample=0)
    writer.record(Phase.TRAIN_STEP, 3.0, 4.0, step=1, groups=["g1"], outcome="trained")
    # A step whose gang was lost trained nothing.
    writer.record(Phase.TRAIN_STEP, 5.0, 6.0, step=2, groups=["g2"], outcome="lost")
    writer.close()
    events = convert(tmp_path)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == 2
    assert starts.keys() == ends.keys()
    samples = [e for e in events if e["name"] == "rollout" and e["args"]["group"] == "g1"]
    assert {e["tid"] for e in starts.values()} == {e["tid"] for e in samples}
    (step,) = [e for e in events if e["name"] == "train_step" and e["args"]["step"] == 1]
    assert {(e["tid"], e["bp"]) for e in ends.values()} == {(step["tid"], "e")}


def test_lanes_that_are_given_back_are_taken_again_lowest_first():
    lanes = Lanes("vllm-0")
    assert [lanes.take() for _ in range(3)] == [0, 1, 2]
    lanes.give_back(2)
    lanes.give_back(0)
    assert [lanes.track(lanes.take()) for _ in range(3)] == ["vllm-0 #0", "vllm-0 #2", "vllm-0 #3"]
