"""How long a run goes on, what it keeps, and where it runs."""

from typing import Annotated, Literal

import msgspec

from libra.config.base import Config, Count, PositiveCount, Seconds


class RunControlConfig(Config, frozen=True, kw_only=True):
    """Flat keys of the run as a whole."""

    run_name: str = ""
    """Name used in the run directory; empty means the configuration file's stem."""

    run_id: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9._-]{1,80})?$")] = ""
    """Identity of the run in its records, tokens and published weights, up to 80 letters, digits,
    `.`, `_` and `-`; empty makes one from the run directory's name. Servers in
    heterogeneous_rollout.endpoints are started with the same one."""

    seed: Count = 0
    """Seeds data order, sampling seeds and initialisation."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where children run; auto takes CUDA when a device is there. On CPU a "GPU" is a slot: one
    rank or one tensor-parallel worker."""

    total_steps: PositiveCount | None = None
    """Stop after this training step. At least one of total_steps, epochs, max_run_s is set."""

    epochs: PositiveCount | None = None
    """Stop when every prompt has been trained on this many times, but for those that keep failing;
    a last batch that is not full takes prompts of the next epoch."""

    max_run_s: Seconds | None = None
    """Stop, with a save, after this many seconds of wall time in one process's life."""

    save_interval: Count = 10
    """Training steps between checkpoints; 0 saves only when the run stops."""

    keep_last: PositiveCount = 2
    """Complete checkpoints, and published weight versions, that are kept: two, so that one
    survives a crash while its successor is written."""
