"""One follower as its leader knows it. Pure."""

from enum import Enum
from typing import Final

import msgspec

from libra.ids import NodeRank
from libra.wire.node import Hello
from libra_supervisor.nodes.session import Session

NOBODY: Final = 0
"""No connection."""


class NodeState(Enum):
    JOINING = "joining"
    """Not heard of yet."""

    MEMBER = "member"
    SUSPECTED = "suspected"
    """Silent for half a lease, or its session is over; it may still act on what it holds."""

    LOST = "lost"
    """It has let go of everything."""


_GONE: Final = (NodeState.JOINING, NodeState.LOST)


class MemberRecord(msgspec.Struct, kw_only=True):
    """One follower as the leader knows it; changed by `Members` alone."""

    node: NodeRank
    state: NodeState = NodeState.JOINING
    since: float
    """Of the state."""

    hello: Hello | None = None
    """Of the newest session."""

    session_id: str = ""
    """Empty: none that could be taken up again."""

    session: Session
    connection: int = NOBODY
    heard: int = 0
    """The newest sign of life of the session."""

    heard_at: float
    """A lease that the follower holds began no later than this."""

    why_silent: str = ""
    why_refused: str = ""
    """Of the newest Hello, if it was not admitted."""

    num_sessions: int = 0

    @property
    def may_act(self) -> bool:
        """Whether it may still hold a lease of ours."""
        return self.state not in _GONE

    @property
    def why_untold(self) -> str | None:
        """Why it can be told nothing now; None when it can."""
        if self.session_id:
            return None
        return f"node {self.node} is {self.state.value}: {self.why_silent or 'not yet'}"
