"""Everything the scheduler holds about one incarnation of one instance."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from libra.ids import Incarnation, InstanceId, PolicyVersion
from libra.scheduling.breaker import Breaker
from libra.scheduling.feedback import Feedback
from libra.scheduling.load import NO_REMOTE_LOAD, LoadSnapshot, RemoteLoad

if TYPE_CHECKING:
    from libra.config.rollout import SchedulingConfig
    from libra.scheduling.request import Filter

UNKNOWN_VERSION = PolicyVersion(-1)
"""Below every floor, so an instance whose version is not known is never a candidate."""


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the fleet says about an instance; telling it again changes nothing."""

    instance_id: InstanceId
    incarnation: Incarnation
    tp: int = 1
    policy_version: PolicyVersion | None = None
    """None: not known, so not routable."""

    is_ready: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """Counters and state of one incarnation. A restart makes a new one; the old is retired.

    `num_requests` and `num_tokens` are what this scheduler has in flight: integers, so that they
    are exactly 0 at idle.
    """

    instance_id: InstanceId
    announced_incarnation: Incarnation
    """What the supervisor calls the process; pollers label their snapshots with it."""

    incarnation: Incarnation
    """The process behind the counters: another one after a restart that nobody announced."""

    tp: int
    index: int
    prefix_key: int
    """Names the prefix cache; a planned restart hands it on."""

    is_by_tokens: bool
    is_by_turn: bool
    """round_robin: only turns are compared."""

    max_requests: int
    weight: float
    feedback: Feedback
    breaker: Breaker = field(default_factory=Breaker)

    policy_version: PolicyVersion = UNKNOWN_VERSION
    is_ready: bool = False
    is_draining: bool = False
    is_retired: bool = False
    process_started_at_s: float | None = None
    routable_since: float | None = None
    """When it was first a candidate; None before. Slow start counts from here."""

    num_requests: int = 0
    num_tokens: int = 0
    remote: RemoteLoad = NO_REMOTE_LOAD
    seen: LoadSnapshot | None = None
    """The newest scrape, whether or not feedback uses it."""

    measured_kv_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    has_lost_feedback: bool = False

    blocked_by: "Filter | None" = "not_ready"
    filed_version: PolicyVersion | None = None
    """The version under which it stands in the order of candidates; None: it does not."""

    is_least_preferred: bool = False
    load_scale: float = 1.0
    load_offset: float = 0.0
    stamp: int = 0
    turn: float = 0.0
    timer_at: float | None = None

    def learn_version(self, version: PolicyVersion | None) -> None:
        self.policy_version = UNKNOWN_VERSION if version is None else version

    def units(self) -> int:
        """Return what this scheduler has in flight here, in requests or in tokens."""
        return self.num_tokens if self.is_by_tokens else self.num_requests

    def remote_units(self) -> int:
        """Return what the other schedulers have in flight here, in the same units."""
        remote = self.remote
        return remote.num_tokens if self.is_by_tokens else remote.num_requests

    def load(self) -> float:
        """Estimate the load per weight, in units of the metric: what strategies compare."""
        units = self.num_tokens if self.is_by_tokens else self.num_requests
        return units * self.load_scale + self.load_offset

    def rank(self) -> tuple[bool, float, float, int]:
        """What candidates are compared by, the most preferred first."""
        load = 0.0 if self.is_by_turn else self.load()
        return (self.is_least_preferred, load, self.turn, self.index)

    def is_at_cap(self) -> bool:
        return 0 < self.max_requests <= self.num_requests


def slot_for(
    spec: InstanceSpec, *, index: int, prefix_key: int, config: "SchedulingConfig"
) -> Slot:
    """Make an empty slot for `spec`."""
    slot = Slot(
        instance_id=spec.instance_id,
        announced_incarnation=spec.incarnation,
        incarnation=spec.incarnation,
        tp=spec.tp,
        index=index,
        prefix_key=prefix_key,
        is_by_tokens=config.load_metric != "requests",
        is_by_turn=config.load_balance_strategy == "round_robin",
        max_requests=config.max_in_flight_per_instance,
        weight=weight_of(spec, config),
        feedback=Feedback(config),
        is_ready=spec.is_ready,
    )
    slot.learn_version(spec.policy_version)
    return slot


def weight_of(spec: InstanceSpec, config: "SchedulingConfig") -> float:
    """Look the weight up by instance id, then by `tpN`; 1 otherwise and unless `weighted`."""
    if config.load_balance_strategy != "weighted":
        return 1.0
    weights = config.load_balance_weights
    return weights.get(spec.instance_id, weights.get(f"tp{spec.tp}", 1.0))
