"""Names of what comes with Libra, for checking `workflow` and `reward` before a run."""

from libra.config.load import ShippedNames
from libra.rewards.loading import BUILT_IN as REWARDS
from libra.workflows.loading import BUILT_IN as WORKFLOWS


def shipped_names() -> ShippedNames:
    """Workflows and rewards that need no module."""
    return ShippedNames(workflows=tuple(WORKFLOWS), rewards=tuple(REWARDS))
