"""What the engines' own counters say about the time since they were last asked. Pure.

Counters only grow while a process lives, so the difference of two pages is what lies between them;
a page of another process is a new beginning.
"""

from collections.abc import Mapping

import msgspec

from libra.ids import Incarnation, InstanceId
from libra.planner.forecast import ServingUse


class ServingCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Of one server since it started."""

    latency_s: float
    num_latencies: float
    num_engine_steps: float
    num_generated_tokens: float
    num_computed_prompt_tokens: float


class ServingMeter:
    """Adds up by TP degree; `take` closes an interval."""

    def __init__(self, tp_of: Mapping[InstanceId, int]) -> None:
        self._tp_of = dict(tp_of)
        self._newest: dict[InstanceId, tuple[Incarnation, ServingCounters]] = {}
        self._taken: dict[InstanceId, tuple[Incarnation, ServingCounters]] = {}
        self._ended: set[InstanceId] = set()

    def add(self, instance_id: InstanceId, tp: int) -> None:
        """Take in an instance that the meter did not know, or that comes with another degree."""
        self._tp_of[instance_id] = tp

    def remove(self, instance_id: InstanceId) -> None:
        """It has ended: what it did since the last call of `take` still counts there."""
        self._ended.add(instance_id)

    def on_page(
        self, instance_id: InstanceId, incarnation: Incarnation, counters: ServingCounters | None
    ) -> None:
        """Take in one page; the first of a process is where its counting begins."""
        if counters is None or instance_id not in self._tp_of:
            return
        self._ended.discard(instance_id)
        self._newest[instance_id] = (incarnation, counters)
        if self._taken.get(instance_id, ("", None))[0] != incarnation:
            self._taken[instance_id] = (incarnation, counters)

    def take(self) -> tuple[ServingUse, ...]:
        """What was done since the last call, for each TP degree that did anything."""
        parts: dict[int, list[ServingUse]] = {}
        for instance_id, (_, now) in self._newest.items():
            _, before = self._taken[instance_id]
            tp = self._tp_of[instance_id]
            parts.setdefault(tp, []).append(_difference(tp, now, before))
        for instance_id in self._ended:
            self._newest.pop(instance_id, None)
        self._ended.clear()
        self._taken = dict(self._newest)
        wholes = (_sum(tp, uses) for tp, uses in sorted(parts.items()))
        return tuple(use for use in wholes if use.num_latencies > 0)


def _difference(tp: int, now: ServingCounters, before: ServingCounters) -> ServingUse:
    return ServingUse(
        tp=tp,
        **{name: getattr(now, name) - getattr(before, name) for name in now.__struct_fields__},
    )


def _sum(tp: int, uses: list[ServingUse]) -> ServingUse:
    names = ServingCounters.__struct_fields__
    return ServingUse(tp=tp, **{name: sum(getattr(use, name) for use in uses) for name in names})
