"""Restart budgets, deadlines, the control API."""

from libra.config.base import (
    Config,
    Fraction,
    GrowthFactor,
    PathText,
    Port,
    PositiveCount,
    Seconds,
)


class SupervisionConfig(Config, frozen=True, kw_only=True):
    """`supervision`: how children are started, watched, restarted and ended."""

    start_timeout_s: Seconds = 900.0
    """Longest time from spawn to ready, in seconds; loading a large model takes minutes."""

    drain_timeout_s: Seconds = 60.0
    """Longest wait for requests in flight before a planned stop."""

    term_grace_s: Seconds = 20.0
    """From SIGTERM to SIGKILL of the whole tree."""

    kill_wait_s: Seconds = 10.0
    """From SIGKILL until a survivor is declared unkillable and its slots are quarantined."""

    restart_backoff_initial_s: Seconds = 1.0
    """Wait before the first restart, in seconds."""

    restart_backoff_max_s: Seconds = 60.0
    """Longest wait before a restart, in seconds."""

    restart_backoff_factor: GrowthFactor = 2.0
    """Growth of the wait from one restart to the next."""

    restart_jitter_fraction: Fraction = 0.2
    """Random part of each wait, so that children that died together do not restart together."""

    restart_max_in_window: PositiveCount = 5
    """Restarts of one child allowed within restart_window_s."""

    restart_window_s: Seconds = 600.0
    """Length of the window in which restarts are counted, in seconds."""

    restart_max_without_progress: PositiveCount = 3
    """Restarts in a row without progress in between: an engine that serves requests for
    restart_stable_s, a step that was not trained before."""

    restart_stable_s: Seconds = 1800.0
    """Seconds after a failure from which on served requests are progress, so that an engine that
    dies every twenty minutes is given up."""

    liveness_stall_s: Seconds = 120.0
    """Without progress for this long while requests run, an engine is probed, then replaced."""

    rank_heartbeat_timeout_s: Seconds = 600.0
    """Silence of a rank after which the gang is taken for hung."""

    log_max_bytes: PositiveCount = 256 * 2**20
    """Size in bytes at which a child's log file is rotated."""

    log_keep: PositiveCount = 3
    """Rotated log files kept for each child."""


class ApiConfig(Config, frozen=True, kw_only=True):
    """`api`: the control API and the gateway over TCP; the Unix socket is always there."""

    api_host: str = "127.0.0.1"
    """Address the TCP port is bound to; anything but loopback makes the token necessary."""

    api_port: Port | None = None
    """TCP port; null opens none, 0 takes a free one and reports it."""

    api_token_file: PathText = ""
    """File with the bearer token; empty generates one in the run directory (0600)."""
