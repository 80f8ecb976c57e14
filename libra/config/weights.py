"""How new weights reach the rollout engines."""

from typing import Literal

from libra.config.base import Config, PositiveCount, Seconds

PauseMode = Literal["keep", "wait", "abort"]
ReloadMethod = Literal["restart", "inplace"]
ReloadStrategy = Literal["parallel", "serial"]


class WeightsConfig(Config, frozen=True, kw_only=True):
    """Flat keys of weight synchronisation."""

    sync_interval: PositiveCount = 1
    """Training steps between weight sync attempts; max_head_offpolicyness is at least one less."""

    rollout_weight_sync_mode: Literal["none", "restart", "nccl"] = "restart"
    """`restart`: one reload request per version through a checkpoint on disk; `nccl`: vLLM's native
    weight transfer from the ranks' memory, over NCCL, or gloo on CPU; `none`: never."""

    rollout_weight_reload_method: ReloadMethod = "inplace"
    """`restart` replaces the server process; `inplace` refreshes the resident workers."""

    rollout_weight_reload_strategy: ReloadStrategy = "parallel"
    """Reload rollout instances concurrently with parallel (default), or one at a time per node with
    serial, for nodes that cannot tolerate concurrent model loads."""

    rollout_weight_pause_mode: PauseMode = "keep"
    """Requests in flight during an inplace reload: keep freezes and continues them under the new
    weights, wait lets them finish, abort ends them with what they have."""

    rollout_weight_ack_timeout_s: Seconds = 600.0
    """Longest wait for one instance's ACK, in seconds."""
