"""The trackers' own libraries, each an extra of the distribution and imported when it is used."""

# ruff: noqa: PLC0415 - a run imports only the trackers that it uses
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, assert_never

from libra.config.tracing import TracingConfig, TrackerName
from libra.ids import RunId
from libra_supervisor.records.trackers import Backend, Tracker, Trackers
from libra_supervisor.run_directory import RunDirectory

_NS_PER_S: Final = 1e9
_NS_PER_MS: Final = 1_000_000
_RUN_TAG: Final = "libra.run_id"


def open_trackers(config: TracingConfig, directory: RunDirectory, run_id: RunId) -> Trackers:
    """Start the configured trackers."""
    return Trackers(
        Tracker(name, partial(_opened, name, config, directory, run_id)) for name in config.trackers
    )


def _opened(
    name: TrackerName, config: TracingConfig, directory: RunDirectory, run_id: RunId
) -> Backend:
    match name:
        case "tensorboard":
            return TensorBoard(Path(config.tensorboard_dir or directory.root / "tensorboard"))
        case "wandb":
            return Wandb(config, directory, run_id)
        case "mlflow":
            return Mlflow(config, directory, run_id)
        case _:
            assert_never(name)


class TensorBoard:
    """Event files. A step that is logged again begins a session, which hides what followed it."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(directory))
        # Earlier lives of the run wrote here too: the first step says from where on they are void.
        self._last_step: int | None = None

    def log(self, step: int, at_ns: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        at_s = at_ns / _NS_PER_S
        if self._last_step is None or step <= self._last_step:
            begun = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=at_s, step=step, session_log=begun))
        self._last_step = step
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._writer.add_event(Event(wall_time=at_s, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """W&B. Steps are values of their own, since W&B drops points that go back."""

    def __init__(self, config: TracingConfig, directory: RunDirectory, run_id: RunId) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.wandb_project,
            name=directory.root.name,
            id=run_id,
            resume="allow",
            dir=str(directory.root),
            mode=config.wandb_mode,
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, at_ns: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step, "at_s": at_ns / _NS_PER_S})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow. A resumed run goes on in the run that carries its tag."""

    def __init__(self, config: TracingConfig, directory: RunDirectory, run_id: RunId) -> None:
        uri = config.mlflow_tracking_uri or (directory.root / "mlruns").as_uri()
        if uri.startswith("file:"):
            # MLflow asks for this before it uses a directory. Only its own code reads it.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # noqa: TID251
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(config.mlflow_experiment)
        experiment_id = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(config.mlflow_experiment)
        )
        wanted = f"tags.`{_RUN_TAG}` = '{run_id}'"
        found = self._client.search_runs([experiment_id], filter_string=wanted, max_results=1)
        run = (
            found[0]
            if found
            else self._client.create_run(
                experiment_id, run_name=directory.root.name, tags={_RUN_TAG: run_id}
            )
        )
        self._run_id: str = run.info.run_id

    def log(self, step: int, at_ns: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        at_ms = at_ns // _NS_PER_MS
        metrics = [Metric(name, value, at_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
