"""Seconds to bring new weights to the engines.

Over files they are written once and read by every instance; a transfer sends them to the workers of
all instances at once. Rates are measured ones; calibration corrects them. The trainer waits from
the export until the last instance is judged, and every instance stands still while it loads.
"""

from collections.abc import Iterable

import msgspec

from libra.config.weights import WeightsConfig
from libra.planner.calibration import Calibration
from libra.planner.memory import RolloutMemory

_WRITE_BYTES_PER_S = 2e9
_DISK_BYTES_PER_S = 5e9
"""Measured: vLLM 0.22 reload_weights of 3.5 GB from a local disk in 0.64-0.77 s."""

_SERVER_START_S = 60.0
"""Measured: exec to ready on a cold page cache; 126 s with CUDA graphs."""

_PAUSE_AND_PROBE_S = 0.5

_TRANSFER_BYTES_PER_S = 7e9
_TRANSFER_PAUSE_AND_PROBE_S = 0.2
"""Measured: 1 GB over NCCL to an engine on the other of two H200 was sent in 0.15 s, and loaded and
judged in 0.30 s."""


class PublishModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the cost of a weight sync depends on, apart from the instances."""

    weights: WeightsConfig
    memory: RolloutMemory
    calibration: Calibration
    gpus_per_node: int

    @property
    def export_s(self) -> float:
        """Writing the whole model once, or sending it."""
        rate = _TRANSFER_BYTES_PER_S if self._is_transfer else _WRITE_BYTES_PER_S
        return self.calibration.ratio("weight_export") * self._whole_bytes / rate

    def load_s(self, tp: int) -> float:
        """One instance: its workers read their shards side by side, or take the whole of it."""
        if self._is_transfer:
            seconds = _TRANSFER_PAUSE_AND_PROBE_S + self._whole_bytes / _TRANSFER_BYTES_PER_S
            return self.calibration.ratio("weight_sync") * seconds
        restarts = self.weights.rollout_weight_reload_method == "restart"
        size = self.memory.budget(tp).bytes_of["weights"]
        seconds = _PAUSE_AND_PROBE_S + size / _DISK_BYTES_PER_S
        return self.calibration.ratio("weight_sync") * (
            seconds + (_SERVER_START_S if restarts else 0.0)
        )

    def sync_s(self, tps: Iterable[int]) -> float:
        """All instances: side by side, or with `serial` one after another on each node."""
        if self.weights.rollout_weight_reload_strategy == "parallel":
            return max((self.load_s(tp) for tp in tps), default=0.0)
        return max((self.load_s(tp) * max(1, self.gpus_per_node // tp) for tp in tps), default=0.0)

    def step_export_s(self) -> float:
        """Export's share of one training step."""
        return self.export_s / self._interval

    def step_sync_s(self, tps: Iterable[int]) -> float:
        """The sync's share of one training step, for the trainer that waits for it."""
        return self.sync_s(tps) / self._interval

    def step_pause_s(self, tp: int) -> float:
        """The same for an instance, which stands still for its own load only."""
        return self.load_s(tp) / self._interval

    @property
    def _is_transfer(self) -> bool:
        return self.weights.rollout_weight_sync_mode == "nccl"

    @property
    def _whole_bytes(self) -> int:
        return self.memory.budget(1).bytes_of["weights"]

    @property
    def _interval(self) -> float:
        """Steps between syncs; infinite without any."""
        if self.weights.rollout_weight_sync_mode == "none":
            return float("inf")
        return self.weights.sync_interval
