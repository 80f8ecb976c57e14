"""Which nodes of a run are there. Pure."""

from collections.abc import Iterable

from libra.ids import NodeRank
from libra.planner.matching import slots_of
from libra.planner.plan import Plan, Slot


class Presence:
    """What plans may use; of a run on one node everything."""

    def __init__(self, followers: Iterable[NodeRank] = ()) -> None:
        """None of them has joined yet."""
        self.absent = frozenset(followers)
        """Nodes that are not there."""

        self.uncounted: frozenset[NodeRank] = frozenset()
        """Nodes that the run does without; one that is there again is not counted on at once."""

    def slots_missing(self, slots: Iterable[Slot]) -> frozenset[Slot]:
        """Those of nodes that no plan may use now."""
        nodes = self.absent | self.uncounted
        return frozenset(slot for slot in slots if slot[0] in nodes)

    def missed_by(self, plan: Plan) -> str:
        """In words which nodes of `plan` it may not use now; empty without any."""
        nodes = {node for node, _ in slots_of(plan)} & (self.absent | self.uncounted)
        return ", ".join(
            f"node {node} is {'away' if node in self.absent else 'not counted on yet'}"
            for node in sorted(nodes)
        )

    def is_away(self, plan: Plan) -> bool:
        """Whether a node of `plan` is not there."""
        return bool(self.absent & {node for node, _ in slots_of(plan)})

    def may_come(self, plan: Plan) -> bool:
        """Whether a node of `plan` is away that the run has not gone on without."""
        return bool((self.absent - self.uncounted) & {node for node, _ in slots_of(plan)})
