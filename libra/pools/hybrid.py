"""Hybrid replicas: who is on the way in, who takes part in a step, who is on the way out. Pure.

A replica starts its processes (JOINING), loads a snapshot that the core takes at a step boundary,
takes the steps since then with the core's gradients (CATCHING_UP), and then contributes (MEMBER).
The membership of a step is frozen when it begins and numbered by an epoch. From the step after its
snapshot on, a replica is in every membership, as joiner or as member: the core keeps or sends it
the gradients of each. Nothing here waits for a replica: a step begins with whoever is there.
"""

from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias

import msgspec

from libra.errors import InvariantError
from libra.ids import ReplicaId


class BegunStep(msgspec.Struct, frozen=True):
    """The frozen membership of a step."""

    step: int
    mini_batches: tuple[int, ...]
    """Indices of those that have a token to train."""

    epoch: int
    members: tuple[ReplicaId, ...]
    joiners: tuple[ReplicaId, ...]


class HybridState(Enum):
    JOINING = "joining"
    """Its processes start, wait for a snapshot, or load it."""

    CATCHING_UP = "catching_up"
    MEMBER = "member"
    LEAVING = "leaving"
    """It has been told to leave; it is in no membership any more."""

    GONE = "gone"


_LEGAL_MOVES = {
    HybridState.JOINING: {HybridState.CATCHING_UP, HybridState.LEAVING, HybridState.GONE},
    HybridState.CATCHING_UP: {HybridState.MEMBER, HybridState.LEAVING, HybridState.GONE},
    HybridState.MEMBER: {HybridState.LEAVING, HybridState.GONE},
    HybridState.LEAVING: {HybridState.GONE},
    HybridState.GONE: set(),
}


class Hybrid(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as the pool sees it; a change of state is another Hybrid."""

    replica_id: ReplicaId
    state: HybridState = HybridState.JOINING
    has_devices: bool = True
    """False: its processes come up as far as they can, and wait for them."""

    is_ready: bool = False
    """Its processes have built the model."""

    since: float = 0.0
    """Instant when it was ready, or from which on it is catching up."""

    snapshot: int | None = None
    """The step whose snapshot it loads or has loaded."""

    told: int = -1
    """The newest step that it has been told to take."""

    missed: tuple[BegunStep, ...] = ()
    """Begun since its snapshot, before it could be told to take them."""

    taken: int = -1
    """The newest step that it has said it took."""

    reason: str = ""
    """Why it is leaving or gone."""


class StartReplica(msgspec.Struct, frozen=True, tag=True):
    replica_id: ReplicaId
    has_devices: bool = True


class GiveDevices(msgspec.Struct, frozen=True, tag=True):
    """Let a replica that waits for its devices go on."""

    replica_id: ReplicaId


class StopReplica(msgspec.Struct, frozen=True, tag=True):
    """End its processes: it is on its way out."""

    replica_id: ReplicaId
    reason: str
    is_asked: bool = False
    """It may finish what it does; nobody waits for one that fell out."""


class TakeSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Have the core write its state now, before its next step."""

    step: int


class Join(msgspec.Struct, frozen=True, tag=True):
    """Have the replica load the snapshot of `step` and connect."""

    replica_id: ReplicaId
    step: int


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Have the replica take `step` with the core's gradients."""

    replica_id: ReplicaId
    step: int
    mini_batches: tuple[int, ...]
    epoch: int


class Joined(msgspec.Struct, frozen=True, tag=True):
    """It is a member from this step on."""

    replica_id: ReplicaId


class Lost(msgspec.Struct, frozen=True, tag=True):
    """It fell out without being asked to leave, and its processes are gone."""

    replica_id: ReplicaId
    reason: str
    frees_devices: bool = True
    """False: processes of it do not end."""


class Left(msgspec.Struct, frozen=True, tag=True):
    """Its processes are gone, as they were asked to be."""

    replica_id: ReplicaId
    frees_devices: bool = True


Command: TypeAlias = StartReplica | GiveDevices | StopReplica | TakeSnapshot | Join | Follow
News: TypeAlias = Joined | Lost | Left
Commands: TypeAlias = tuple[Command | News, ...]


class HybridPool:
    """All replicas of a run, by id; ids are never used twice."""

    def __init__(self, *, join_timeout_s: float) -> None:
        """`join_timeout_s`: from ready until it has joined, and again until it is a member."""
        self._join_timeout_s = join_timeout_s
        self._hybrids: dict[ReplicaId, Hybrid] = {}
        self._epoch = 0
        self._last_members: tuple[ReplicaId, ...] = ()
        self._saving: int | None = None
        self._is_training = False

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def saving(self) -> int | None:
        """The step whose snapshot the core is writing."""
        return self._saving

    @property
    def hybrids(self) -> tuple[Hybrid, ...]:
        return tuple(self._hybrids.values())

    def __getitem__(self, replica_id: ReplicaId) -> Hybrid:
        return self._hybrids[replica_id]

    def ids_in(self, *states: HybridState) -> tuple[ReplicaId, ...]:
        return tuple(it.replica_id for it in self._hybrids.values() if it.state in states)

    def on_warm(self, replica_id: ReplicaId) -> Commands:
        """A new replica is to come up as far as it can without its devices."""
        return self._new(replica_id, has_devices=False)

    def on_attach(self, replica_id: ReplicaId) -> Commands:
        """A new replica is wanted, or one that waits for its devices may have them."""
        hybrid = self._hybrids.get(replica_id)
        if hybrid is None or hybrid.has_devices:
            return self._new(replica_id, has_devices=True)
        if hybrid.state is not HybridState.JOINING:
            return ()  # it was lost meanwhile, which is said when its processes are gone
        self._set(msgspec.structs.replace(hybrid, has_devices=True))
        return (GiveDevices(replica_id),)

    def _new(self, replica_id: ReplicaId, *, has_devices: bool) -> Commands:
        if replica_id in self._hybrids:
            raise InvariantError(f"{replica_id} has been there before")
        self._hybrids[replica_id] = Hybrid(replica_id=replica_id, has_devices=has_devices)
        return (StartReplica(replica_id, has_devices),)

    def on_detach(self, replica_id: ReplicaId) -> Commands:
        """It is to leave: with the next step it is no member any more. Asking again is no harm."""
        hybrid = self._hybrids[replica_id]
        if hybrid.state in (HybridState.LEAVING, HybridState.GONE):
            return ()
        if self._is_training and hybrid.state is HybridState.MEMBER:
            # The step that goes on was promised its gradients.
            self._set(msgspec.structs.replace(hybrid, reason=_ASKED))
            return ()
        return self._end(hybrid, _ASKED)

    def on_ready(self, replica_id: ReplicaId, *, now: float) -> None:
        """Its processes are up; at the next `on_boundary` it is thought of."""
        hybrid = self._hybrids[replica_id]
        if hybrid.state is HybridState.JOINING and not hybrid.is_ready:
            self._set(msgspec.structs.replace(hybrid, is_ready=True, since=now))

    def on_boundary(self, *, step: int, is_saving: bool) -> Commands:
        """The core is at `step`, perhaps between two steps: a snapshot if one is wanted.

        `is_saving`: a checkpoint is being written, which a snapshot would hold the core up for.
        """
        waiting = [it for it in self._hybrids.values() if _wants_snapshot(it)]
        if not waiting or self._is_training or self._saving is not None or is_saving:
            return ()
        self._saving = step
        for hybrid in waiting:
            self._set(msgspec.structs.replace(hybrid, snapshot=step, told=step))
        return (TakeSnapshot(step),)

    def on_saved(self, step: int) -> Commands:
        """The snapshot of `step` is complete."""
        if self._saving != step:
            return ()
        self._saving = None
        return tuple(
            Join(it.replica_id, step)
            for it in self._hybrids.values()
            if it.state is HybridState.JOINING and it.snapshot == step
        )

    def on_not_saved(self, step: int, reason: str) -> Commands:
        """The snapshot of `step` could not be written: whoever waits for it is given up."""
        if self._saving != step:
            return ()
        self._saving = None
        waiting = [
            it.replica_id
            for it in self._hybrids.values()
            if it.state is HybridState.JOINING and it.snapshot == step
        ]
        return tuple(one for replica_id in waiting for one in self.on_lost(replica_id, reason))

    def on_joined(self, replica_id: ReplicaId, step: int, *, now: float) -> Commands:
        """It holds the snapshot of `step` and every lane let it in."""
        hybrid = self._hybrids[replica_id]
        if hybrid.state is not HybridState.JOINING or hybrid.snapshot != step:
            return ()
        self._move(hybrid, HybridState.CATCHING_UP, since=now, taken=step)
        return tuple(self._follow(replica_id, begun) for begun in hybrid.missed)

    def on_taken(self, replica_id: ReplicaId, step: int) -> None:
        """It took `step`, as joiner or as member."""
        hybrid = self._hybrids[replica_id]
        if step > hybrid.taken:
            self._set(msgspec.structs.replace(hybrid, taken=step))

    def on_step_begins(
        self, step: int, mini_batches: tuple[int, ...]
    ) -> tuple[BegunStep | None, Commands]:
        """Freeze the membership of `step`; None when no replica has to do with it."""
        promoted = [it for it in self._hybrids.values() if _has_caught_up(it, step)]
        for hybrid in promoted:
            self._move(hybrid, HybridState.MEMBER)
        members = self.ids_in(HybridState.MEMBER)
        if members != self._last_members:
            self._last_members, self._epoch = members, self._epoch + 1
        joiners = tuple(it.replica_id for it in self._hybrids.values() if _is_kept_for(it))
        self._is_training = True
        begun = BegunStep(step, mini_batches, self._epoch, members, joiners)
        if not members and not joiners:
            return None, ()
        for replica_id in members:
            self._set(msgspec.structs.replace(self._hybrids[replica_id], told=step))
        for hybrid in [it for it in self._hybrids.values() if _is_loading(it)]:
            self._set(msgspec.structs.replace(hybrid, missed=(*hybrid.missed, begun)))
        following = self.ids_in(HybridState.CATCHING_UP)
        news = [Joined(it.replica_id) for it in promoted]
        return begun, (*news, *(self._follow(replica_id, begun) for replica_id in following))

    def on_trained(self, dropped: Mapping[ReplicaId, str]) -> Commands:
        """The core took a step; `dropped` are replicas whose contribution or weights were bad."""
        self._is_training = False
        result: list[Command | News] = []
        for replica_id, reason in dropped.items():
            result += self.on_lost(replica_id, reason)
        for hybrid in list(self._hybrids.values()):
            if hybrid.state is HybridState.MEMBER and hybrid.reason:
                result += self._end(hybrid, hybrid.reason)
        return tuple(result)

    def on_lost(self, replica_id: ReplicaId, reason: str) -> Commands:
        """It fell out: dropped by the core, or its processes ended without being asked to."""
        hybrid = self._hybrids.get(replica_id)
        if hybrid is None or hybrid.state in (HybridState.LEAVING, HybridState.GONE):
            return ()
        return self._end(hybrid, reason)

    def on_down(self, replica_id: ReplicaId, reason: str, *, is_clean: bool = True) -> Commands:
        """Its processes are gone, or do not end (False)."""
        hybrid = self._hybrids[replica_id]
        if hybrid.state is HybridState.GONE:
            return ()
        why = hybrid.reason or reason
        self._move(hybrid, HybridState.GONE, reason=why)
        # One that never had devices stands in nobody's way.
        frees = is_clean or not hybrid.has_devices
        if why == _ASKED:
            return (Left(replica_id, frees),)
        return (Lost(replica_id, why if is_clean else f"{why}; {reason}", frees),)

    def on_core_lost(self) -> Commands:
        """The core starts anew from a checkpoint: what replicas hold is of no use to it."""
        self._saving, self._is_training = None, False
        result: list[Command | News] = []
        for replica_id in list(self._hybrids):
            result += self.on_lost(replica_id, "the core was lost")
        return tuple(result)

    def on_tick(self, *, now: float) -> Commands:
        """Give up replicas that take too long to become members."""
        late = [
            it
            for it in self._hybrids.values()
            if it.state in (HybridState.JOINING, HybridState.CATCHING_UP)
            and it.is_ready
            and now - it.since >= self._join_timeout_s
        ]
        result: list[Command | News] = []
        for hybrid in late:
            reason = f"{hybrid.state.value} for {self._join_timeout_s:g} s"
            result += self.on_lost(hybrid.replica_id, reason)
        return tuple(result)

    def _follow(self, replica_id: ReplicaId, begun: BegunStep) -> Follow:
        hybrid = self._hybrids[replica_id]
        if begun.step != hybrid.told + 1:
            raise InvariantError(f"{replica_id} follows {begun.step} after {hybrid.told}")
        self._set(msgspec.structs.replace(hybrid, told=begun.step))
        return Follow(replica_id, begun.step, begun.mini_batches, begun.epoch)

    def _end(self, hybrid: Hybrid, reason: str) -> Commands:
        self._move(hybrid, HybridState.LEAVING, reason=reason)
        return (StopReplica(hybrid.replica_id, reason, is_asked=reason == _ASKED),)

    def _move(self, hybrid: Hybrid, state: HybridState, **changes: object) -> None:
        if state not in _LEGAL_MOVES[hybrid.state]:
            raise InvariantError(
                f"{hybrid.replica_id} cannot go from {hybrid.state.value} to {state.value}"
            )
        # Nobody comes back to JOINING: what it missed there is told now or of no use.
        self._set(msgspec.structs.replace(hybrid, state=state, missed=(), **changes))

    def _set(self, hybrid: Hybrid) -> None:
        self._hybrids[hybrid.replica_id] = hybrid


_ASKED = "asked to leave"


def _wants_snapshot(hybrid: Hybrid) -> bool:
    return hybrid.state is HybridState.JOINING and hybrid.is_ready and hybrid.snapshot is None


def _is_loading(hybrid: Hybrid) -> bool:
    return hybrid.state is HybridState.JOINING and hybrid.snapshot is not None


def _is_kept_for(hybrid: Hybrid) -> bool:
    """Whether it needs the gradients of steps that it does not contribute to."""
    return _is_loading(hybrid) or hybrid.state is HybridState.CATCHING_UP


def _has_caught_up(hybrid: Hybrid, step: int) -> bool:
    """Whether it can contribute to `step`: it has been told all before, and has all but the last.

    That one it takes before it begins `step`. The core compares digests all the same.
    """
    is_told = hybrid.state is HybridState.CATCHING_UP and hybrid.told == step - 1
    return is_told and hybrid.taken >= step - 2
