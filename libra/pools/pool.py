"""The rollout pool: what every instance is doing, and whether enough of them serve. Pure."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from libra.errors import InvariantError
from libra.ids import Incarnation, InstanceId, NodeRank, PolicyVersion
from libra.pools.member import ANSWERING, Member, MemberState, moved

FIRST: Final = NodeRank(0)
EMPTY: Final[Mapping[InstanceId, NodeRank]] = {}


class RolloutPool:
    """Members by instance id. An event of an incarnation that has ended changes nothing."""

    def __init__(
        self,
        instances: Iterable[tuple[InstanceId, int]],
        *,
        now: float,
        node_of: Mapping[InstanceId, NodeRank] = EMPTY,
    ) -> None:
        """`instances` gives each instance's id and the number of GPUs it holds.

        Those that `node_of` does not name are on the first node.
        """
        self._members = {
            instance_id: Member(
                instance_id=instance_id,
                num_gpus=num_gpus,
                node=node_of.get(instance_id, FIRST),
                since=now,
            )
            for instance_id, num_gpus in instances
        }

    def __contains__(self, instance_id: InstanceId) -> bool:
        return instance_id in self._members

    def get(self, instance_id: InstanceId) -> Member | None:
        return self._members.get(instance_id)

    def __getitem__(self, instance_id: InstanceId) -> Member:
        return self._members[instance_id]

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    def ids_in(self, *states: MemberState) -> tuple[InstanceId, ...]:
        return tuple(m.instance_id for m in self._members.values() if m.state in states)

    def num_gpus_in(self, *states: MemberState) -> int:
        return sum(m.num_gpus for m in self._members.values() if m.state in states)

    @property
    def num_possible_gpus(self) -> int:
        """GPUs that serve now or may serve again without another change of the plan.

        Those of a member that is warming count once nobody else is left to have them.
        """
        away = (MemberState.GONE, MemberState.ASLEEP)
        there = [m for m in self._members.values() if m.state not in away]
        have = {m.instance_id for m in there if m.state is not MemberState.WARMING}
        return sum(m.num_gpus for m in there if m.instance_id in have or not (m.waits_for & have))

    @property
    def is_lent_out(self) -> bool:
        """True when nobody is to stay: nothing serves before another member has come."""
        return all(m.is_leaving_plan or m.state is MemberState.GONE for m in self.members)

    @property
    def has_answering(self) -> bool:
        """Whether somebody answers who is to stay."""
        return any(m.state in ANSWERING and not m.is_leaving_plan for m in self.members)

    @property
    def answering_ids(self) -> tuple[InstanceId, ...]:
        """Instances whose process answers and is not known to be broken."""
        return tuple(m.instance_id for m in self._members.values() if m.state in ANSWERING)

    @property
    def is_settled(self) -> bool:
        """True when no member is on its way up."""
        return not self.ids_in(*COMING)

    def add(
        self,
        instance_id: InstanceId,
        num_gpus: int,
        *,
        now: float,
        node: NodeRank = FIRST,
        is_warming: bool = False,
        waits_for: frozenset[InstanceId] = frozenset(),
    ) -> None:
        """Take in a new member, or one that was gone.

        `is_warming`: it has no devices yet; `waits_for` are those that have them.
        """
        member = self._members.get(instance_id)
        if member is not None and member.state is not MemberState.GONE:
            raise InvariantError(f"{instance_id} is a member of this pool already")
        state = MemberState.WARMING if is_warming else MemberState.STARTING
        self._members[instance_id] = Member(
            instance_id=instance_id,
            num_gpus=num_gpus,
            node=node,
            state=state,
            since=now,
            waits_for=waits_for,
        )

    def remove(self, instance_id: InstanceId) -> None:
        """Its process has ended and does not come back."""
        self._members.pop(instance_id, None)

    def on_given_devices(self, instance_id: InstanceId, *, now: float) -> None:
        """A member that was warming has its devices now."""
        member = self._members[instance_id]
        if member.state is MemberState.WARMING:
            self._set(moved(member, MemberState.STARTING, now=now))

    def on_started(self, instance_id: InstanceId, incarnation: Incarnation, *, now: float) -> None:
        """A process for the instance has been spawned."""
        member = self._members[instance_id]
        if member.state is MemberState.RESTARTING:
            member = moved(member, MemberState.STARTING, now=now)
        self._set(
            msgspec.structs.replace(
                member,
                incarnation=incarnation,
                version=None,
                since=now,
                is_leaving=member.is_leaving_plan,
            )
        )

    def on_answering(self, instance_id: InstanceId, *, now: float) -> None:
        """The process answers; which weights it holds still has to be shown."""
        member = self._members[instance_id]
        if member.state in (MemberState.STARTING, MemberState.WAKING):
            self._set(moved(member, MemberState.STALE, now=now))

    def on_reload_begun(self, instance_id: InstanceId, *, now: float) -> None:
        """A reload was asked for; a later request supersedes one that is still open."""
        member = self._members[instance_id]
        if member.state is not MemberState.RELOADING:
            self._set(moved(member, MemberState.RELOADING, now=now))

    def on_version_confirmed(
        self,
        instance_id: InstanceId,
        incarnation: Incarnation | None,
        version: PolicyVersion,
        *,
        committed: PolicyVersion,
        now: float,
    ) -> bool:
        """The instance proved which version it holds. True when it may be routed to now."""
        member = self._members[instance_id]
        if incarnation != member.incarnation or member.state in _UNUSABLE:
            return False
        if version != committed:
            state = MemberState.STALE
        elif member.is_drained_by_operator or member.is_leaving:
            state = MemberState.DRAINING
        else:
            state = MemberState.SERVING
        if state is member.state:
            self._set(msgspec.structs.replace(member, version=version))
        else:
            self._set(moved(member, state, now=now, version=version))
        return state is MemberState.SERVING

    def on_reload_failed(self, instance_id: InstanceId, error: str, *, now: float) -> None:
        """Its weights are unknown from here on: out of routing until it is replaced."""
        member = self._members[instance_id]
        if member.state in _UNUSABLE:
            return
        self._set(moved(member, MemberState.QUARANTINED, now=now, version=None, last_error=error))

    def on_reload_aborted(self, instance_id: InstanceId, error: str, *, now: float) -> None:
        """It lost new weights by another's fault: it answers about itself, but for no policy."""
        member = self._members[instance_id]
        if member.state in _UNUSABLE:
            return
        if member.state is MemberState.STALE:
            self._set(msgspec.structs.replace(member, version=None, last_error=error))
            return
        self._set(moved(member, MemberState.STALE, now=now, version=None, last_error=error))

    def on_suspected(self, instance_id: InstanceId, reason: str, *, now: float) -> None:
        """It runs and does not do its work, so it is being ended: out of routing from here on."""
        member = self._members[instance_id]
        if member.state in ANSWERING:
            self._set(
                moved(member, MemberState.QUARANTINED, now=now, version=None, last_error=reason)
            )

    def on_exited(
        self, instance_id: InstanceId, error: str, *, now: float, is_planned: bool = False
    ) -> None:
        """The process is gone. `is_planned`: to be replaced by one that starts from a version.

        `error` is empty for an end that was asked for.
        """
        member = self._members[instance_id]
        if member.state in (MemberState.RESTARTING, MemberState.GONE):
            return
        self._set(
            moved(
                member,
                MemberState.RESTARTING,
                now=now,
                version=None,
                incarnation=None,
                is_leaving=member.is_leaving_plan,
                is_planned_restart=is_planned,
                last_error=error or member.last_error,
                num_restarts=member.num_restarts + 1,
            )
        )

    def on_gave_up(self, instance_id: InstanceId, error: str, *, now: float) -> None:
        member = self._members[instance_id]
        if member.state is not MemberState.GONE:
            self._set(moved(member, MemberState.GONE, now=now, version=None, last_error=error))

    def on_rewound(self, *, now: float) -> None:
        """The trainer went back to an older step: no instance is at anybody's version."""
        for instance_id in self.answering_ids:
            member = self._members[instance_id]
            if member.state is not MemberState.STALE:
                self._set(moved(member, MemberState.STALE, now=now, version=None))

    def on_drain_requested(self, instance_id: InstanceId, *, now: float) -> None:
        member = msgspec.structs.replace(self._members[instance_id], is_drained_by_operator=True)
        if member.state is MemberState.SERVING:
            member = moved(member, MemberState.DRAINING, now=now)
        self._set(member)

    def on_undrain_requested(self, instance_id: InstanceId, *, now: float) -> None:
        member = msgspec.structs.replace(self._members[instance_id], is_drained_by_operator=False)
        if member.state is MemberState.DRAINING and not member.is_leaving:
            member = moved(member, MemberState.SERVING, now=now)
        self._set(member)

    def on_replace_requested(self, instance_id: InstanceId, *, now: float) -> None:
        """Its process will be drained, ended and replaced by another."""
        member = msgspec.structs.replace(self._members[instance_id], is_leaving=True)
        if member.state is MemberState.SERVING:
            member = moved(member, MemberState.DRAINING, now=now)
        self._set(member)

    def on_leave_wanted(self, instance_id: InstanceId, *, now: float) -> None:
        """It is no part of the plan any more: drained, then stopped."""
        member = msgspec.structs.replace(
            self._members[instance_id], is_leaving=True, is_leaving_plan=True
        )
        if member.state is MemberState.SERVING:
            member = moved(member, MemberState.DRAINING, now=now)
        self._set(member)

    def on_stay_wanted(
        self, instance_id: InstanceId, *, committed: PolicyVersion | None, now: float
    ) -> bool:
        """It stays after all. True when it may be routed to at once; else it catches up first."""
        member = msgspec.structs.replace(
            self._members[instance_id], is_leaving=False, is_leaving_plan=False
        )
        if member.state is MemberState.RELOADING:
            # Nobody waits for that reload any more.
            member = moved(member, MemberState.STALE, now=now, version=None)
        elif member.state is MemberState.DRAINING and not member.is_drained_by_operator:
            is_current = committed is not None and member.version == committed
            state = MemberState.SERVING if is_current else MemberState.STALE
            member = moved(member, state, now=now)
        self._set(member)
        return member.state is MemberState.SERVING

    def on_asleep(self, instance_id: InstanceId, *, now: float) -> bool:
        """It has given its devices back. False when it is in no state to have done so."""
        member = self._members[instance_id]
        if member.state not in ANSWERING:
            return False
        # Whoever drained it meant a member of the plan, which it is not any more.
        member = moved(
            member, MemberState.ASLEEP, now=now, version=None, is_drained_by_operator=False
        )
        self._set(member)
        return True

    def on_wake_wanted(self, instance_id: InstanceId, *, now: float) -> None:
        """It is part of the plan again, and is told to take its devices back."""
        member = self._members[instance_id]
        if member.state is MemberState.ASLEEP:
            self._set(
                moved(member, MemberState.WAKING, now=now, is_leaving=False, is_leaving_plan=False)
            )

    def _set(self, member: Member) -> None:
        if member.instance_id not in self._members:
            raise InvariantError(f"{member.instance_id} is not a member of this pool")
        self._members[member.instance_id] = member


COMING: Final = (MemberState.STARTING, MemberState.WAKING, MemberState.RESTARTING)
"""On their way up."""

_UNUSABLE = (
    MemberState.WARMING,
    MemberState.STARTING,
    MemberState.ASLEEP,
    MemberState.WAKING,
    MemberState.QUARANTINED,
    MemberState.RESTARTING,
    MemberState.GONE,
)
