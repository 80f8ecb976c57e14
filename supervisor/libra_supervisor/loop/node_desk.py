"""Which nodes the run counts on, and the plan that fits on them. Pure.

A node that is lost is waited for, for a while, and one that came back has to stay as long before it
is counted on: so a supervisor that is started again, or a link that comes and goes, moves nothing.
"""

from typing import Final, Literal, TypeAlias

import msgspec

from libra.ids import InstanceId, NodeRank
from libra.planner.plan import Plan, Slot, TrainPlacement
from libra.planner.without_nodes import Gone, Lack, Terms, is_same, plan_without

Move: TypeAlias = Literal["loss", "servers", "training"]
"""What a change of the plan is about: to do without a node, or to use one again."""


class NodePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run that goes on without nodes that are gone."""

    home: Plan
    """With every node, at the begin."""

    terms: Terms
    followers: tuple[NodeRank, ...]
    patience_s: float
    first_patience_s: float
    """For a node that has not been there yet."""

    retry_s: float
    """After a change that came to nothing, until it is tried again."""

    micro_batch_size: int
    """Of a layout that leaves it to the configuration."""


class NodeDesk:
    """`now` is the leader's clock."""

    def __init__(self, policy: NodePolicy, *, now: float) -> None:
        self.policy = policy
        self.home = policy.home
        """The plan that the run has when nothing is missing: what was decided last, of the nodes
        that were counted on then."""

        self.has_lost = False
        """Something of it was done without, and is not all there again."""

        self.away: frozenset[NodeRank] = frozenset()
        """The run does without them, or would if anything else fitted."""

        self.lack = ""
        """Why it cannot do without them; empty when it can."""

        self._since = dict.fromkeys(policy.followers, now)
        self._here: set[NodeRank] = set()
        self._known: set[NodeRank] = set()
        self._why: dict[NodeRank, str] = {}
        self._given_up: set[InstanceId] = set()
        self._not_before: dict[Move, float] = {}
        self._begun: tuple[Move, Plan] | None = None
        self._known_to_fit = {self._layout(policy.home.train)}
        """Layouts of the core that were probed, or planned with."""

        self.refused: frozenset[tuple[int, ...]] = frozenset()
        """Layouts of the core that did not fit their recompute probe."""

        self._found: tuple[Plan, Gone, Plan | Lack] | None = None

    def on_here(self, node: NodeRank, *, now: float) -> None:
        """It has joined."""
        self._here.add(node)
        self._known.add(node)
        self._since[node] = now

    def on_lost(self, node: NodeRank, reason: str, *, now: float) -> None:
        """It has let go of everything that it had."""
        self._here.discard(node)
        self._since[node], self._why[node] = now, reason

    def settle(self, *, now: float) -> None:
        """Let those go, and those in, whose time has come."""
        for node, since in self._since.items():
            if (node in self._here) == (node in self.away) and now - since >= self._wait_s(node):
                self.away ^= {node}

    def give_up(self, instance_id: InstanceId) -> None:
        """Its restart budget is spent: it stays down."""
        self._given_up.add(instance_id)

    def gone(self, lost: frozenset[Slot]) -> Gone:
        """`lost`: slots of processes that do not end."""
        return Gone(nodes=self.away, slots=lost, instances=frozenset(self._given_up))

    def target(self, gone: Gone) -> Plan | Lack:
        """The plan that the run should have now."""
        if self._found is None or self._found[:2] != (self.home, gone):
            terms = msgspec.structs.replace(self.policy.terms, why_not=self._why_not)
            found = plan_without(self.home, gone, terms)
            self._found = (self.home, gone, found)
        return self._found[2]

    def is_known_to_fit(self, train: TrainPlacement) -> bool:
        """Whether its layout was probed or planned with, wherever that was."""
        return self._layout(train) in self._known_to_fit

    def note_fit(self, train: TrainPlacement) -> None:
        """Its recompute probe fits."""
        self._known_to_fit.add(self._layout(train))

    def refuse(self, layout: tuple[int, ...]) -> None:
        """A core of this layout does not fit: neither on these devices nor on others."""
        self.refused |= {layout}
        self._found = None

    def _why_not(self, plan: Plan) -> str:
        if plan.train.layout in self.refused:
            return "it did not fit its recompute probe"
        return self.policy.terms.why_not(plan)

    def may(self, move: Move, *, now: float) -> bool:
        return now >= self._not_before.get(move, now)

    def on_begun(self, move: Move, plan: Plan) -> None:
        self.has_lost |= move == "loss"
        self._begun = (move, plan)

    def on_over(self, plan: Plan, *, now: float) -> None:
        """No change is under way, and `plan` is in force."""
        self.has_lost &= not is_same(plan, self.home)
        if self._begun is None:
            return
        move, wanted = self._begun
        self._begun = None
        if not is_same(plan, wanted):
            self._not_before[move] = now + self.policy.retry_s

    def in_words(self, nodes: frozenset[NodeRank]) -> str:
        """`node 1 (the lease has ended), node 3`."""
        return ", ".join(
            f"node {node}" + (f" ({self._why[node]})" if node in self._why else "")
            for node in sorted(nodes)
        )

    def note(self, node: NodeRank) -> str:
        """What the run makes of a node; empty while it counts on it."""
        if node not in self.away:
            return ""
        if self.lack:
            return f"the run waits for it: {self.lack}"
        return "the run does not count on it yet" if node in self._here else WITHOUT_IT

    def _layout(self, train: TrainPlacement) -> tuple[int, ...]:
        """With the micro-batch that a plan leaves to the configuration."""
        size = train.micro_batch_size or self.policy.micro_batch_size
        return msgspec.structs.replace(train, micro_batch_size=size).layout

    def _wait_s(self, node: NodeRank) -> float:
        policy = self.policy
        return policy.patience_s if node in self._known else policy.first_patience_s


WITHOUT_IT: Final = "the run goes on without it"
