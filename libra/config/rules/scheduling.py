"""Thresholds and intervals that must be in order."""

from collections.abc import Iterator

from libra.config.problems import Problem
from libra.config.run import RunConfig

SCHEDULING = "heterogeneous_rollout.scheduling"


def hysteresis(config: RunConfig) -> Iterator[Problem]:
    """Check that an instance unblocks below where it blocks."""
    scheduling = config.heterogeneous_rollout.scheduling
    yield from _must_exceed(
        f"{SCHEDULING}.metrics_admission_enter",
        scheduling.metrics_admission_enter,
        f"{SCHEDULING}.metrics_admission_exit",
        scheduling.metrics_admission_exit,
    )


def shared_load_lives_longer_than_a_heartbeat(config: RunConfig) -> Iterator[Problem]:
    """Check that a living rank's file never looks dead."""
    scheduling = config.heterogeneous_rollout.scheduling
    yield from _must_exceed(
        f"{SCHEDULING}.shared_load_ttl_s",
        scheduling.shared_load_ttl_s,
        f"{SCHEDULING}.shared_load_heartbeat_s",
        scheduling.shared_load_heartbeat_s,
    )


def snapshots_live_longer_than_a_poll(config: RunConfig) -> Iterator[Problem]:
    """Check that a snapshot is not stale before the next one can be there."""
    scheduling = config.heterogeneous_rollout.scheduling
    yield from _must_exceed(
        f"{SCHEDULING}.metrics_staleness_ttl_s",
        scheduling.metrics_staleness_ttl_s,
        f"{SCHEDULING}.metrics_poll_interval_s",
        scheduling.metrics_poll_interval_s,
    )


def backoff_grows(config: RunConfig) -> Iterator[Problem]:
    """Check the ends of the restart backoff."""
    supervision = config.supervision
    if supervision.restart_backoff_max_s < supervision.restart_backoff_initial_s:
        yield Problem(
            path="supervision.restart_backoff_max_s",
            what=f"{supervision.restart_backoff_max_s:g} is less than restart_backoff_initial_s, "
            f"{supervision.restart_backoff_initial_s:g}",
            hint=f"at least {supervision.restart_backoff_initial_s:g}",
            related=("supervision.restart_backoff_initial_s",),
        )


def _must_exceed(path: str, value: float, other: str, limit: float) -> Iterator[Problem]:
    if value <= limit:
        name = other.rpartition(".")[2]
        yield Problem(
            path=path,
            what=f"{value:g} must be above {name}, {limit:g}",
            hint=f"raise it or lower {name}",
            related=(other,),
        )


RULES = (
    hysteresis,
    shared_load_lives_longer_than_a_heartbeat,
    snapshots_live_longer_than_a_poll,
    backoff_grows,
)
