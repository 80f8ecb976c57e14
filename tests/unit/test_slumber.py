"""A server between the order to sleep and its waking up, on virtual time."""

import pytest
import trio.testing
from structlog.testing import capture_logs

from libra import clock
from libra.errors import PeerError
from libra.ids import InstanceId
from libra_supervisor.app.slumber import Slumber

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Told:
    """The server and the gate of its devices, and all that was asked of them, in order."""

    def __init__(self, *, busy_until=0.0, fails=""):
        self.busy_until, self.fails, self.asked = busy_until, fails, []

    async def sleep(self, *, timeout_s):
        await self._call("sleep", timeout_s)

    async def wake_up(self, *, timeout_s):
        await self._call("wake up", timeout_s)

    async def _call(self, what, timeout_s):
        self.asked.append((what, timeout_s))
        if self.fails == what:
            raise PeerError("out of memory")

    async def hindrance(self):
        return "40 GiB are in use" if clock.now() < self.busy_until else None

    async def note_kept(self):
        self.asked.append("note")

    def forget_kept(self):
        self.asked.append("forget")


def slumber(told):
    return Slumber(InstanceId("vllm-1"), told, timeout_s=60.0)


async def test_what_it_keeps_is_noted_when_it_sleeps_and_forgotten_when_it_is_awake():
    told = Told(busy_until=clock.now() + 7.0)
    one = slumber(told)
    assert not one.is_on
    await one.begin(told)
    assert (one.is_on, told.asked) == (True, [("sleep", 60.0), "note"])
    began = clock.now()
    with capture_logs() as said:
        await one.end(told)
    assert 7.0 <= clock.now() - began < 8.0, "it was woken into memory that others had"
    assert (one.is_on, told.asked[2:]) == (False, [("wake up", 60.0), "forget"])
    assert [it["why"] for it in said if it["event"] == "wake_waits"] == ["40 GiB are in use"]


async def test_one_that_does_not_sleep_is_not_restarted_while_it_is_being_ended():
    told = Told(fails="sleep")
    one = slumber(told)
    with pytest.raises(PeerError):
        await one.begin(told)
    assert (one.is_on, told.asked) == (True, [("sleep", 60.0)])


async def test_one_that_does_not_wake_up_may_be_replaced_and_its_successor_needs_all_memory():
    told = Told(fails="wake up")
    one = slumber(told)
    await one.begin(told)
    with pytest.raises(PeerError):
        await one.end(told)
    assert (one.is_on, told.asked[-1]) == (False, "forget")


async def test_where_nobody_looks_at_devices_it_is_woken_at_once():
    told = Told()
    one = Slumber(InstanceId("vllm-1"), None, timeout_s=60.0)
    await one.begin(told)
    await one.end(told)
    assert told.asked == [("sleep", 60.0), ("wake up", 60.0)]
