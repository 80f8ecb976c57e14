"""What the event log says of the scheduler's decisions."""

import json

import pytest

from fleets import request, scheduling, snapshot, spec
from libra.ids import InstanceId
from libra.scheduling.scheduler import Scheduler
from libra.tracing.log import set_up_logging
from libra_supervisor.app.routing import explained_if_debugging


@pytest.fixture
def logged(tmp_path, own_logging):
    """Returns a function: level -> (the listener at that level, the events, the human lines)."""
    opened = []

    def at(level):
        path, shown = tmp_path / f"{level}.jsonl", []
        opened.append(set_up_logging(path, show=shown.append, level=level))

        def events():
            return [json.loads(line) for line in path.read_text().splitlines()]

        return explained_if_debugging(), events, shown

    yield at
    for event_log in opened:
        event_log.close()


def test_at_debug_level_each_decision_is_one_event_with_candidates_values_ages_and_filters(logged):
    explained, events, shown = logged("debug")
    options = {"enable_metrics_feedback": True, "prefix_affinity": True}
    scheduler = Scheduler(scheduling(**options), explained=explained)
    scheduler.observe_instance(spec("i0"), 0.0)
    scheduler.observe_instance(spec("i1"), 0.0)
    scheduler.set_ready(InstanceId("i1"), False, 0.0)
    scheduler.on_snapshot(InstanceId("i0"), snapshot(1.0, num_running=4, num_waiting=0), 1.0)
    ask = request(prompt="p7", num_prompt_tokens=100, max_new_tokens=50)
    scheduler.route(ask, 3.0)
    (event,) = events()
    chosen, removed = event["instances"]
    assert (event["level"], event["event"]) == ("debug", "request_explained")
    assert (event["request_id"], event["prompt_id"]) == (ask.request_id, "p7")
    assert (event["choice"], event["expected_tokens"]) == ("i0", 150)
    assert event["reason"] == "i0 is the most preferred candidate"
    assert (chosen["removed_by"], chosen["signal_ages_s"]) == (None, {"bias": 2.0})
    assert chosen["load"] == pytest.approx(0.3 * 4)
    assert (removed["instance_id"], removed["removed_by"]) == ("i1", "not_ready")
    assert "choice=i0" in shown[0]
    assert "removed_by" not in shown[0]


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_above_debug_level_nobody_listens_so_a_decision_costs_nothing(logged, level):
    explained, _, _ = logged(level)
    assert explained is None
