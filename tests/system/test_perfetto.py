"""Converted phase traces, as Perfetto's own trace processor understands them."""

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from control_world import RandomWorld
from libra import clock
from libra.tracing.span import Phase, SpanWriter, trace_path
from libra_supervisor.app.tracer import Tracer
from perfetto_shell import trace_processor

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),
    # google.protobuf warns of the descriptors that `perfetto` ships.
    pytest.mark.filterwarnings("ignore"),
]

NUM_STEPS = 4
BATCH = 4


class TracedWorld(RandomWorld):
    """The loop's events and commands, heard by the tracer as in a run."""

    tracer: Tracer

    def post(self, event):
        # Longer than any time that the world's parts claim to have taken.
        self.now += 1.0
        self.tracer.on_event(event)
        super().post(event)

    def _carry_out(self, command):
        self.tracer.on_command(command)
        super()._carry_out(command)


def traced_run(run_dir: Path, seed: int, patch: pytest.MonkeyPatch) -> None:
    world = TracedWorld(total_steps=NUM_STEPS)
    patch.setattr(clock, "monotonic", lambda: world.now)
    spans = SpanWriter(
        trace_path(run_dir / "phase_trace", -1),
        rank=-1,
        run_id=run_dir.name,
        role="control",
        max_bytes=4000,
        num_kept=50,
    )
    world.tracer = Tracer(spans)
    world.boot()
    world.run(Random(seed))
    assert world.ended.exit_code == 0
    world.tracer.close()
    for rank in range(2):
        ranks = SpanWriter(
            trace_path(run_dir / "phase_trace", rank), rank=rank, run_id=run_dir.name
        )
        ranks.record(Phase.RECOMPUTE_LOGPROBS, 1.2, 1.5, step=1)
        ranks.record(Phase.GRPO_UPDATE, 1.0, 2.0, step=1)
        ranks.close()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Two runs converted into one file by the script, in the trace processor."""
    directory = tmp_path_factory.mktemp("traces")
    for seed, name in enumerate(("baseline", "planned")):
        with pytest.MonkeyPatch.context() as patch:
            traced_run(directory / name, seed, patch)
    assert len(list((directory / "baseline/phase_trace").glob("phase_trace_control*"))) == 2
    out = directory / "both.json"
    command = [sys.executable, str(ROOT / "scripts/phase_trace_to_chrome.py")]
    command += [str(directory / "baseline"), str(directory / "planned"), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    with trace_processor(out) as processor:
        yield processor


def test_nothing_of_the_file_is_refused_or_guessed_at(loaded):
    assert (
        loaded.query(
            "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
        )
        == []
    )


def test_each_process_of_each_run_has_its_name(loaded):
    names = {row["name"] for row in loaded.query("select name from process where name is not null")}
    assert names == {
        f"{run}: {who}"
        for run in ("baseline", "planned")
        for who in ("control", "trainer rank 0", "trainer rank 1")
    }


def test_spans_are_there_once_each_and_nest_where_they_share_a_track(loaded):
    count = {
        row["name"]: row["num"]
        for row in loaded.query("select name, count(*) as num from slice group by name")
    }
    assert count["train_step"] == 2 * NUM_STEPS
    assert count["grpo_update"] == count["recompute_logprobs"] == 4
    parents = loaded.query(
        "select parent.name as outer from slice join slice parent on slice.parent_id = parent.id "
        "where slice.name = 'recompute_logprobs'"
    )
    assert [row["outer"] for row in parents] == ["grpo_update"] * 4
    # Samples overlap; on a lane of its own none lies inside of another.
    depths = loaded.query("select max(depth) as deepest from slice where name = 'rollout'")
    assert depths == [{"deepest": 0}]
    assert loaded.query("select count(*) as num from slice where dur < 0") == [{"num": 0}]


def test_an_arrow_leads_from_every_trained_sample_to_its_step(loaded):
    arrows = loaded.query(
        "select o.name as start, i.name as target, count(*) as num from flow "
        "join slice o on flow.slice_out = o.id join slice i on flow.slice_in = i.id "
        "group by 1, 2"
    )
    assert arrows == [{"start": "rollout", "target": "train_step", "num": 2 * NUM_STEPS * BATCH}]
    # Runs are laid side by side, not joined.
    crossing = loaded.query(
        "select count(*) as num from flow "
        "join slice o on flow.slice_out = o.id join thread_track ot on o.track_id = ot.id "
        "join thread oth using (utid) join slice i on flow.slice_in = i.id "
        "join thread_track it on i.track_id = it.id join thread ith on it.utid = ith.utid "
        "where oth.upid != ith.upid"
    )
    assert crossing == [{"num": 0}]


def test_a_span_s_arguments_can_be_asked_for(loaded):
    rows = loaded.query(
        "select distinct extract_arg(arg_set_id, 'args.step') as step from slice "
        "where name = 'train_step' order by step"
    )
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
