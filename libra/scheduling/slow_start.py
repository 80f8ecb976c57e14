"""How a cold instance eases in: it counts as if loaded like the average, and sheds that in steps.

Without this an idle newcomer beside a busy fleet takes every request for a while: a storm of
prefills on a server whose caches, and on GPU whose graphs, are cold.

Steps lie on one grid for all instances. With a step of its own each would carry the average of
another moment, and instances that are equally cold would differ by as much as the load has grown.
"""

from math import inf

DURATION_S = 30.0
"""At most: the first step may be cut short by the grid."""

NUM_STEPS = 10
STEP_S = DURATION_S / NUM_STEPS


def step_of(now: float) -> int:
    """Number the step of the grid that `now` lies in."""
    return int(now // STEP_S)


def cold_fraction(since: float | None, now: float) -> float:
    """Share of the fleet's mean load to add to an instance routable since `since`: 1 down to 0."""
    if since is None:
        return 0.0
    return 1.0 - min(step_of(now) - step_of(since), NUM_STEPS) / NUM_STEPS


def next_step_at(since: float | None, now: float) -> float:
    """When `cold_fraction` changes next, later than `now`; inf when it has reached 0."""
    if since is None or step_of(now) - step_of(since) >= NUM_STEPS:
        return inf
    return (step_of(now) + 1) * STEP_S
