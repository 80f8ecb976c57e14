"""One rollout instance's states, and the table of legal moves between them."""

from enum import Enum

import msgspec

from libra.errors import InvariantError
from libra.ids import Incarnation, InstanceId, NodeRank, PolicyVersion


class MemberState(Enum):
    WARMING = "warming"
    """A process comes up to the point where it needs its devices, which others still have."""

    STARTING = "starting"
    """A process is coming up, or is about to be started."""

    STALE = "stale"
    """Answers, but not (known to be) at the committed version: never routed to."""

    ASLEEP = "asleep"
    """It gave its devices to training and waits for them: no weights, no requests, no version."""

    WAKING = "waking"
    """It is taking its devices back; what it answers with then is still to be loaded."""

    RELOADING = "reloading"
    SERVING = "serving"
    """At the committed version; the only state that is routed to."""

    DRAINING = "draining"
    """No new requests; those in flight go on."""

    QUARANTINED = "quarantined"
    """A reload failed, so its weights are unknown, or it hangs. It is loaded once more from a good
    version, or replaced by a restart."""

    RESTARTING = "restarting"
    """The process is gone; its restart policy is at work."""

    GONE = "gone"
    """Its restart budget is spent, or it left; the pool goes on without it."""


_ENDS = frozenset({MemberState.RESTARTING, MemberState.GONE})
ANSWERING = frozenset(
    {MemberState.STALE, MemberState.RELOADING, MemberState.SERVING, MemberState.DRAINING}
)

LEGAL_MOVES: dict[MemberState, frozenset[MemberState]] = {
    MemberState.WARMING: _ENDS | {MemberState.STARTING},
    MemberState.STARTING: _ENDS | {MemberState.STALE},
    # A process that answers may come to answer in another way, turn out broken, or end.
    **{
        state: (ANSWERING - {state}) | _ENDS | {MemberState.QUARANTINED, MemberState.ASLEEP}
        for state in ANSWERING
    },
    MemberState.ASLEEP: _ENDS | {MemberState.WAKING},
    MemberState.WAKING: _ENDS | {MemberState.STALE},
    MemberState.QUARANTINED: _ENDS | {MemberState.RELOADING},
    MemberState.RESTARTING: frozenset({MemberState.STARTING, MemberState.GONE}),
    MemberState.GONE: frozenset(),
}


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as the pool sees it; a change of state is another Member."""

    instance_id: InstanceId
    num_gpus: int
    node: NodeRank = NodeRank(0)
    state: MemberState = MemberState.STARTING
    since: float
    """Instant of the last change of state."""

    incarnation: Incarnation | None = None
    version: PolicyVersion | None = None
    """None: unknown."""

    waits_for: frozenset[InstanceId] = frozenset()
    """While it is warming: those that have the devices it is to get."""

    is_drained_by_operator: bool = False
    is_leaving: bool = False
    """Its process is to be replaced, or it leaves the plan; nothing new is sent to it."""

    is_leaving_plan: bool = False
    """It leaves the plan: a process that comes in its place does not change that."""

    is_planned_restart: bool = False
    """A reload ended the process before this one, so the instance keeps its prompts."""

    last_error: str = ""
    num_restarts: int = 0


def moved(member: Member, state: MemberState, *, now: float, **changes: object) -> Member:
    """Return `member` in another state. Raises InvariantError when the move is not in the table."""
    if state not in LEGAL_MOVES[member.state]:
        raise InvariantError(
            f"{member.instance_id} cannot go from {member.state.value} to {state.value}"
        )
    return msgspec.structs.replace(member, state=state, since=now, **changes)
