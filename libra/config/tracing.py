"""Phase traces and metrics."""

from libra.config.base import Config, PathText


class TracingConfig(Config, frozen=True, kw_only=True):
    """Flat keys of observability."""

    phase_trace_enabled: bool = True
    """Each rank writes append-only phase_trace_rank*.jsonl spans. RL_TRAIN_PHASE_TRACE (1 or 0)
    wins over the files."""

    phase_trace_dir: PathText = ""
    """Directory of the phase traces; empty means `phase_trace/` in the run directory.
    RL_TRAIN_PHASE_TRACE_DIR wins over the files."""
