"""What the bench of changes makes of a run's records."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from libra_supervisor.cli.arguments import parser
from libra_supervisor.cli.remote import _order_in

BENCH = Path(__file__).parents[2] / "scripts/bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield import_module("elastic_job")
    sys.modules.pop("elastic_job")


def step(ended_s, step_s, wait_s=0.0):
    return {"wall_time_ns": int(ended_s * 1e9), "step_s": step_s, "rollout_wait_s": wait_s}


STEPS = [step(at, 1.0) for at in (1, 2, 3, 4)]
CHANGE = {
    "wall_time_ns": int(9.5e9),
    "total_s": 5.0,
    "stalled_s": 4.0,
    "phases": {"reshape": 4.0},
    "stages": {
        "trainer": {"stop": 1.0, "start": 3.0},
        "vllm-2": {"start": 2.0},
        "vllm-3": {"start": 2.5},
    },
}


def test_what_a_change_took_is_measured_from_step_to_step_and_not_by_what_steps_say(bench):
    # The trainer is held from 5 to 9 s, which is no step's time.
    later = [step(5, 1.0), step(10.0, 1.0, wait_s=0.5), step(11.5, 1.5), step(12.5, 1.0)]
    found = bench.summary(CHANGE, [*STEPS, *later], usual=STEPS)
    assert found["usual_step_s"] == 1.0
    assert found["num_steps_inside"] == 3
    assert found["beyond_usual_s"] == pytest.approx(7.5 - 3)
    assert found["steps_lost"] == pytest.approx(4.5)
    assert found["waited_for_rollouts_s"] == pytest.approx(0.5)
    assert (found["switch_s"], found["trainer_held_s"]) == (5.0, 4.0)


def test_of_children_of_a_kind_the_slowest_counts(bench):
    assert bench.by_kind(CHANGE["stages"]) == {
        "trainer stop": 1.0,
        "trainer start": 3.0,
        "server start": 2.5,
    }


def test_medians_are_taken_of_every_number_and_of_what_is_missing_as_nothing(bench):
    turns = [
        {"switch_s": 1.0, "stages_s": {"start": 3.0}},
        {"switch_s": 2.0, "stages_s": {"start": 1.0, "load": 4.0}},
        {"switch_s": 9.0, "stages_s": {"start": 2.0}},
    ]
    found = bench.medians(turns)
    assert found == {"switch_s": 2.0, "stages_s": {"start": 2.0, "load": 0.0}}


def test_what_the_trainer_waited_is_said_by_the_phase_that_it_was_in(bench):
    # The change goes from 4.5 to 9.5 s: 1 s of drain, then 3 s, then 1 s.
    phases = {"drain": 1.0, "join": 3.0, "start": 1.0}
    change = {**CHANGE, "stalled_s": 0.5, "phases": phases}
    later = [step(6.5, 1.5, wait_s=1.0), step(11.0, 2.0, wait_s=1.5), step(12.0, 1.0)]
    found = bench.summary(change, [*STEPS, *later], usual=STEPS)
    assert found["waited_for_rollouts_in_s"] == pytest.approx(
        # From 5 to 6 s, and from 9 to 10.5 s.
        {"drain": 0.5, "join": 0.5, "start": 0.5, "after": 1.0}
    )
    assert found["stalled_step_s"] == pytest.approx(0.5 + 2.5)


def test_lines_are_read_once_and_whole(bench, tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = bench.Lines(path)
    assert lines.all() == []
    path.write_text('{"step": 1}\n{"ste')
    assert lines.all() == [{"step": 1}]
    with path.open("a") as file:
        file.write('p": 2}\n')
    assert lines.all() == lines.all() == [{"step": 1}, {"step": 2}]


def test_rollouts_may_be_further_ahead_than_the_last_server_is_lent_at(bench):
    given = dict(option.split("=") for option in bench.ahead(48))
    assert float(given["max_head_offpolicyness"]) > 48
    assert int(given["max_concurrent_rollouts"]) > 48 * bench.BATCH_SIZE


def test_every_order_of_a_turn_is_a_plan_that_the_command_line_takes(bench):
    for order in (*bench.TURN.values(), *bench.LENDING_OF_LAST_SERVER.values()):
        assert _order_in(parser().parse_args(["replan", *order])) is not None


def test_the_orders_that_lend_a_slot_lead_back_to_where_they_begin(bench):
    assert list(bench.LENDING.values()) == [
        ("--instances", "1x1", "--hybrids", "1"),
        ("--instances", "2x1", "--hybrids", "0"),
    ]
