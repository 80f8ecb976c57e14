"""Hybrid replicas between the plan, the core and their own gangs. Pure.

The machine `libra.pools.hybrid` says who takes part. Here that becomes messages to ranks: lanes
are opened at the core, snapshots are taken and thrown away, replicas are told to join and follow.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias, assert_never

import msgspec

from libra.errors import InvariantError
from libra.ids import ReplicaId, RunId
from libra.planner.plan import HybridPlacement, Slot, TrainPlacement
from libra.pools import hybrid
from libra.pools.ground import hybrid_slots
from libra.pools.hybrid import BegunStep, HybridPool, HybridState
from libra.rollouts.batch import BatchShape
from libra.wire.hybrid import (
    CoreJoined,
    FollowStep,
    JoinCore,
    LaneAddress,
    LaneOpened,
    OpenLanes,
    StepFollowed,
)
from libra.wire.rank import RankEvent, StepTrained, TakeDevice
from libra_supervisor import events
from libra_supervisor.loop import commands
from libra_supervisor.loop.commands import Command

News: TypeAlias = events.HybridJoined | events.HybridLost | events.HybridLeft


class HybridTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What the desk needs of the configuration."""

    run_id: RunId
    key: bytes
    """The secret of the lanes."""

    directory: str
    """For snapshots."""

    core: TrainPlacement
    hosts: tuple[str, ...] = ()
    """Of a run over several nodes: under which they reach each other, by node."""

    replica_size: int
    """Ranks of a replica."""

    replica_data: int
    """Data-parallel ranks of a replica; each gets a shard of its own."""

    join_timeout_s: float
    shape: BatchShape
    """Of the core's batches."""

    def snapshot_of(self, step: int) -> str:
        return str(Path(self.directory, f"step_{step:06d}"))


class Done(msgspec.Struct, frozen=True):
    """What follows from something."""

    commands: tuple[Command, ...] = ()
    news: tuple[News, ...] = ()


class HybridDesk:
    """Every `on_<event>` returns what follows."""

    def __init__(self, terms: HybridTerms) -> None:
        self.terms = terms
        self.pool = HybridPool(join_timeout_s=terms.join_timeout_s)
        self._placement_of: dict[ReplicaId, HybridPlacement] = {}
        self._attempt = 0
        self._is_core_ready = False
        self._lanes: dict[int, LaneOpened] = {}
        self._is_opening = False
        self._joins: list[hybrid.Join] = []
        """That wait for lanes."""

        self._snapshots: set[int] = set()
        self._heard: Counter[tuple[ReplicaId, str, int]] = Counter()
        """Ranks of a replica that said the same."""

    # What the plan wants

    def warm(self, placement: HybridPlacement) -> tuple[Command, ...]:
        """Start a replica as far as it comes without its devices, which `attach` gives it."""
        self._place(placement)
        return self._carried_out(self.pool.on_warm(placement.replica_id)).commands

    def attach(self, placement: HybridPlacement) -> tuple[Command, ...]:
        """Start a replica; HybridJoined or HybridLost says how it went."""
        self._place(placement)
        return self._carried_out(self.pool.on_attach(placement.replica_id)).commands

    def _place(self, placement: HybridPlacement) -> None:
        if len(placement.slots) != self.terms.replica_size:
            raise InvariantError(
                f"{placement.replica_id} has {len(placement.slots)} slots, a replica has "
                f"{self.terms.replica_size} ranks"
            )
        self._placement_of[placement.replica_id] = placement

    def detach(self, replica_id: ReplicaId) -> tuple[Command, ...]:
        """Have it leave at the next step boundary; HybridLeft says when its devices are free."""
        return self._carried_out(self.pool.on_detach(replica_id)).commands

    @property
    def present(self) -> tuple[HybridPlacement, ...]:
        """Of all replicas that hold devices, those that were told to leave included."""
        there = (it for it in self.pool.hybrids if it.state is not HybridState.GONE)
        return tuple(self._placement_of[it.replica_id] for it in there if it.has_devices)

    # What happens at the core

    def on_core_begins(self, attempt: int) -> Done:
        """Another gang is starting."""
        self._attempt = attempt
        return self.on_core_lost()

    def on_core_lost(self) -> Done:
        """Its lanes are gone."""
        self._is_core_ready = self._is_opening = False
        self._lanes.clear()
        self._joins.clear()
        return self._carried_out(self.pool.on_core_lost())

    def on_core_reshaped(self, core: TrainPlacement) -> None:
        """From now on replicas are copies of a core of another layout. None is there now."""
        grid = core.tp * core.pp * core.cp
        self.terms = msgspec.structs.replace(
            self.terms, core=core, replica_size=grid * core.ep, replica_data=core.ep
        )

    def on_core_ready(self) -> None:
        self._is_core_ready = True

    def on_lane_opened(self, said: LaneOpened) -> Done:
        self._lanes[said.lane] = said
        return Done(self._join_if_open())

    def is_snapshot(self, directory: str) -> bool:
        """Whether this is no checkpoint of the run, but a state for replicas."""
        return Path(directory).parent == Path(self.terms.directory)

    def on_snapshot_saved(self, step: int, error: str = "") -> Done:
        """`error`: why there is none."""
        if error:
            return self._carried_out(self.pool.on_not_saved(step, error))
        return self._carried_out(self.pool.on_saved(step))

    def on_step_begins(
        self, step: int, mini_batches: tuple[int, ...]
    ) -> tuple[BegunStep | None, Done]:
        begun, ordered = self.pool.on_step_begins(step, mini_batches)
        return begun, self._carried_out(ordered)

    def on_trained(self, said: StepTrained) -> Done:
        return self._carried_out(self.pool.on_trained(said.dropped))

    def on_boundary(self, step: int, *, is_saving: bool) -> Done:
        """The core holds v(step) and does not train: lanes are opened, a snapshot taken."""
        if not self._is_core_ready:
            return Done()
        opened = self._open_lanes() if self.pool.ids_in(HybridState.JOINING) else ()
        done = self._carried_out(self.pool.on_boundary(step=step, is_saving=is_saving))
        return Done((*opened, *done.commands), done.news)

    # What happens at a replica

    def on_replica_ready(self, replica_id: ReplicaId, *, now: float) -> None:
        self.pool.on_ready(replica_id, now=now)

    def on_replica_said(self, replica_id: ReplicaId, said: RankEvent, *, now: float) -> Done:
        """Only what all its ranks said counts."""
        match said:
            case CoreJoined(step=step):
                if self._is_last(replica_id, "joined", step):
                    return self._carried_out(self.pool.on_joined(replica_id, step, now=now))
            case StepFollowed(step=step) | StepTrained(step=step):
                if self._is_last(replica_id, "taken", step):
                    self.pool.on_taken(replica_id, step)
            case _:
                pass  # what every gang's ranks say of themselves
        return Done()

    def on_replica_down(self, replica_id: ReplicaId, reason: str, *, is_clean: bool = True) -> Done:
        """Its processes are gone, or do not end (False)."""
        return self._carried_out(self.pool.on_down(replica_id, reason, is_clean=is_clean))

    def on_tick(self, *, now: float) -> Done:
        return self._carried_out(self.pool.on_tick(now=now))

    # Inside

    def _open_lanes(self) -> tuple[Command, ...]:
        if self._is_opening:
            return ()
        self._is_opening = True
        terms, core = self.terms, self.terms.core
        nodes = [core.node_of_rank(rank) for rank in range(core.world_size)]
        hosts = tuple(terms.hosts[node] for node in nodes) if terms.hosts else ()
        opening = OpenLanes(terms.run_id, terms.key, terms.replica_size, hosts)
        return (commands.TellRanks(self._attempt, opening),)

    def _join_if_open(self) -> tuple[Command, ...]:
        if len(self._lanes) < self.terms.replica_size:
            return ()
        joins, self._joins = self._joins, []
        return tuple(commands.TellReplica(it.replica_id, self._join_message(it)) for it in joins)

    def _lane_to(self, placement: HybridPlacement, rank: int) -> LaneAddress:
        """Where a replica's rank finds its head: in memory of one node, or over the network."""
        opened = self._lanes[rank]
        node = placement.nodes[rank] if placement.nodes else placement.node
        if node == self.terms.core.node_of_rank(opened.rank):
            return opened.unix
        if opened.tcp is None:
            raise InvariantError(f"lane {rank} is not open for node {node}")
        return opened.tcp

    def _join_message(self, join: hybrid.Join) -> JoinCore:
        placement = self._placement_of[join.replica_id]
        return JoinCore(
            run_id=self.terms.run_id,
            replica_id=join.replica_id,
            key=self.terms.key,
            lanes=tuple(self._lane_to(placement, rank) for rank in range(len(placement.slots))),
            snapshot=self.terms.snapshot_of(join.step),
        )

    def _is_last(self, replica_id: ReplicaId, what: str, step: int) -> bool:
        key = (replica_id, what, step)
        self._heard[key] += 1
        if self._heard[key] < self.terms.replica_size:
            return False
        del self._heard[key]
        return True

    def _carried_out(self, ordered: Iterable[hybrid.Command | hybrid.News]) -> Done:
        done: list[Command] = []
        news: list[News] = []
        for one in ordered:
            match one:
                case hybrid.Joined(replica_id):
                    news.append(events.HybridJoined(replica_id))
                case hybrid.Lost(replica_id, reason, frees_devices):
                    lost = self._slots_lost(replica_id, frees_devices=frees_devices)
                    news.append(events.HybridLost(replica_id, reason, lost))
                case hybrid.Left(replica_id, frees_devices):
                    lost = self._slots_lost(replica_id, frees_devices=frees_devices)
                    news.append(events.HybridLeft(replica_id, lost))
                case _:
                    done += self._commands_for(one)
        return Done((*done, *self._drop_snapshots()), tuple(news))

    def _slots_lost(self, replica_id: ReplicaId, *, frees_devices: bool) -> frozenset[Slot]:
        return frozenset() if frees_devices else hybrid_slots(self._placement_of[replica_id])

    def _commands_for(self, ordered: hybrid.Command) -> tuple[Command, ...]:
        match ordered:
            case hybrid.StartReplica(replica_id, has_devices):
                placement = self._placement_of[replica_id]
                return (commands.StartReplica(placement, has_devices=has_devices),)
            case hybrid.GiveDevices(replica_id):
                return (commands.TellReplica(replica_id, TakeDevice()),)
            case hybrid.StopReplica(replica_id, reason, is_asked):
                self._joins = [it for it in self._joins if it.replica_id != replica_id]
                said = commands.Say("hybrid_stops", {"replica": replica_id, "why": reason})
                return (said, commands.StopReplica(replica_id, in_a_hurry=not is_asked))
            case hybrid.TakeSnapshot(step):
                self._snapshots.add(step)
                directory = self.terms.snapshot_of(step)
                return (commands.TakeSnapshot(self._attempt, step, directory),)
            case hybrid.Join():
                self._joins.append(ordered)
                return self._join_if_open()
            case hybrid.Follow(replica_id, step, mini_batches, epoch):
                follow = FollowStep(step, mini_batches, epoch)
                return (commands.TellReplica(replica_id, follow),)
            case _:
                assert_never(ordered)

    def _drop_snapshots(self) -> tuple[Command, ...]:
        """Throw away what nobody is going to load any more."""
        coming = self.pool.ids_in(HybridState.JOINING)
        # The core is still writing the one that is being saved.
        wanted = {self.pool[replica_id].snapshot for replica_id in coming} | {self.pool.saving}
        doomed = sorted(self._snapshots - wanted)
        self._snapshots -= set(doomed)
        return tuple(commands.DropSnapshot(self.terms.snapshot_of(step)) for step in doomed)
