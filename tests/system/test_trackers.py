"""The real TensorBoard, W&B (offline) and MLflow (a directory), read back as they read it."""

import struct
import time
from pathlib import Path

import msgspec
import pytest

from control_parts import METRICS
from libra.config.tracing import TracingConfig
from libra.ids import RunId
from libra.rollouts.summary import BatchSummary
from libra_supervisor.records.step import StepContext, StepTimes, step_record
from libra_supervisor.records.tracker_backends import open_trackers
from libra_supervisor.run_directory import RunDirectory

# The trackers' own imports warn of what they will change.
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
]


def record(step, *, attempt, reward):
    summary = dict.fromkeys(BatchSummary.__struct_fields__, reward)
    return step_record(
        context=StepContext(
            step=step, attempt=attempt, wall_time_ns=step * 10**9, num_dropped={"stale": 2}
        ),
        batch=msgspec.convert(summary, BatchSummary, strict=False),
        metrics=METRICS,
        times=StepTimes(
            rollout_wait_s=1.0, export_s=1.0, reload_s=1.0, publish_wait_s=0.0, step_s=4.0
        ),
    )


def two_lives(run_dir: Path, name: str) -> None:
    """Three steps; then, after a crash, the last two again and one more."""
    directory = RunDirectory(run_dir)
    for attempt, steps in ((1, (1, 2, 3)), (2, (2, 3, 4))):
        trackers = open_trackers(TracingConfig(trackers=[name]), directory, RunId("run-1"))
        for step in steps:
            trackers.offer(record(step, attempt=attempt, reward=float(attempt)))
        trackers.close()
        assert [(t.num_dropped, t.num_failed) for t in trackers.all] == [(0, 0)]
        # W&B names a life's directory by the second.
        time.sleep(1.1 if name == "wandb" else 0.0)


@pytest.mark.case("T-B52")
def test_tensorboard_shows_a_repeated_step_once_as_it_was_trained_last(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    two_lives(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward_mean")] == [
        (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)
    ]  # fmt: skip
    assert events.Scalars("num_dropped/stale")[0].wall_time == 1.0


@pytest.mark.case("T-B52")
def test_wandb_keeps_every_point_with_its_own_step_and_attempt(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    two_lives(tmp_path, "wandb")
    rows = [
        row for path in sorted(tmp_path.glob("wandb/offline-*/*.wandb")) for row in history(path)
    ]
    assert [(row["step"], row["attempt"]) for row in rows] == [
        (1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2)
    ]  # fmt: skip
    assert rows[-1]["reward_mean"] == 2.0


def history(path: Path) -> list[dict]:
    """The rows of an offline run: W&B's log is records with a length, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, rows, pending = path.read_bytes(), [], b""
    at = 7
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        pending += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            one, pending = Record.FromString(pending), b""
            if one.HasField("history"):
                rows.append(
                    {
                        "/".join(item.nested_key) or item.key: msgspec.json.decode(item.value_json)
                        for item in one.history.item
                    }
                )
    return rows


def test_mlflow_goes_on_in_the_run_that_it_began(tmp_path):
    from mlflow.tracking import MlflowClient

    two_lives(tmp_path, "mlflow")
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("libra")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    found = client.get_metric_history(run.info.run_id, "reward_mean")
    assert sorted((m.step, m.value) for m in found) == [
        (1, 1.0), (2, 1.0), (2, 2.0), (3, 1.0), (3, 2.0), (4, 2.0)
    ]  # fmt: skip
