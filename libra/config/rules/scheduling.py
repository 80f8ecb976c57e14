"""Thresholds and intervals that must be in order."""

from collections.abc import Iterator

from libra.config.arithmetic import planner_decides, rollout_buckets
from libra.config.problems import Problem
from libra.config.rollout import SchedulingConfig
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


def somebody_has_a_capacity(config: RunConfig) -> Iterator[Problem]:
    """Check that kv_tokens can choose an instance at all."""
    uncovered, covered = _degrees_by_capacity(config)
    if uncovered and not covered:
        yield Problem(
            path=f"{SCHEDULING}.kv_capacity_tokens_by_tp",
            what=f"names no TP degree of this run ({_listed(uncovered)}): load_metric kv_tokens "
            "would leave every instance out",
            hint=f"add {uncovered[0]}, or empty it to estimate all",
            related=("heterogeneous_rollout.instances", "rollout_gpus"),
        )


def instances_without_capacity(config: RunConfig) -> Iterator[Problem]:
    """Warn of instances that kv_tokens leaves out."""
    uncovered, covered = _degrees_by_capacity(config)
    if uncovered and covered:
        yield Problem(
            path=f"{SCHEDULING}.kv_capacity_tokens_by_tp",
            what=f"names no capacity for TP {_listed(uncovered)}: load_metric kv_tokens leaves "
            "those instances out",
            hint="add them, or empty it to estimate all",
            related=("heterogeneous_rollout.instances",),
        )


def weights_name_instances(config: RunConfig) -> Iterator[Problem]:
    """Check that every weight belongs to an instance of the run."""
    weights = config.heterogeneous_rollout.scheduling.load_balance_weights
    if planner_decides(config):
        return
    buckets = rollout_buckets(config)
    names = {f"tp{bucket.tp}" for bucket in buckets}
    names |= {f"vllm-{index}" for index in range(sum(bucket.count for bucket in buckets))}
    for name in weights.keys() - names:
        yield Problem(
            path=f"{SCHEDULING}.load_balance_weights",
            what=f"{name!r} is no instance of this run and no TP degree of one",
            hint=f"one of {', '.join(sorted(names)[:8])}",
            related=("heterogeneous_rollout.instances",),
        )


def _degrees_by_capacity(config: RunConfig) -> tuple[list[int], list[int]]:
    """TP degrees without and with a configured capacity; none where that does not matter."""
    scheduling = config.heterogeneous_rollout.scheduling
    capacities = scheduling.kv_capacity_tokens_by_tp
    if not capacities or scheduling.load_metric != "kv_tokens" or planner_decides(config):
        return [], []
    degrees = sorted({bucket.tp for bucket in rollout_buckets(config)})
    return (
        [tp for tp in degrees if tp not in capacities],
        [tp for tp in degrees if tp in capacities],
    )


def _listed(degrees: list[int]) -> str:
    return ", ".join(str(tp) for tp in degrees)


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
    somebody_has_a_capacity,
    weights_name_instances,
    backoff_grows,
)


def shared_load_is_shared(config: RunConfig) -> Iterator[Problem]:
    """Warn of its tunables where it is off; several nodes share their load anyway."""
    scheduling, defaults = config.heterogeneous_rollout.scheduling, SchedulingConfig()
    if scheduling.shared_load_dir or config.cluster.nodes:
        return
    for name in ("shared_load_ttl_s", "shared_load_heartbeat_s", "shared_load_cache_ttl_s"):
        if getattr(scheduling, name) != getattr(defaults, name):
            yield Problem(
                path=f"{SCHEDULING}.{name}",
                what=f"has no effect on one node while {SCHEDULING}.shared_load_dir is empty",
                related=(f"{SCHEDULING}.shared_load_dir",),
            )


WARNINGS = (instances_without_capacity, shared_load_is_shared)
