"""Servers that are told to sleep and to wake up, on virtual time: what is said of it, and when."""

from random import Random
from types import SimpleNamespace

import anyio
import pytest
import trio.testing

from libra import clock
from libra.config.supervision import SupervisionConfig
from libra.config.weights import WeightsConfig
from libra.errors import PeerError
from libra.ids import ChildId, Incarnation, InstanceId
from libra_supervisor.app.fleet import Fleet
from libra_supervisor.events import InstanceAsleep, InstanceRetired, InstanceWoken
from libra_supervisor.process.lifecycle import ChildState, ChildStatus

pytestmark = pytest.mark.anyio
NAME, PROCESS = InstanceId("vllm-1"), Incarnation("vllm-1-a")
CALL_S = 5.0


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class ToldSlumber:
    def __init__(self, error):
        self.error, self.num_calls, self.num_ended = error, 0, 0

    async def begin(self, _client):
        self.num_calls += 1
        await clock.sleep(CALL_S)
        self.num_ended += 1
        if self.error:
            raise PeerError(self.error)

    end = begin


class ToldSupervision:
    def __init__(self, incarnation):
        self.incarnation, self.num_restarts = incarnation, 0

    def status(self):
        return ChildStatus(
            child_id=ChildId(NAME), state=ChildState.READY, since=0.0, incarnation=self.incarnation
        )

    def restart(self):
        self.num_restarts += 1

    def stop(self):
        pass

    async def until_down(self):
        pass


class FleetOfOne:
    def __init__(self, tasks, *, error="", incarnation=PROCESS):
        self.posted = []

        async def post(event):
            self.posted.append(event)

        async def close():
            pass

        self.fleet = Fleet(
            (),
            make=None,
            config=SupervisionConfig(),
            spawner=None,
            weights=WeightsConfig(),
            watch=SimpleNamespace(end=lambda _: None),
            post=post,
            rng=Random(1),
        )
        self.fleet.start(tasks, {})
        self.slumber, self.supervision = ToldSlumber(error), ToldSupervision(incarnation)
        engine = SimpleNamespace(slumber=self.slumber, client=None, close=close)
        self.fleet._engines[NAME], self.fleet._supervisions[NAME] = engine, self.supervision


async def test_a_server_that_sleeps_or_wakes_is_said_with_its_process():
    async with anyio.create_task_group() as tasks:
        one = FleetOfOne(tasks)
        one.fleet.sleep(NAME)
        one.fleet.sleep(NAME)  # again, before it has answered
        await clock.sleep(1.0)
        one.fleet.sleep(NAME)
        await clock.sleep(2 * CALL_S)
        one.fleet.wake(NAME)
    assert one.slumber.num_calls == 2
    assert one.posted == [InstanceAsleep(NAME, PROCESS), InstanceWoken(NAME, PROCESS)]


@pytest.mark.parametrize("how", [{"error": "HTTP 500"}, {"incarnation": None}])
async def test_a_server_that_does_not_sleep_is_retired(how):
    async with anyio.create_task_group() as tasks:
        one = FleetOfOne(tasks, **how)
        one.fleet.sleep(NAME)
    assert one.posted == [InstanceRetired(NAME, is_clean=True)]
    assert one.slumber.num_calls == ("error" in how)


async def test_a_server_that_does_not_wake_up_is_replaced():
    async with anyio.create_task_group() as tasks:
        one = FleetOfOne(tasks, error="out of memory")
        one.fleet.wake(NAME)
    assert one.posted == []
    assert one.supervision.num_restarts == 1


@pytest.mark.parametrize("what", ["sleep", "wake"])
async def test_a_server_that_is_retired_meanwhile_is_asked_for_nothing_more(what):
    async with anyio.create_task_group() as tasks:
        one = FleetOfOne(tasks)
        getattr(one.fleet, what)(NAME)
        await clock.sleep(1.0)
        one.fleet.retire(NAME)
    assert (one.slumber.num_calls, one.slumber.num_ended) == (1, 0)
    assert one.posted == [InstanceRetired(NAME, is_clean=True)]


async def test_one_that_is_being_retired_is_not_woken():
    async with anyio.create_task_group() as tasks:
        one = FleetOfOne(tasks)
        one.fleet.retire(NAME)
        one.fleet.wake(NAME)
    assert one.slumber.num_calls == 0
    assert one.posted == [InstanceRetired(NAME, is_clean=True)]
