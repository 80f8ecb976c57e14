"""What the gangs of replicas make of what their ranks say."""

import errno

import anyio
import pytest

from libra.ids import ChildId, Incarnation, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement
from libra.wire.rank import ModelReady, RankWarm
from libra_supervisor import events
from libra_supervisor.app.replicas import Replicas

pytestmark = pytest.mark.anyio
PLACED = HybridPlacement(replica_id=ReplicaId("hybrid-3"), slots=(SlotId(1), SlotId(2)))


@pytest.fixture
def anyio_backend():
    return "trio"


class ToldGang:
    """Its ranks say what a test has them say; then it is gone."""

    attempt = 1

    def __init__(self, hear, said, fails=None):
        self._hear, self._said, self._fails = hear, said, fails

    async def run(self):
        for event in self._said:
            await self._hear(event)
        if self._fails is not None:
            raise self._fails


async def posted(folder, said, *, has_devices=True, fails=None):
    asked, found = [], []

    def make(placement, hear, with_devices):
        asked.append((placement, with_devices))
        return ToldGang(hear, said, fails)

    async def post(event):
        found.append(event)

    async with anyio.create_task_group() as tasks:
        replicas = Replicas(make, folder, post)
        replicas.begin(tasks)
        replicas.start(PLACED, has_devices=has_devices)
        mail = replicas._running[PLACED.replica_id].mail
    mail._send.close()
    mail._receive.close()
    assert asked == [(PLACED, has_devices)]
    return found


async def test_a_replica_is_warm_when_all_its_ranks_are(tmp_path):
    down = events.ReplicaDown(PLACED.replica_id, "it was told to leave")
    warm = [events.RankSaid(1, RankWarm(rank)) for rank in range(2)]
    assert await posted(tmp_path, warm[:1], has_devices=False) == [down]
    both = await posted(tmp_path, warm, has_devices=False)
    assert both == [events.HybridWarmed(PLACED.replica_id), down]


async def test_what_else_its_ranks_say_is_passed_on(tmp_path):
    ready = ModelReady(rank=0, step=0, num_parameters=1, build_s=0.1)
    said = [events.RankSaid(1, ready), events.GangReady(1, 0, 1)]
    found = await posted(tmp_path, said, has_devices=True)
    assert found[:2] == [
        events.ReplicaSaid(PLACED.replica_id, ready),
        events.ReplicaReady(PLACED.replica_id),
    ]


@pytest.mark.case("R-B48")
async def test_a_replica_whose_processes_do_not_end_keeps_its_devices(tmp_path):
    stuck = events.ChildUnkillable(
        ChildId("hybrid-3"), Incarnation("i"), (4711,), "pid 4711 in state D", 0.0
    )
    found = await posted(tmp_path, [stuck, events.GangGaveUp(4, "it failed")])
    why = "processes of it do not end: pid 4711 in state D"
    assert found == [events.ReplicaDown(PLACED.replica_id, why, is_clean=False)]


@pytest.mark.parametrize("is_full", [True, False])
async def test_a_replica_that_cannot_be_started_here_is_lost_and_says_why(tmp_path, is_full):
    folder, fails = tmp_path, None
    if is_full:
        folder = tmp_path / "taken"
        folder.write_text("")
    else:
        fails = OSError(errno.EMFILE, "Too many open files")
    [down] = await posted(folder, [], fails=fails)
    assert down.is_clean
    assert down.reason.startswith("it could not be started: [Errno ")


class StoppableGang(ToldGang):
    """Counts how often it is told to stop: once is enough, and again is a hurry."""

    def __init__(self):
        super().__init__(None, [])
        self.num_stops = 0
        self.is_over = anyio.Event()

    async def run(self):
        await self.is_over.wait()

    def stop(self):
        self.num_stops += 1
        self.is_over.set()


@pytest.mark.parametrize(("in_a_hurry", "num_stops"), [(False, 1), (True, 2)])
async def test_only_a_replica_that_fell_out_is_ended_in_a_hurry(tmp_path, in_a_hurry, num_stops):
    gang = StoppableGang()

    async def post(event):
        assert isinstance(event, events.ReplicaDown)

    async with anyio.create_task_group() as tasks:
        replicas = Replicas(lambda *_: gang, tmp_path, post)
        replicas.begin(tasks)
        replicas.start(PLACED, has_devices=True)
        replicas.stop(PLACED.replica_id, in_a_hurry=in_a_hurry)
        mail = replicas._running[PLACED.replica_id].mail
    mail._send.close()
    mail._receive.close()
    assert gang.num_stops == num_stops
