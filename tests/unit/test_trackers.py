import threading

import msgspec
import pytest
from structlog.testing import capture_logs

from control_parts import METRICS
from libra.config.availability import check_trackers
from libra.config.model import ModelConfig
from libra.config.run import RunConfig
from libra.config.tracing import TracingConfig
from libra.rollouts.summary import BatchSummary
from libra_supervisor.records.step import StepContext, StepTimes, step_record
from libra_supervisor.records.trackers import Tracker, values_of


def record(step=1, *, num_dropped=None):
    summary = dict.fromkeys(BatchSummary.__struct_fields__, 1.0)
    return step_record(
        context=StepContext(step=step, attempt=1, wall_time_ns=5, num_dropped=num_dropped or {}),
        batch=msgspec.convert(summary, BatchSummary, strict=False),
        metrics=METRICS,
        times=StepTimes(
            rollout_wait_s=1.0, export_s=1.0, reload_s=1.0, publish_wait_s=0.0, step_s=4.0
        ),
    )


class Kept:
    """A backend that keeps what it is given; `gate` holds it up, `fails` breaks it."""

    def __init__(self, *, gate=None, fails=False):
        self.steps = []
        self.is_closed = False
        self._gate, self._fails = gate, fails

    def log(self, step, at_ns, values):
        if self._gate is not None:
            self._gate.wait()
        if self._fails:
            raise ConnectionError("no route")
        self.steps.append((step, at_ns, values["reward_mean"]))

    def close(self):
        self.is_closed = True


def test_a_tracker_keeps_every_step_in_order_and_is_closed():
    backend, opened = Kept(), []
    tracker = Tracker("tensorboard", lambda: opened.append(1) or backend)
    for step in range(1, 6):
        tracker.offer(record(step))
    tracker.close()
    assert [step for step, _, _ in backend.steps] == [1, 2, 3, 4, 5]
    assert backend.steps[0] == (1, 5, 1.0)
    assert backend.is_closed
    assert opened == [1]
    assert (tracker.num_dropped, tracker.num_failed) == (0, 0)


def test_a_tracker_that_hangs_costs_the_steps_that_find_no_room_and_holds_nobody_up():
    gate = threading.Event()
    backend = Kept(gate=gate)
    with capture_logs() as said:
        tracker = Tracker("wandb", lambda: backend, queue_steps=2)
        for step in range(10):
            tracker.offer(record(step))
        tracker.close(timeout_s=0.05)
    # One is with the backend, or still queued; two have room.
    assert tracker.num_dropped >= 7
    assert [entry["event"] for entry in said] == ["tracker_falls_behind", "tracker_incomplete"]
    assert said[-1]["dropped"] == tracker.num_dropped
    gate.set()


def test_a_tracker_that_fails_is_said_once_and_counted_each_time():
    with capture_logs() as said:
        tracker = Tracker("mlflow", lambda: Kept(fails=True))
        for step in range(3):
            tracker.offer(record(step))
        tracker.close()
    assert tracker.num_failed == 3
    assert [entry["event"] for entry in said] == ["tracker_fails", "tracker_incomplete"]
    assert said[0]["why"] == "ConnectionError: no route"


def test_a_tracker_that_cannot_be_opened_is_tried_again_with_the_next_step():
    backend = Kept()
    tries = []

    def opened():
        tries.append(1)
        if len(tries) == 1:
            raise OSError("disk full")
        return backend

    tracker = Tracker("tensorboard", opened)
    tracker.offer(record(1))
    tracker.offer(record(2))
    tracker.close()
    assert [step for step, _, _ in backend.steps] == [2]
    assert tracker.num_failed == 1


def test_a_run_that_never_trained_opens_no_tracker():
    tracker = Tracker("wandb", lambda: pytest.fail("nothing was to be opened"))
    tracker.close()
    assert tracker.num_failed == 0


def test_values_are_numbers_by_name_without_what_there_is_not():
    values = values_of(record(num_dropped={"stale": 8}))
    assert values["num_dropped/stale"] == 8.0
    assert values["step_s"] == 4.0
    assert not {"train_error_fraction", "wall_time_ns"} & values.keys()
    assert all(isinstance(value, float) for value in values.values())


def test_a_tracker_without_its_package_is_refused_with_the_extra_to_install():
    config = RunConfig(
        model=ModelConfig(model_path="/m"),
        tracing=TracingConfig(trackers=["tensorboard", "wandb"]),
    )
    (problem,) = check_trackers(config, missing=("wandb", "mlflow"))
    assert problem.path == "trackers"
    assert "wandb is not installed" in problem.what
    assert "libra-rl[wandb]" in problem.hint
