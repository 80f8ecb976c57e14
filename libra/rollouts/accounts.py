"""How many trajectories are where, and how many more there may be."""

from collections.abc import Mapping

import msgspec

from libra.ids import PolicyVersion
from libra.rollouts.staleness import capacity

LEASE_S = 3600.0
"""Silence of a running sample after which it counts as failed: no engine worked on a request of
it, none of its requests was placed, and no reward came. What bounds itself, such as a wait for a
place, comes on top. It ends a workflow that hangs, so that its group does not hold a place for
ever; there is no limit on how long a sample may take."""


class BufferLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds the buffer. Sizes count trajectories."""

    n_samples: int
    batch_size: int
    """A multiple of n_samples."""

    max_concurrent: int
    """At least n_samples: groups are admitted whole."""

    max_head_offpolicyness: float
    max_group_attempts: int = 3
    lease_s: float = LEASE_S
    """A running sample silent for longer counts as failed."""

    last_step: int | None = None
    """No trajectory is started that only a later step could consume."""

    max_flat_drops: int = 0
    """Dynamic sampling: groups without any advantage dropped per batch; later ones are kept."""

    @property
    def max_waiting(self) -> int:
        """Trajectories that may be running or waiting when staleness sets no bound."""
        return max(self.max_concurrent, self.batch_size) + self.batch_size


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Where every trajectory is."""

    submitted: int
    enqueued: int
    running: int
    accepted: int
    """Finished and waiting: for its siblings or for a batch."""

    consumed: int
    dropped: int
    written_off: int = 0
    """Missing from batches that were trained on without being full. Never submitted, but staleness
    counts whole batches."""


def room(limits: BufferLimits, counts: Counts, serving_version: PolicyVersion) -> int:
    """Trajectories that may be admitted while new requests are answered by `serving_version`."""
    running = counts.enqueued + counts.running
    accepted = counts.accepted + counts.consumed + counts.written_off
    by_law = capacity(
        max_head_offpolicyness=limits.max_head_offpolicyness,
        serving_version=serving_version,
        batch_size=limits.batch_size,
        accepted=accepted,
        running=running,
        max_concurrent=limits.max_concurrent,
    )
    by_waiting = limits.max_waiting - counts.accepted - running
    if limits.last_step is None:
        return max(0, min(by_law, by_waiting))
    by_end = limits.last_step * limits.batch_size - accepted - running
    return max(0, min(by_law, by_waiting, by_end))


def in_words(dropped: Mapping[str, int]) -> str:
    """`3 engine, 21 sibling`: trajectories dropped by reason, most frequent first."""
    ordered = sorted(dropped.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {reason}" for reason, count in ordered if count) or "none"
