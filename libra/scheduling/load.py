"""What is known of an instance's load from outside: its own metrics and other schedulers."""

from math import isfinite
from typing import Annotated, Literal, TypeAlias

import msgspec

from libra.ids import Incarnation, InstanceId

LoadMetric: TypeAlias = Literal["requests", "tokens", "kv_tokens"]


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a data-parallel server, as last scraped. None: unknown."""

    engine: str
    """The label by which the server's metrics name it."""

    num_running: float | None
    num_waiting: float | None
    kv_use_fraction: float | None


class LoadSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One scrape of one server's /metrics, summed over its engines. None: unknown, never 0."""

    incarnation: Incarnation
    """The process the poller was asked to watch."""

    sampled_at: float
    """When the answer arrived, on the scheduler's clock; one value per scrape."""

    num_running: float | None = None
    num_waiting: float | None = None
    num_waiting_for_capacity: float | None = None
    """The part of `num_waiting` that lacks KV blocks or batch slots."""

    kv_use_fraction: float | None = None
    """KV-cache occupancy in 0..1; the fullest engine's."""

    num_preemptions: float | None = None
    """Cumulative counter."""

    kv_capacity_tokens: int | None = None
    """As the server profiled it (kv_cache_size_tokens, else num_gpu_blocks * block_size)."""

    process_started_at_s: float | None = None
    """Unix time of the server's start; a change is a new process."""

    engines: tuple[EngineLoad, ...] = ()
    """What the figures above are made of, when the server has several. For people to see."""


class RemoteLoad(msgspec.Struct, frozen=True, gc=False):
    """What the other schedulers have in flight on one incarnation."""

    num_requests: int
    num_tokens: int


NO_REMOTE_LOAD = RemoteLoad(0, 0)


BoundedInt = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
"""What foreign files may hold: more could not be reckoned with as a float."""


class OwnLoad(msgspec.Struct, frozen=True, gc=False):
    """What one scheduler has in flight on one incarnation."""

    instance_id: InstanceId
    incarnation: Incarnation
    num_requests: BoundedInt
    num_tokens: BoundedInt


SIGNALS = (
    "num_running",
    "num_waiting",
    "num_waiting_for_capacity",
    "kv_use_fraction",
    "num_preemptions",
    "process_started_at_s",
)


def plausible(snapshot: LoadSnapshot) -> LoadSnapshot:
    """Return `snapshot` without numbers that cannot be: they become unknown, each by itself.

    No count is negative, infinite or NaN, and no cache is more than full.
    """
    use = snapshot.kv_use_fraction
    odd = {name: None for name in SIGNALS if not _is_count(getattr(snapshot, name))}
    if use is not None and use > 1.0:
        odd["kv_use_fraction"] = None
    return msgspec.structs.replace(snapshot, **odd) if odd else snapshot


def _is_count(value: float | None) -> bool:
    return value is None or (isfinite(value) and value >= 0.0)


def observed_load(
    metric: LoadMetric,
    snapshot: LoadSnapshot,
    *,
    kv_capacity_tokens: int | None,
    tokens_per_request: float,
) -> float | None:
    """Read the load off a snapshot in units of `metric`; None when a needed signal is missing.

    requests: running + waiting. tokens: KV use x capacity + waiting x tokens per request.
    kv_tokens: the same as a fraction of the capacity.
    """
    waiting = snapshot.num_waiting
    if waiting is None:
        return None
    if metric == "requests":
        return None if snapshot.num_running is None else snapshot.num_running + waiting
    if snapshot.kv_use_fraction is None or not kv_capacity_tokens:
        return None
    tokens = snapshot.kv_use_fraction * kv_capacity_tokens + waiting * tokens_per_request
    return tokens if metric == "tokens" else tokens / kv_capacity_tokens
