"""How new weights reach the rollout engines."""

from typing import Literal

from libra.config.base import Config, PositiveCount, Seconds

PauseMode = Literal["keep", "wait", "abort"]
ReloadMethod = Literal["restart", "inplace"]
ReloadStrategy = Literal["parallel", "serial"]


class WeightsConfig(Config, frozen=True, kw_only=True):
    """Flat keys of weight synchronisation."""

    sync_interval: PositiveCount = 1
    """Training steps between weight sync attempts."""

    rollout_weight_sync_mode: Literal["none", "restart", "nccl"] = "restart"
    """`restart`: one reload request per version through a checkpoint on disk; `nccl`: vLLM's native
    weight transfer; `none`: never."""

    rollout_weight_reload_method: ReloadMethod = "inplace"
    """`restart` replaces the server process; `inplace` refreshes the resident workers."""

    rollout_weight_reload_strategy: ReloadStrategy = "parallel"
    """All instances at once, or one at a time per node."""

    rollout_weight_pause_mode: PauseMode = "keep"
    """What happens to requests in flight during an inplace reload."""

    rollout_weight_ack_timeout_s: Seconds = 600.0
    """Longest wait for one instance's ACK."""
