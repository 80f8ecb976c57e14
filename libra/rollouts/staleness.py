"""How many trajectories may be in flight so that none is trained on too late.

Law (shared with AReaL and SkyRL): a trajectory answered by version v may be consumed up to version
v + S, so at most (S + v + 1) batches may have been started while engines serve v. Everything here
counts trajectories, never prompts.
"""

from math import inf

from libra.ids import PolicyVersion


def capacity(
    *,
    max_head_offpolicyness: float,
    serving_version: PolicyVersion,
    batch_size: int,
    accepted: int,
    running: int,
    max_concurrent: int,
) -> int:
    """Trajectories that may be started now; never negative.

    `serving_version` is the oldest version a new request could be answered with. `accepted` counts
    since version 0 and includes what has been trained on; `running` includes what is enqueued.
    """
    by_concurrency = max(1, max_concurrent) - running
    batches = max_head_offpolicyness + serving_version + 1
    if batches == inf:
        return max(0, by_concurrency)
    by_staleness = int(batches * max(1, batch_size)) - (accepted + running)
    return max(0, min(by_concurrency, by_staleness))


def accepted_on_resume(version: PolicyVersion, batch_size: int) -> int:
    """What `accepted` starts from when a run goes on at `version`.

    Starting from 0 instead would let `version` extra batches in at once, all of them stale later.
    """
    return version * batch_size


def staleness(*, consumed_at: PolicyVersion, oldest: PolicyVersion) -> int:
    """Versions between the oldest token and the policy that trains on it.

    `consumed_at` is the policy before the optimizer step: the batch of step k has v(k-1).
    """
    return consumed_at - oldest
