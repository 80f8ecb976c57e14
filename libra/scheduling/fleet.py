"""The instances by name: how they come, change, restart and go. Identity is (id, incarnation).

Counters, bias, breaker and version belong to an incarnation and end with it. Late news of an
earlier incarnation is ignored.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from libra.ids import Incarnation, InstanceId, PolicyVersion
from libra.scheduling.load import (
    NO_REMOTE_LOAD,
    LoadSnapshot,
    OwnLoad,
    RemoteLoad,
    observed_load,
    plausible,
)
from libra.scheduling.notice import RestartSeen
from libra.scheduling.slot import InstanceSpec, Slot, slot_for

if TYPE_CHECKING:
    from libra.config.rollout import SchedulingConfig
    from libra.scheduling.affinity import PrefixAffinity
    from libra.scheduling.standing import Standing

RESTART_TOLERANCE_S = 1.0
"""Start times of one process may differ by rounding in the exposition format."""


class Fleet:
    """Slots by instance id. Every change leaves `Standing` and the prefix caches up to date."""

    def __init__(
        self, config: "SchedulingConfig", standing: "Standing", affinity: "PrefixAffinity | None"
    ) -> None:
        self._config = config
        self._standing = standing
        self._affinity = affinity
        self._slot_of: dict[InstanceId, Slot] = {}
        self._last_index = 0

    def slots(self) -> tuple[Slot, ...]:
        return tuple(self._slot_of.values())

    def get(self, instance_id: InstanceId) -> Slot | None:
        return self._slot_of.get(instance_id)

    def observe(self, spec: InstanceSpec, *, keep_prefixes: bool, now: float) -> None:
        """Add `spec`, or replace its earlier incarnation; the same incarnation is no news."""
        slot = self._slot_of.get(spec.instance_id)
        if slot is None:
            self._add(spec, None, now)
        elif slot.announced_incarnation != spec.incarnation:
            self._replace(slot, spec, keep_prefixes=keep_prefixes, now=now)

    def remove(self, instance_id: InstanceId) -> None:
        slot = self._slot_of.pop(instance_id, None)
        if slot is not None:
            self._standing.retire(slot)
            self._forget_prefixes(slot)

    def set_ready(self, instance_id: InstanceId, is_ready: bool, now: float) -> None:
        slot = self._slot_of.get(instance_id)
        if slot is not None:
            slot.is_ready = is_ready
            self._standing.refresh(slot, now)

    def set_version(
        self, instance_id: InstanceId, version: PolicyVersion | None, now: float
    ) -> None:
        slot = self._slot_of.get(instance_id)
        if slot is None:
            return
        before = slot.policy_version
        slot.learn_version(version)
        if slot.policy_version != before:
            slot.feedback.on_reloaded()
        self._standing.refresh(slot, now)

    def set_draining(self, instance_id: InstanceId, is_draining: bool, now: float) -> None:
        slot = self._slot_of.get(instance_id)
        if slot is not None:
            slot.is_draining = is_draining
            self._standing.refresh(slot, now)

    def set_measured_kv_tokens(self, instance_id: InstanceId, num_tokens: int, now: float) -> None:
        slot = self._slot_of.get(instance_id)
        if slot is not None and num_tokens > 0:
            slot.measured_kv_tokens = num_tokens
            self._standing.refresh(slot, now)

    def on_snapshot(
        self,
        instance_id: InstanceId,
        snapshot: LoadSnapshot,
        *,
        tokens_per_request: float,
        now: float,
    ) -> None:
        """Take in one scrape; `tokens_per_request` prices what waits inside the server."""
        slot = self._slot_of.get(instance_id)
        if slot is None or slot.announced_incarnation != snapshot.incarnation:
            return
        if slot.seen is not None and snapshot.sampled_at < slot.seen.sampled_at:
            return  # overtaken by a newer one: its counters would look as if they had fallen
        snapshot = plausible(snapshot)
        if _is_other_process(slot, snapshot):
            slot = self._replace_unannounced(slot, now)
        slot.seen = snapshot
        if snapshot.process_started_at_s is not None:
            slot.process_started_at_s = snapshot.process_started_at_s
        if snapshot.kv_capacity_tokens:
            slot.measured_kv_tokens = snapshot.kv_capacity_tokens
            self._standing.refresh(slot, now)
        if self._config.enable_metrics_feedback and slot.feedback.is_new(snapshot):
            observed = observed_load(
                self._config.load_metric,
                snapshot,
                kv_capacity_tokens=slot.kv_capacity_tokens,
                tokens_per_request=tokens_per_request,
            )
            local = self._standing.local_load(slot)
            slot.feedback.on_snapshot(snapshot, local=local, observed=observed, now=now)
        self._standing.refresh(slot, now)

    def set_remote_load(
        self, loads: Mapping[tuple[InstanceId, Incarnation], RemoteLoad], now: float
    ) -> None:
        """Replace what the other schedulers have in flight; what is absent is 0."""
        for slot in self._slot_of.values():
            remote = loads.get((slot.instance_id, slot.incarnation), NO_REMOTE_LOAD)
            if remote != slot.remote:
                slot.remote = remote
                self._standing.on_remote_changed(slot, now)

    def own_load(self) -> tuple[OwnLoad, ...]:
        return tuple(
            OwnLoad(s.instance_id, s.incarnation, s.num_requests, s.num_tokens)
            for s in self._slot_of.values()
            if s.num_requests
        )

    def _add(self, spec: InstanceSpec, prefix_key: int | None, now: float) -> Slot:
        """Make a slot for `spec`; `prefix_key` continues the prefix cache of an earlier one."""
        self._last_index = index = self._last_index + 1
        key = index if prefix_key is None else prefix_key
        slot = slot_for(spec, index=index, prefix_key=key, config=self._config)
        self._slot_of[spec.instance_id] = slot
        if self._affinity is not None:
            self._affinity.attach(slot)
        self._standing.enter(slot, now)
        return slot

    def _replace(self, slot: Slot, spec: InstanceSpec, *, keep_prefixes: bool, now: float) -> Slot:
        self._standing.retire(slot)
        if not keep_prefixes:
            self._forget_prefixes(slot)
        new = self._add(spec, slot.prefix_key if keep_prefixes else None, now)
        new.feedback.on_process_started()
        return new

    def _replace_unannounced(self, slot: Slot, now: float) -> Slot:
        """Void counters, bias, prompts and version: the process changed under us.

        The new slot is not routable until somebody has confirmed its version.
        """
        self._standing.notices.append(RestartSeen(slot.instance_id, slot.incarnation))
        spec = InstanceSpec(
            instance_id=slot.instance_id,
            incarnation=slot.announced_incarnation,
            tp=slot.tp,
            is_ready=slot.is_ready,
        )
        new = self._replace(slot, spec, keep_prefixes=False, now=now)
        new.incarnation = Incarnation(f"{slot.incarnation}'")
        new.is_draining = slot.is_draining
        return new

    def _forget_prefixes(self, slot: Slot) -> None:
        if self._affinity is not None:
            self._affinity.detach(slot.prefix_key)


def _is_other_process(slot: Slot, snapshot: LoadSnapshot) -> bool:
    """Tell a restart from its start time, else from a counter that fell."""
    known, seen = slot.process_started_at_s, snapshot.process_started_at_s
    if known is not None and seen is not None:
        return abs(seen - known) > RESTART_TOLERANCE_S
    return slot.feedback.has_counter_fallen(snapshot)
