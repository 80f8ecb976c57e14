"""A `World` whose run lends slots to hybrid replicas, with replicas that fail in every way."""

from control_world import METRICS, RandomWorld
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
from libra.wire.rank import CheckpointSaved, StepTrained
from libra_supervisor import events
from libra_supervisor.loop import commands
from libra_supervisor.loop.hybrid_desk import HybridDesk, HybridTerms
from libra_supervisor.loop.moment import Moment

DIRECTORY = "/run/hybrid"
REPLICA_SIZE = 2
KEY = bytes(32)


class Replica:
    """One replica's processes as they really are."""

    def __init__(self, placement: HybridPlacement) -> None:
        self.placement = placement
        self.step: int | None = None
        """What its weights are of; None: no weights of the core."""

        self.orders: list[JoinCore | FollowStep | int] = []
        """Not obeyed yet; a number is a step that it contributes to."""

        self.loads: str | None = None


class HybridWorld(RandomWorld):
    """Replicas of two ranks; what they are told waits in `orders` until `obey`."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.hybrids = HybridDesk(
            HybridTerms(
                run_id=RunId("run"),
                key=KEY,
                directory=DIRECTORY,
                core=self.train,
                replica_size=REPLICA_SIZE,
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
        name = ReplicaId(f"hybrid-{self.count}")
        slots = (SlotId(10 + 2 * self.count), SlotId(11 + 2 * self.count))
        self.count += 1
        for command in self.hybrids.attach(HybridPlacement(replica_id=name, slots=slots)):
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
                assert join.lanes == lanes(self.lanes_attempt), "lanes of another core"
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
            case commands.StartReplica(placement):
                self.replicas[placement.replica_id] = Replica(placement)
                self.pending.append(events.ReplicaReady(placement.replica_id))
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
                assert (attempt, size) == (self.attempt, REPLICA_SIZE)
                self.lanes_attempt = attempt
                for lane, address in enumerate(lanes(attempt)):
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

    def _all_say(self, name, said) -> None:
        for rank in range(REPLICA_SIZE):
            self.pending.append(events.ReplicaSaid(name, said(rank)))

    def _work(self, said) -> None:
        if isinstance(said, StepTrained):
            said = StepTrained(0, said.step, METRICS, dropped=self.drops)
            self.drops = {}
        super()._work(said)


def lanes(attempt: int) -> tuple[LaneAddress, ...]:
    return tuple(LaneAddress(unix=f"lane-{attempt}-{lane}") for lane in range(REPLICA_SIZE))


def _is_of(event, name: ReplicaId) -> bool:
    is_replicas = isinstance(event, events.ReplicaReady | events.ReplicaSaid)
    return is_replicas and event.replica_id == name
