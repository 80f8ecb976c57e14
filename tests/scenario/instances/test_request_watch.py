"""Requests that a server works on, and one that it lost, as our own rollouts see them."""

import itertools
from random import Random

import anyio
import pytest
import trio.testing

from fleets import fleet_of
from libra import clock
from libra.errors import PeerError, RejectedError
from libra.ids import InstanceId, RequestId
from libra.rollouts.generation import GenerationRequest
from libra.wire.instance import Sampling
from libra_supervisor.app.routing import EngineRouter
from libra_supervisor.gateway.waiting import WaitingRoom
from libra_supervisor.instances.request_watch import PERIOD_S, RequestWatch
from libra_supervisor.rollouts.client import (
    EngineSilentError,
    GenerationSettings,
    SampleClient,
)
from trajectories import admitted, completion

pytestmark = pytest.mark.anyio
I0 = InstanceId("i0")
SETTINGS = GenerationSettings(
    run_seed=7, max_model_len=64, max_new_tokens=8, max_request_attempts=1
)


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class SlowEngine:
    """One instance as `EngineRouter` and `RequestWatch` see it; an answer takes `answer_s`."""

    def __init__(self, answer_s):
        self.answer_s = answer_s
        self.running = {}
        self.lost = set()
        self.error = None
        self.num_asked = 0
        self.watch = RequestWatch(rng=Random(1))

    def client_of(self, _instance_id):
        return self

    def watch_of(self, _instance_id):
        return self.watch

    def note_progress(self, _instance_id):
        pass

    async def complete(self, prompt_token_ids, sampling, *, request_id):
        self.running[request_id] = clock.now()
        try:
            await clock.sleep(self.answer_s)
        finally:
            del self.running[request_id]
        return completion((10, 11), num_prompt_tokens=len(prompt_token_ids))

    async def open_requests(self):
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        told = {name: int(clock.now() - at) for name, at in self.running.items()}
        return {name: num for name, num in told.items() if name not in self.lost}


class World:
    def __init__(self, engine):
        self.engine = engine
        self.scheduler = fleet_of(1, now=clock.now())
        self.router = EngineRouter(WaitingRoom(self.scheduler), engine)

    def sample(self, index=0):
        return SampleClient(
            admitted(0, n_samples=8), index, router=self.router, tokenizer=None, settings=SETTINGS
        )


def ask(name):
    return GenerationRequest(
        request_id=RequestId(name),
        prompt_id=None,
        prompt_token_ids=(1, 2, 3),
        sampling=Sampling(max_new_tokens=8),
    )


async def test_a_request_is_heard_of_when_it_is_placed_and_as_long_as_the_server_has_it():
    world, heard = World(SlowEngine(answer_s=100.0)), []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.engine.watch.run, world.engine)
        began = clock.now()

        def progressed(num_tokens):
            heard.append((num_tokens, clock.now() - began))

        await world.router.generate(ask("r1"), progressed)
        num_heard = len(heard)
        await clock.sleep(10 * PERIOD_S)
        tasks.cancel_scope.cancel()
    assert heard[0] == (0, 0.0)
    assert all(num_tokens == int(at) for num_tokens, at in heard)
    gaps = [b[1] - a[1] for a, b in itertools.pairwise(heard)]
    assert gaps
    assert max(gaps) <= PERIOD_S
    # Nobody listens any more: nobody is told, and the server is left alone.
    assert (len(heard), world.engine.num_asked) == (num_heard, num_heard - 1)


@pytest.mark.case("T-B77")
async def test_an_answer_may_take_hours_as_long_as_the_engine_says_that_it_works_on_it():
    world = World(SlowEngine(answer_s=20_000.0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.engine.watch.run, world.engine)
        answer = await world.sample().generate((1, 2, 3))
        tasks.cancel_scope.cancel()
    assert answer.token_ids == (10, 11)


@pytest.mark.case("T-B54", "T-B77")
async def test_a_request_that_a_living_engine_lost_is_given_up_after_the_idle_limit_and_only_it():
    world, ends = World(SlowEngine(answer_s=20_000.0)), {}
    began = clock.now()

    async def one(index):
        try:
            await world.sample(index).generate((1, 2, 3))
        except EngineSilentError as error:
            ends[index] = (clock.now() - began, str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.engine.watch.run, world.engine)
        for index in range(4):
            tasks.start_soon(one, index)
        await clock.sleep(1000.0)
        lost = next(name for name in world.engine.running if "/s2/" in name)
        world.engine.lost.add(lost)
        await clock.sleep(1000.0)
        assert set(ends) == {2}
        assert len(world.engine.running) == 3
        assert world.scheduler.num_in_flight() == 3
        tasks.cancel_scope.cancel()
    at, message = ends[2]
    assert 1000.0 - PERIOD_S + 300.0 <= at <= 1300.0
    assert "got nothing for 300.0 s after 9" in message


async def test_a_server_that_does_not_tell_for_a_while_costs_no_request():
    world = World(SlowEngine(answer_s=1000.0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.engine.watch.run, world.engine)

        async def falter():
            await clock.sleep(100.0)
            world.engine.error = PeerError("i0 did not answer")
            await clock.sleep(200.0)
            world.engine.error = None

        tasks.start_soon(falter)
        answer = await world.sample().generate((1, 2, 3))
        tasks.cancel_scope.cancel()
    assert answer.token_ids == (10, 11)


async def test_a_server_that_cannot_tell_is_not_taken_for_one_that_lost_its_requests():
    world = World(SlowEngine(answer_s=2000.0))
    world.engine.error = RejectedError("i0 answered 404 while telling its requests: Not Found")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.engine.watch.run, world.engine)
        answer = await world.sample().generate((1, 2, 3))
        tasks.cancel_scope.cancel()
    assert answer.token_ids == (10, 11)


async def test_a_server_that_never_answers_loses_its_requests_at_the_idle_limit():
    world = World(SlowEngine(answer_s=2000.0))
    world.engine.error = PeerError("i0 did not answer")
    began = clock.now()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.engine.watch.run, world.engine)
        with pytest.raises(EngineSilentError):
            await world.sample().generate((1, 2, 3))
        tasks.cancel_scope.cancel()
    assert clock.now() - began == 300.0
