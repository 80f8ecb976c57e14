"""How a cold instance eases in: it counts as if loaded like the average, and sheds that in steps.

Without this an idle newcomer beside a busy fleet takes every request for a while: a storm of
prefills on a server whose caches, and on GPU whose graphs, are cold.
"""

from math import inf

DURATION_S = 30.0
NUM_STEPS = 10
STEP_S = DURATION_S / NUM_STEPS


def cold_fraction(since: float | None, now: float) -> float:
    """Share of the fleet's mean load to add to an instance routable since `since`: 1 down to 0."""
    if since is None:
        return 0.0
    return 1.0 - min(int((now - since) / STEP_S), NUM_STEPS) / NUM_STEPS


def next_step_at(since: float | None, now: float) -> float:
    """When `cold_fraction` changes next, later than `now`; inf when it has reached 0."""
    if since is None or now >= since + DURATION_S:
        return inf
    step = int((now - since) / STEP_S) + 1
    at = since + step * STEP_S
    # Rounding may put the boundary that was just reached at `now` again.
    return at if at > now else at + STEP_S
