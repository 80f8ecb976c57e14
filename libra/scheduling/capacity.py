"""KV capacity in tokens per instance: configured, measured or estimated, in this order."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from libra.scheduling.notice import KvCapacityDiffers, KvCapacityMissing, Notice

if TYPE_CHECKING:
    from libra.config.rollout import SchedulingConfig
    from libra.scheduling.slot import Slot

TOLERANCE = 0.10
"""A configured capacity further than this from the measured one is worth a word."""


class KvCapacities:
    """`kv_capacity_tokens_by_tp` wins; when it is empty, the measured value, else the estimate."""

    def __init__(self, config: "SchedulingConfig", estimated_by_tp: Mapping[int, int]) -> None:
        self._configured = config.kv_capacity_tokens_by_tp
        self._estimated = dict(estimated_by_tp)
        self._is_needed = config.load_metric == "kv_tokens"
        self._told: set[tuple[str, int]] = set()

    def of(self, slot: "Slot") -> int | None:
        """Tokens, at least 1; None when nothing is known or nothing fits."""
        if self._configured:
            return self._configured.get(slot.tp)
        return slot.measured_kv_tokens or self._estimated.get(slot.tp) or None

    def notices(self, slot: "Slot") -> list[Notice]:
        """Collect what is new and worth a word about `slot`, each once per TP degree."""
        capacity, measured = self.of(slot), slot.measured_kv_tokens
        if capacity is None:
            if self._is_needed and self._is_first("missing", slot.tp):
                return [KvCapacityMissing(slot.instance_id, slot.tp)]
            return []
        if not self._configured or measured is None:
            return []
        is_off = abs(capacity - measured) > TOLERANCE * measured
        if is_off and self._is_first("differs", slot.tp):
            return [KvCapacityDiffers(slot.instance_id, slot.tp, capacity, measured)]
        return []

    def _is_first(self, topic: str, tp: int) -> bool:
        is_first = (topic, tp) not in self._told
        self._told.add((topic, tp))
        return is_first
