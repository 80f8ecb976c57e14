"""Phase traces and metrics."""

from typing import Literal, TypeAlias

from libra.config.base import Config, PathText, PositiveCount

TrackerName: TypeAlias = Literal["tensorboard", "wandb", "mlflow"]


class TracingConfig(Config, frozen=True, kw_only=True):
    """Flat keys of observability."""

    phase_trace_enabled: bool = True
    """Each rank writes append-only phase_trace_rank*.jsonl spans. RL_TRAIN_PHASE_TRACE (1 or 0)
    wins over the files."""

    phase_trace_dir: PathText = ""
    """Directory of the phase traces; empty means `phase_trace/` in the run directory.
    RL_TRAIN_PHASE_TRACE_DIR wins over the files."""

    phase_trace_max_bytes: PositiveCount = 256 * 2**20
    """Size in bytes at which a process's trace file is rotated."""

    phase_trace_keep: PositiveCount = 3
    """Rotated trace files kept for each process."""

    trackers: list[TrackerName] = []
    """Where each step's line of metrics.jsonl goes besides; each needs the extra of its name:
    `pip install 'libra-rl[tensorboard]'`. A tracker that is slow or fails never holds up the run:
    what it misses is counted and said."""

    tensorboard_dir: PathText = ""
    """Directory of TensorBoard's event files; empty means `tensorboard/` in the run directory."""

    wandb_project: str = "libra"
    """W&B project."""

    wandb_mode: Literal["offline", "online"] = "offline"
    """offline writes below `wandb/` in the run directory, for `wandb sync`; online sends while the
    run goes on, with the credentials that W&B finds by itself."""

    mlflow_tracking_uri: str = ""
    """MLflow server or store; empty means the directory `mlruns/` in the run directory."""

    mlflow_experiment: str = "libra"
    """MLflow experiment."""
