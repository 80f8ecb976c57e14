"""What of rollout hybrid replicas may borrow. Pure."""

from libra.planner.plan import Plan


def fewest_rollout_gpus(
    *, num_replicas: int, serves_nothing: bool, least: int, least_beside_hybrids: int
) -> int:
    """GPUs that rollout has to keep, of which `least` have to serve where nothing is lent.

    A `least_beside_hybrids` of 0 lets replicas borrow all of rollout, the last server included;
    `serves_nothing` is such a plan.
    """
    if not num_replicas:
        return least
    if serves_nothing and not least_beside_hybrids:
        return 0
    return max(least, least_beside_hybrids)


def serves_nothing(plan: Plan) -> bool:
    """Whether no server is a part of the plan."""
    return not plan.instances
