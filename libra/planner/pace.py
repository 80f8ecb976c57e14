"""How training and rollout, bound by staleness, set each other's pace.

A batch may be begun once the version is committed that lies `max_head_offpolicyness` steps before
the one that will be trained by it: its rollout has (s + 1) steps, less training, export and reload
of one. With s = 0 that is what a step has besides these, and the two sides take turns. With more,
several batches are on their way together, on average as many as steps fit into that time.
"""

from math import inf

import msgspec

_ROUNDS = 60
"""Of bisection: to the last bit of a float."""


class TrainPace(msgspec.Struct, frozen=True, kw_only=True):
    """What training takes of one step."""

    train_s: float
    export_s: float
    """Writing weights, which stops training."""

    sync_s: float
    """Until all engines have loaded them; the next step trains meanwhile."""

    @property
    def busy_s(self) -> float:
        """Until the trainer is free for the next batch: the next export waits for this sync."""
        return self.export_s + max(self.train_s, self.sync_s)

    @property
    def version_s(self) -> float:
        """From a complete batch until engines answer with what it taught."""
        return self.train_s + self.export_s + self.sync_s


class RolloutPace(msgspec.Struct, frozen=True, kw_only=True):
    """What rollout needs for one batch, and for as many as may be in flight, on given instances."""

    one_batch_s: float
    all_batches_s: float
    num_batches: int
    """At most so many at a time: what concurrency allows."""

    max_staleness: float
    """Versions; infinite where nothing is published."""

    waste_factor: float = 1.0
    """What rollout makes over what is trained on."""

    pause_s: float
    """Standing still for a reload, once in a step."""

    def batches_s(self, num_batches: float) -> float:
        """Time for a number of batches between one and all, in between linearly."""
        if self.num_batches == 1:
            return self.one_batch_s
        share = (num_batches - 1) / (self.num_batches - 1)
        return self.one_batch_s + share * (self.all_batches_s - self.one_batch_s)


def step_seconds(train: TrainPace, rollout: RolloutPace) -> float:
    """The shortest step in which both sides get done what they owe each other."""
    low = train.busy_s
    if _keeps(train, rollout, low):
        return low
    high = low + train.version_s + 2 * rollout.all_batches_s + rollout.pause_s
    while not _keeps(train, rollout, high):
        high *= 2
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if _keeps(train, rollout, middle) else (middle, high)
    return high


def _keeps(train: TrainPace, rollout: RolloutPace, step_s: float) -> bool:
    if step_s <= 0:
        return False
    allowed_s = rollout.num_batches * step_s
    if rollout.max_staleness < inf:
        allowed_s = min(allowed_s, (rollout.max_staleness + 1) * step_s - train.version_s)
    num_batches = min(max(1.0, allowed_s / step_s), float(rollout.num_batches))
    needed_s = rollout.waste_factor * rollout.batches_s(num_batches)
    return needed_s + num_batches * rollout.pause_s <= allowed_s
