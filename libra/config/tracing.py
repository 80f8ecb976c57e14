"""Phase traces and metrics."""

from libra.config.base import Config


class TracingConfig(Config, frozen=True, kw_only=True):
    """Flat keys of observability."""

    phase_trace_enabled: bool = True
    """Each rank writes append-only phase_trace_rank*.jsonl spans."""
