import pytest

from control_parts import METRICS, plan_of, trajectory
from libra import clock
from libra.ids import ChildId, Incarnation, PolicyVersion, PromptId
from libra.rollouts.group import AdmittedGroup, CompleteGroup, PromptRef
from libra.rollouts.trajectory import SampleFailed
from libra.tracing.chrome import read_trace
from libra.tracing.span import SpanWriter, trace_path
from libra.wire.rank import StepTrained
from libra_supervisor import events
from libra_supervisor.app.tracer import Tracer
from libra_supervisor.loop import commands
from libra_supervisor.records.reconfiguration import DecisionRecord, ReconfigurationRecord

CHILD, PROCESS = ChildId("vllm-0"), Incarnation("a")


def group(row):
    return AdmittedGroup(PromptRef(PromptId(f"p{row}"), row, 0), 0, 2)


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """(tracer, a function that sets the time, a function that closes and reads the spans)."""
    now = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    path = trace_path(tmp_path, -1)
    tracer = Tracer(SpanWriter(path, rank=-1, run_id="r", role="control"))

    def at(moment):
        now[0] = moment
        return tracer

    def spans():
        tracer.close()
        ((header, found),) = read_trace(path)
        origin = header.started_at_ns
        return [
            (s.phase, round((s.at_ns - origin) / 1e9, 3), round(s.dur_ns / 1e9, 3), s.track, s.args)
            for s in found
        ]

    return at, spans


def test_a_sample_is_a_span_on_a_lane_of_its_own_until_it_is_scored(traced):
    at, spans = traced
    first, second = group(0), group(1)
    for one in (first, second):
        at(0.0).on_command(commands.StartGroup(one))
    at(1.0).on_event(events.SampleStarted(first.group_id, 0))
    at(2.0).on_event(events.SampleStarted(first.group_id, 1))
    at(3.0).on_event(events.SampleFinished(trajectory(first, 0, PolicyVersion(1), 1.0)))
    at(4.0).on_event(events.SampleStarted(second.group_id, 0))
    at(5.0).on_event(
        events.SampleGaveUp(first.group_id, 1, SampleFailed("engine", "connection reset"))
    )
    at(6.0).on_command(commands.CancelGroup(second.group_id))
    # News of a group that is over is late.
    at(7.0).on_event(events.SampleStarted(second.group_id, 1))
    found = [(p, b, d, t, a["group"], a["outcome"]) for p, b, d, t, a in spans()]
    assert found == [
        ("rollout", 1.0, 2.0, "rollouts #0", first.group_id, "finished"),
        ("rollout", 2.0, 3.0, "rollouts #1", first.group_id, "engine"),
        ("rollout", 4.0, 2.0, "rollouts #0", second.group_id, "cancelled"),
    ]


def test_what_still_runs_at_the_end_is_closed(traced):
    at, spans = traced
    at(0.0).on_command(commands.StartGroup(group(0)))
    at(1.0).on_event(events.SampleStarted(group(0).group_id, 0))
    at(2.0).on_command(commands.SendBatch(1, 3, ()))
    at(5.0)
    assert [(p, b, d, a["outcome"]) for p, b, d, _, a in spans()] == [
        ("rollout", 1.0, 4.0, "cancelled"),
        ("train_step", 2.0, 3.0, "cancelled"),
    ]


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (events.RankSaid(1, StepTrained(0, 3, METRICS)), "trained"),
        (events.GangLost(1, "rank 1 was killed"), "lost"),
    ],
)
def test_a_step_lasts_from_its_batch_to_rank_0_s_metrics_and_names_its_groups(
    traced, event, outcome
):
    at, spans = traced
    one = group(0)
    made = tuple(trajectory(one, i, PolicyVersion(1), 1.0) for i in range(2))
    at(1.0).on_command(commands.SendBatch(1, 3, (CompleteGroup(one, made),)))
    # Rank 1 has no metrics and ends nothing.
    at(2.0).on_event(events.RankSaid(1, StepTrained(1, 3, None)))
    at(4.0).on_event(event)
    assert spans() == [
        (
            "train_step", 1.0, 3.0, "training",
            {"step": 3, "groups": [one.group_id], "outcome": outcome},
        )
    ]  # fmt: skip


def test_a_restart_lasts_from_the_end_of_one_process_until_the_next_is_ready(traced):
    at, spans = traced
    at(2.0).on_event(events.ChildReady(CHILD, PROCESS, 2.0, 2.0))
    at(10.0).on_event(
        events.ChildExited(
            child_id=CHILD, incarnation=PROCESS, exit_code=1, signal=None, asked_for=False,
            reason="", last_lines=(), at=10.0,
        )
    )  # fmt: skip
    at(15.0).on_event(events.ChildReady(CHILD, Incarnation("b"), 3.0, 15.0))
    assert [span[:4] for span in spans()] == [
        ("start_child", 0.0, 2.0, "vllm-0"),
        ("restart_child", 10.0, 5.0, "vllm-0"),
        ("start_child", 12.0, 3.0, "vllm-0"),
    ]


def test_a_change_of_the_plan_is_a_span_with_its_phases_and_a_decision_is_none(traced):
    at, spans = traced
    record = ReconfigurationRecord(
        decision_id=3,
        wall_time_ns=1,
        step=7,
        strategy="diff",
        outcome="done",
        reason="worth it",
        total_s=4.0,
        stalled_s=1.0,
        phases={"drain": 2.5},
        transitions=(),
        plan=plan_of(("vllm-0",)),
    )
    decision = DecisionRecord(
        decision_id=4, wall_time_ns=1, step=8, verdict="keep", reason="", numbers={}, plan=""
    )
    at(10.0).on_command(commands.WriteReconfiguration(record))
    at(11.0).on_command(commands.WriteReconfiguration(decision))
    arguments = {"decision": 3, "outcome": "done", "stalled_s": 1.0, "drain": 2.5}
    assert spans() == [("reconfiguration", 6.0, 4.0, "plan", arguments)]
