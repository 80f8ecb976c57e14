"""Why a request would go where it would go: every candidate, its value, ages and filter."""

from collections.abc import Collection, Iterable

import msgspec

from libra.ids import Incarnation, InstanceId, PolicyVersion
from libra.scheduling.load import EngineLoad, LoadMetric
from libra.scheduling.request import Filter, WaitReason
from libra.scheduling.slot import UNKNOWN_VERSION, Slot


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as routing sees it. Loads are in units of the load metric unless named."""

    instance_id: InstanceId
    incarnation: Incarnation
    tp: int
    policy_version: PolicyVersion | None
    removed_by: Filter | None
    """The first filter that removes it for this request; None: a candidate."""

    load: float
    """What the strategy compares: own + remote + bias + slow start, per weight."""

    own_requests: int
    own_tokens: int
    remote_requests: int
    remote_tokens: int
    bias: float
    weight: float
    is_penalized: bool
    """A recent preemption: taken only when no other candidate is left."""

    kv_capacity_tokens: int | None
    kv_use_fraction: float | None
    num_queued: int | None
    """Requests that wait inside the server, of whomever. Like the use, as last scraped."""

    engines: tuple[EngineLoad, ...]
    """Of a data-parallel server each by itself; else empty."""

    snapshot_age_s: float | None
    """Age of the newest scrape; None: there was none."""

    signal_ages_s: dict[str, float]
    """Age by signal that routing uses; one never seen is absent."""

    breaker: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to "where would this request go, and why"."""

    choice: InstanceId | None
    """None: it would wait."""

    reason: str
    """In words: strategy, affinity, or the filter it would wait for."""

    load_metric: LoadMetric
    strategy: str
    expected_tokens: int
    num_waiting: int
    instances: tuple[InstanceView, ...]
    """Candidates first, most preferred first."""


def view_of(slot: Slot, *, min_version: PolicyVersion | None, now: float) -> InstanceView:
    """Describe `slot` at `now` for a request that wants `min_version`."""
    removed_by = slot.blocked_by
    if removed_by is None and min_version is not None and slot.policy_version < min_version:
        removed_by = "stale_version"
    feedback, seen = slot.feedback, slot.seen
    waiting = None if seen is None else seen.num_waiting
    return InstanceView(
        instance_id=slot.instance_id,
        incarnation=slot.incarnation,
        tp=slot.tp,
        policy_version=None if slot.policy_version == UNKNOWN_VERSION else slot.policy_version,
        removed_by=removed_by,
        load=slot.load(),
        own_requests=slot.num_requests,
        own_tokens=slot.num_tokens,
        remote_requests=slot.remote.num_requests,
        remote_tokens=slot.remote.num_tokens,
        bias=feedback.bias(now),
        weight=slot.weight,
        is_penalized=slot.is_least_preferred,
        kv_capacity_tokens=slot.kv_capacity_tokens,
        kv_use_fraction=None if seen is None else seen.kv_use_fraction,
        num_queued=None if waiting is None else int(waiting),
        engines=() if seen is None else seen.engines,
        snapshot_age_s=None if seen is None else now - seen.sampled_at,
        signal_ages_s=feedback.ages_s(now),
        breaker=slot.breaker.state(now),
    )


def views_in_order(
    slots: Iterable[Slot], *, min_version: PolicyVersion | None, now: float
) -> tuple[InstanceView, ...]:
    """Views of all slots: candidates by preference, then the others by name."""
    pairs = [(slot, view_of(slot, min_version=min_version, now=now)) for slot in slots]
    pairs.sort(key=lambda pair: (pair[1].removed_by is not None, pair[0].rank()))
    return tuple(view for _, view in pairs)


def reason_in_words(
    best: Slot | None,
    sticky: Slot | None,
    *,
    is_kept: bool,
    avoided: Collection[InstanceId],
    wait_reason: WaitReason,
) -> str:
    """Say what decided."""
    if best is None:
        return f"waits: {wait_reason}"
    if is_kept and sticky is not None:
        return f"{sticky.instance_id} has the prompt's prefix and is within the margin"
    if sticky is not None:
        away = f"{sticky.instance_id} has the prefix but is no candidate within the margin"
        return f"{best.instance_id} is the most preferred candidate; {away}"
    if avoided and best.instance_id not in avoided:
        others = ", ".join(sorted(avoided))
        return f"{best.instance_id} is the most preferred candidate but for {others}"
    return f"{best.instance_id} is the most preferred candidate"
