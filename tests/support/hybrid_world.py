"""A `World` whose run lends slots to hybrid replicas, with replicas that fail in every way."""

from control_parts import METRICS
from libra.ids import ReplicaId, RunId, SlotId
from libra.planner.plan import HybridPlacement
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
from libra.wire.rank import CheckpointSaved, StepTrained, TakeDevice
from libra_supervisor import events
from libra_supervisor.loop import commands
from libra_supervisor.loop.hybrid_desk import HybridDesk, HybridTerms
from libra_supervisor.loop.moment import Moment
from sleepy_world import SleepyWorld

DIRECTORY = "/run/hybrid"
REPLICA_SIZE = 2
KEY = bytes(32)


class Replica:
    """One replica's processes as they really are."""

    def __init__(self, placement: HybridPlacement, *, has_devices: bool) -> None:
        self.placement = placement
        self.has_devices = has_devices
        self.step: int | None = None
        """What its weights are of; None: no weights of the core."""

        self.orders: list[JoinCore | FollowStep | int] = []
        """Not obeyed yet; a number is a step that it contributes to."""

        self.loads: str | None = None


class HybridWorld(SleepyWorld):
    """Replicas, of two ranks as a rule; what they are told waits in `orders` until `obey`."""

    def __init__(self, *, replica_size: int = REPLICA_SIZE, **options) -> None:
        super().__init__(**options)
        self.replica_size = replica_size
        self.hybrids = HybridDesk(
            HybridTerms(
                run_id=RunId("run"),
                key=KEY,
                directory=DIRECTORY,
                core=self.train,
                replica_size=replica_size,
                replica_data=1,
                join_timeout_s=1000.0,
                shape=BatchShape(dp_size=1, mini_batch_size=4),
            )
        )
        self.control.hybrids = self.hybrids
        self.replicas: dict[ReplicaId, Replica] = {}
        self.snapshots: set[str] = set()
        self.writing: set[str] = set()
        self.news: list[tuple[str, ReplicaId]] = []
        self.members_of: dict[int, tuple[ReplicaId, ...]] = {}
        self.lanes_attempt = 0
        self.drops: dict[ReplicaId, str] = {}
        """Told with the step that is being trained."""

        self.stopped: set[ReplicaId] = set()
        self.count = 0

    def attach(self) -> ReplicaId:
        return self._begin(self.hybrids.attach)

    def warm(self) -> ReplicaId:
        """Start one without its devices."""
        return self._begin(self.hybrids.warm)

    def give_devices(self, name: ReplicaId) -> None:
        for command in self.hybrids.attach(self.replicas[name].placement):
            self._carry_out(command)

    def _begin(self, how) -> ReplicaId:
        name = ReplicaId(f"hybrid-{self.count}")
        slots = (SlotId(10 + 2 * self.count), SlotId(11 + 2 * self.count))
        self.count += 1
        for command in how(HybridPlacement(replica_id=name, slots=slots)):
            self._carry_out(command)
        return name

    def detach(self, name: ReplicaId) -> None:
        for command in self.hybrids.detach(name):
            self._carry_out(command)

    def kill(self, name: ReplicaId) -> None:
        """All its processes, at once."""
        if self.replicas.pop(name, None) is not None:
            self.pending = [it for it in self.pending if not _is_of(it, name)]
            self.pending.append(events.ReplicaDown(name, "killed by SIGKILL"))

    def obey(self, name: ReplicaId) -> None:
        """The next thing that it was told, if the core has come so far."""
        replica = self.replicas[name]
        if not replica.orders:
            return
        match replica.orders[0]:
            case JoinCore() as join:
                assert join.snapshot in self.snapshots, "it loads what is not there"
                assert join.key == KEY
                assert join.lanes == self._lanes(), "lanes of another core"
                assert self.lanes_attempt == self.attempt
                replica.loads, replica.step = join.snapshot, int(join.snapshot[-6:])
                self._all_say(name, lambda rank: CoreJoined(rank, replica.step, 0.1, 0.1))
            case FollowStep(step=step) | int(step) as order:
                assert step == (replica.step or 0) + 1, "a step is left out or comes twice"
                if self.gang_is_busy and self.gang_version == step:
                    return  # the core has not given it back yet
                replica.step = step
                is_member = isinstance(order, int)
                self._all_say(
                    name,
                    lambda rank: (
                        StepTrained(rank, step, None) if is_member else StepFollowed(rank, step)
                    ),
                )
        replica.orders.pop(0)

    def post(self, event: events.Event) -> None:
        if not self._is_of_snapshot(event):
            super().post(event)
            return
        self.now += 0.01
        directory = event.event.directory
        self.writing.discard(directory)
        self.snapshots.add(directory)
        for command in self.control.on_event(event, Moment(self.now, int(self.now * 1e9))):
            self._carry_out(command)

    def lose_gang(self) -> None:
        self.writing.clear()
        super().lose_gang()

    def _is_of_snapshot(self, event) -> bool:
        is_saved = isinstance(event, events.RankSaid) and isinstance(event.event, CheckpointSaved)
        return is_saved and event.event.directory.startswith(DIRECTORY)

    def _carry_out(self, command) -> None:  # noqa: C901, PLR0912, PLR0915 - a table
        match command:
            case commands.StartReplica(placement, has_devices):
                name = placement.replica_id
                self.replicas[name] = Replica(placement, has_devices=has_devices)
                self._check_slots()
                up = events.ReplicaReady if has_devices else events.HybridWarmed
                self.pending.append(up(name))
            case commands.TellReplica(name, TakeDevice()):
                assert name not in self.stopped, "it has been told to leave"
                if name in self.replicas:
                    self.replicas[name].has_devices = True
                    self._check_slots()
                    self.pending.append(events.ReplicaReady(name))
            case commands.StopReplica(name):
                self.stopped.add(name)
                if self.replicas.pop(name, None) is not None:
                    self.pending = [it for it in self.pending if not _is_of(it, name)]
                    self.pending.append(events.ReplicaDown(name, "it was told to leave"))
            case commands.TellReplica(name, order):
                assert name not in self.stopped, "it has been told to leave"
                if name in self.replicas:
                    self.replicas[name].orders.append(order)
            case commands.TellRanks(attempt, OpenLanes(key=key, replica_size=size)):
                assert key == KEY
                assert (attempt, size) == (self.attempt, self.replica_size)
                self.lanes_attempt = attempt
                for lane, address in enumerate(self._lanes()):
                    self._rank_says(LaneOpened(lane, lane, address, None))
            case commands.TakeSnapshot(attempt, step, directory):
                assert (attempt, step) == (self.attempt, self.gang_version)
                assert not self.saving_step, "a checkpoint is being written"
                self.writing.add(directory)
                self._rank_says(CheckpointSaved(step, directory, 0.1))
            case commands.DropSnapshot(directory):
                assert directory not in self.writing, "the core is still writing it"
                self.snapshots.discard(directory)
            case commands.Say(event=said, fields=fields) if said.startswith("hybrid_"):
                self.news.append((said, fields["replica"]))
            case commands.SendBatch(hybrids=begun, step=step):
                self.members_of[step] = () if begun is None else begun.members
                for name in self.members_of[step]:
                    if name in self.replicas:
                        self.replicas[name].orders.append(step)
                super()._carry_out(command)
            case _:
                super()._carry_out(command)

    @property
    def saving_step(self) -> bool:
        return self.control.cycle.saving_step is not None

    def _lanes(self) -> tuple[LaneAddress, ...]:
        names = (f"lane-{self.lanes_attempt}-{lane}" for lane in range(self.replica_size))
        return tuple(LaneAddress(unix=name) for name in names)

    def _check_slots(self) -> None:
        super()._check_slots()
        there = [it for it in self.replicas.values() if it.has_devices]
        lent = {slot for it in there for slot in it.placement.slots}
        used = {*self.train.slots, *(s for it in self.placed.values() for s in it.slots)}
        assert not lent & used, "a replica has the slot of another"

    def _all_say(self, name, said) -> None:
        for rank in range(self.replica_size):
            self.pending.append(events.ReplicaSaid(name, said(rank)))

    def _work(self, said) -> None:
        if isinstance(said, StepTrained):
            said = StepTrained(0, said.step, METRICS, dropped=self.drops)
            self.drops = {}
        super()._work(said)


def _is_of(event, name: ReplicaId) -> bool:
    kinds = events.ReplicaReady | events.ReplicaSaid | events.HybridWarmed
    is_replicas = isinstance(event, kinds)
    return is_replicas and event.replica_id == name
