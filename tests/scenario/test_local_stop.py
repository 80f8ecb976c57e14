"""Somebody stops a follower, on virtual time."""

import signal

import anyio
import pytest
import trio.testing

from libra import clock
from libra.wire.node import PROTOCOL, Envelope, Hello, StopAsked, Welcome
from libra_supervisor.app.local_stop import LocalStop
from libra_supervisor.nodes.allegiance import Allegiance
from libra_supervisor.nodes.lease import LeaseTerms
from libra_supervisor.nodes.session import KeepLimits

TERMS = LeaseTerms(lease_s=10.0, orphan_grace_s=30.0)
HELLO = Hello(
    protocol=PROTOCOL, version="1", config_digest="d", run_id="", node=1, host="h", boot_id="b",
    pid=1, start_ticks=1, dial=0,
)  # fmt: skip
ALONE = "and no leader to end the run with"
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Stopped:
    """A node whose leader says what the test says."""

    def __init__(self):
        self.side = Allegiance(HELLO, TERMS, KeepLimits(), now=clock.now())
        self.said, self.left = [], []
        self.began_at = clock.now()
        self.stop = LocalStop(1, leave=self.leave)

    def leave(self, exit_code, reason):
        self.left.append((exit_code, reason, round(clock.now() - self.began_at, 1)))

    def join(self, *, term=1):
        self.side.hello(())
        welcome = Welcome(
            run_id="r", run_directory="/r", term=term, leader=f"L{term}", session=f"s{term}",
            received=0, lease_s=TERMS.lease_s, orphan_grace_s=TERMS.orphan_grace_s,
        )  # fmt: skip
        self.side.on_reply(welcome, now=clock.now())
        self.stop.ask_through(self.side, self.said.append)
        self.stop.repeat()
        self.renew()

    def renew(self):
        beat = self.side.beat(now=clock.now()).beat
        self.side.on_envelope(Envelope(0, beat), now=clock.now())


async def in_bed(story):
    async with anyio.create_task_group() as tasks:
        it = Stopped()
        tasks.start_soon(it.stop.watch)
        await story(it)
        tasks.cancel_scope.cancel()
        return it


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGUSR1, 0)]
)
async def test_a_stop_is_carried_out_by_the_end_of_a_lease_that_nobody_renews(number, code):
    async def story(it):
        it.join()
        await clock.sleep(4.0)
        it.stop.on_signal(number)
        asked = StopAsked(f"{number.name} on node 1", in_hurry=False, exit_code=code)
        assert it.said == [asked]
        await clock.sleep(5.0)
        assert it.left == []
        await clock.sleep(2.0)

    left = (await in_bed(story)).left
    assert left[0][:2] == (code, f"{number.name}, {ALONE}")
    assert 10.0 <= left[0][2] <= 10.3


async def test_who_is_heard_ends_the_run_however_long_that_takes():
    async def story(it):
        it.join()
        it.stop.on_signal(signal.SIGTERM)
        for _ in range(100):
            await clock.sleep(2.0)
            it.renew()
        it.stop.on_signal(signal.SIGTERM)
        assert it.said[-1] == StopAsked("SIGTERM on node 1", in_hurry=True)
        assert it.left == []
        it.stop.on_signal(signal.SIGTERM)

    known = (0, "SIGTERM, and 3 signals: this node leaves without its leader")
    assert (await in_bed(story)).left[0][:2] == known


async def test_a_leader_that_comes_back_meanwhile_is_asked_too_and_is_waited_for():
    async def story(it):
        it.join()
        it.stop.on_signal(signal.SIGTERM)
        await clock.sleep(3.0)
        it.side.end_session("the leader does not know the session", now=clock.now())
        await clock.sleep(3.0)
        assert it.left == []
        it.join(term=2)
        assert it.said == [StopAsked("SIGTERM on node 1", in_hurry=False)] * 2
        for _ in range(10):
            await clock.sleep(2.0)
            it.renew()

    assert (await in_bed(story)).left == []


@pytest.mark.parametrize("has_joined", [False, True])
async def test_with_no_lease_at_all_nobody_is_waited_for(has_joined):
    async def story(it):
        if has_joined:
            it.join()
            await clock.sleep(11.0)
        it.stop.on_signal(signal.SIGTERM)
        assert it.said == []
        assert len(it.left) == 1

    assert (await in_bed(story)).left[0][0] == 0
