"""Which instances are candidates, in what order, and when time alone changes that."""

import heapq
from collections import Counter, deque
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING

from libra.ids import PolicyVersion
from libra.scheduling.capacity import KvCapacities
from libra.scheduling.filters import first_block
from libra.scheduling.notice import (
    BreakerClosed,
    BreakerOpened,
    FeedbackLost,
    FeedbackRestored,
    Notice,
)
from libra.scheduling.order import VersionedOrder
from libra.scheduling.request import FILTERS, Filter, WaitReason
from libra.scheduling.slot import Slot
from libra.scheduling.slow_start import cold_fraction, next_step_at, step_of

if TYPE_CHECKING:
    from libra.config.rollout import SchedulingConfig

MAX_NOTICES = 1024


class Standing:
    """The order of candidates, why the others are none, and the timers that re-examine slots."""

    def __init__(self, config: "SchedulingConfig", kv_capacity_by_tp: Mapping[int, int]) -> None:
        self._config = config
        self._capacities = KvCapacities(config, kv_capacity_by_tp)
        self._needs_kv_capacity = config.load_metric == "kv_tokens"
        self._slots: dict[int, Slot] = {}
        self._timers: list[tuple[float, int, int, Slot]] = []
        self._num_blocked: Counter[Filter | None] = Counter()
        self._cold: dict[int, Slot] = {}
        self._mean_load = 0.0
        """What cold slots carry a share of: the same figure for all of them."""

        self._mean_load_step: int | None = None
        self._floor = PolicyVersion(0)
        self.order = VersionedOrder()
        self.notices: deque[Notice] = deque(maxlen=MAX_NOTICES)
        self.next_due = inf
        """When `advance` has something to do."""

    @property
    def floor(self) -> PolicyVersion:
        return self._floor

    def enter(self, slot: Slot, now: float) -> None:
        """Watch a new slot from now on."""
        self._slots[slot.index] = slot
        self._num_blocked[slot.blocked_by] += 1
        self.refresh(slot, now)

    def retire(self, slot: Slot) -> None:
        """Take `slot` out; what is in flight on it can still be given back."""
        self._place(slot, "not_ready")
        self._num_blocked["not_ready"] -= 1
        slot.is_retired = True
        del self._slots[slot.index]
        self._cold.pop(slot.index, None)

    def set_floor(self, version: PolicyVersion, now: float) -> None:
        """Instances below `version` are no candidates from now on."""
        self._floor = version
        for slot in tuple(self._slots.values()):
            self.refresh(slot, now)

    def refresh(self, slot: Slot, now: float) -> None:
        """Work out everything about `slot` that routing depends on; O(log n)."""
        if slot.is_retired:
            return
        slot.kv_capacity_tokens = self._capacities.of(slot)
        self.notices.extend(self._capacities.notices(slot))
        self._note_feedback(slot, now)
        slot.is_least_preferred = slot.feedback.is_penalized(now)
        block = first_block(
            slot, floor=self._floor, needs_kv_capacity=self._needs_kv_capacity, now=now
        )
        is_new = block is None and slot.routable_since is None
        if is_new:
            slot.routable_since = now
            self._cold[slot.index] = slot
        self._renew_mean_load(now, is_due=is_new)
        self._set_load_terms(slot, now)
        self._place(slot, block)
        self._arm(slot, now)

    def on_load_fell(self, slot: Slot, now: float) -> None:
        """Re-file `slot` on the hot path: only its in-flight count went down."""
        if slot.blocked_by is None:
            self.order.file(slot, slot.policy_version)
        elif slot.blocked_by == "queue_cap":
            self.refresh(slot, now)

    def on_picked(self, slot: Slot, now: float) -> None:
        """Re-file a candidate on the hot path: it was picked and its in-flight count went up."""
        self.order.take_turn(slot, slot.policy_version)
        if slot.is_at_cap():
            self.refresh(slot, now)

    def on_remote_changed(self, slot: Slot, now: float) -> None:
        """Re-file `slot`: only what the other schedulers have in flight on it changed."""
        self._refile(slot, now)

    def note_breaker(self, slot: Slot, *, was_open: bool, now: float) -> None:
        is_open = slot.breaker.state(now) != "closed"
        if is_open != was_open:
            kind = BreakerOpened if is_open else BreakerClosed
            self.notices.append(kind(slot.instance_id))

    def advance(self, now: float) -> None:
        """Re-examine the slots whose time has come."""
        timers = self._timers
        while timers and timers[0][0] <= now:
            due, _, _, slot = heapq.heappop(timers)
            if slot.timer_at == due:
                slot.timer_at = None
                self.refresh(slot, now)
        self.next_due = timers[0][0] if timers else inf

    def local_load(self, slot: Slot) -> float:
        """Own and remote load of `slot` in units of the metric, without corrections."""
        return (slot.units() + slot.remote_units()) * self._unit_scale(slot)

    def wait_reason(self) -> WaitReason:
        """Name the filter that removed the last candidates that were left."""
        if not self._slots:
            return "no_instances"
        if self._num_blocked[None]:
            return "stale_version"  # there are candidates, but the request wants a newer version
        return next(f for f in reversed(FILTERS) if self._num_blocked[f])

    def _unit_scale(self, slot: Slot) -> float:
        if not self._needs_kv_capacity:
            return 1.0
        return 1.0 / (slot.kv_capacity_tokens or 1)

    def _set_load_terms(self, slot: Slot, now: float) -> None:
        scale = self._unit_scale(slot)
        cold = cold_fraction(slot.routable_since, now)
        if cold == 0.0:
            self._cold.pop(slot.index, None)
        extra = slot.feedback.bias(now) + cold * self._mean_load
        slot.load_scale = scale / slot.weight
        slot.load_offset = (slot.remote_units() * scale + extra) / slot.weight

    def _renew_mean_load(self, now: float, *, is_due: bool) -> None:
        """Work the fleet's mean load out once per step and for each newcomer, for all cold slots.

        One pass over the fleet, off the hot path.
        """
        if not self._cold or (self._mean_load_step == step_of(now) and not is_due):
            return
        self._mean_load_step = step_of(now)
        mean = sum(self.local_load(slot) for slot in self._slots.values()) / len(self._slots)
        if mean != self._mean_load:
            self._mean_load = mean
            for cold in tuple(self._cold.values()):
                self._refile(cold, now)

    def _refile(self, slot: Slot, now: float) -> None:
        self._set_load_terms(slot, now)
        if slot.filed_version is not None:
            self.order.file(slot, slot.filed_version)

    def _place(self, slot: Slot, block: "Filter | None") -> None:
        """Record `block` and keep `slot` in the order exactly when it is a candidate."""
        self._num_blocked[slot.blocked_by] -= 1
        self._num_blocked[block] += 1
        slot.blocked_by = block
        wanted = slot.policy_version if block is None else None
        filed = slot.filed_version
        slot.filed_version = wanted
        if filed is not None and filed == wanted:
            self.order.file(slot, filed)
            return
        if filed is not None:
            self.order.leave(slot, filed)
        if wanted is not None:
            self.order.enter(slot, wanted)

    def _note_feedback(self, slot: Slot, now: float) -> None:
        is_lost = now >= self._feedback_lost_at(slot)
        if is_lost != slot.has_lost_feedback:
            kind = FeedbackLost if is_lost else FeedbackRestored
            self.notices.append(kind(slot.instance_id))
            slot.has_lost_feedback = is_lost

    def _feedback_lost_at(self, slot: Slot) -> float:
        """When it is worth a word that no fresh snapshot came, be it from the beginning."""
        seen = slot.feedback.snapshot
        since = slot.routable_since if seen is None else seen.sampled_at
        if since is None or not self._config.enable_metrics_feedback:
            return inf
        return since + self._config.metrics_staleness_ttl_s

    def _arm(self, slot: Slot, now: float) -> None:
        due = min(
            slot.feedback.next_change_at(now),
            slot.breaker.next_change_at(now),
            next_step_at(slot.routable_since, now),
            inf if slot.has_lost_feedback else self._feedback_lost_at(slot),
        )
        if due < inf and (slot.timer_at is None or due < slot.timer_at):
            slot.timer_at = due
            heapq.heappush(self._timers, (due, slot.index, id(slot), slot))
            self.next_due = min(self.next_due, due)
