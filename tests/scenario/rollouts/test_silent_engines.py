"""Samples that an engine does not answer, over the real routing, on a virtual clock."""

from contextlib import asynccontextmanager
from random import Random

import anyio
import pytest
import trio.testing

from fake_fleet import FakeScorer
from fleets import avoiding, fleet_of, request
from libra import clock
from libra.data.task import Task
from libra.workflows.single_turn import single_turn
from libra_supervisor.app.routing import EngineRouter
from libra_supervisor.events import SampleFinished, SampleGaveUp
from libra_supervisor.gateway.waiting import WaitingRoom
from libra_supervisor.instances.request_watch import RequestWatch
from libra_supervisor.rollouts.client import GenerationSettings
from libra_supervisor.rollouts.runner import RolloutRunner, RunnerParts
from trajectories import admitted, completion

pytestmark = pytest.mark.anyio
GROUP = admitted(0, n_samples=1)
SETTINGS = GenerationSettings(run_seed=7, max_model_len=64, max_new_tokens=8)


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0.005)}


class OneTask:
    def task(self, _row):
        return Task(
            prompt_id=GROUP.prompt.prompt_id,
            prompt_token_ids=(1, 2),
            messages=(),
            prompt_text="",
            answer=None,
            extras={},
        )


class Text:
    def decode(self, token_ids, **_options):
        return str(token_ids)


class Engine:
    """Answers at once, or not at all; the others of its requests are of no interest."""

    def __init__(self, name, world):
        self.name, self.world = name, world

    async def complete(self, prompt_token_ids, _sampling, *, request_id):
        self.world.asked.append(self.name)
        if self.name in self.world.silent:
            await anyio.sleep_forever()
        return completion((10, 11), num_prompt_tokens=len(prompt_token_ids))


class World:
    """Engines, the routing to them and a runner; nothing was asked before."""

    def __init__(self, num_engines, *, silent, settings=SETTINGS):
        self.asked, self.events, self.silent = [], [], set(silent)
        self.scheduler = fleet_of(num_engines, now=clock.now())
        self.watch = RequestWatch(rng=Random(1))
        self.runner = RolloutRunner(
            RunnerParts(
                tasks=OneTask(),
                workflow=single_turn,
                tokenizer=Text(),
                router=EngineRouter(WaitingRoom(self.scheduler), self),
                scorer=FakeScorer(),
                post=self.post,
                settings=settings,
            )
        )

    def client_of(self, instance_id):
        return Engine(instance_id, self)

    def watch_of(self, _instance_id):
        return self.watch

    def note_progress(self, _instance_id):
        pass

    async def post(self, event):
        self.events.append(event)

    def give_work(self, num_requests, *, but):
        for _ in range(num_requests):
            self.scheduler.route(avoiding(request(), *but), clock.now())

    def ends(self):
        return [e for e in self.events if isinstance(e, SampleFinished | SampleGaveUp)]


@asynccontextmanager
async def running(num_engines, **how):
    world = World(num_engines, **how)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.runner.run)
        await clock.sleep(1)
        world.runner.start(GROUP)
        await clock.sleep(10)
        yield world
        tasks.cancel_scope.cancel()


async def test_a_sample_of_a_late_batch_goes_to_none_of_the_engines_that_were_silent():
    async with running(3, silent=("i0", "i1", "i2")) as world:
        for _ in range(2):
            # The others have more to do, and would not be taken for their load.
            world.give_work(9, but=world.asked)
            world.runner.ask_again(GROUP.group_id, (0,))
            await clock.sleep(10)
        assert sorted(world.asked) == ["i0", "i1", "i2"]
        assert world.scheduler.num_in_flight() == 2 * 9 + 1
        # All were silent: any of them is asked, since nobody else can serve.
        world.silent.clear()
        world.runner.ask_again(GROUP.group_id, (0,))
        await clock.sleep(10)
        assert [type(it) for it in world.ends()] == [SampleFinished]


async def test_an_engine_that_is_alone_is_asked_again():
    async with running(1, silent=("i0",)) as world:
        world.runner.ask_again(GROUP.group_id, (0,))
        await clock.sleep(10)
        assert world.asked == ["i0", "i0"]


async def test_a_request_that_an_engine_lost_is_asked_for_elsewhere():
    async with running(2, silent=("i0", "i1")) as world:
        first = world.asked[0]
        world.give_work(5, but=(first,))
        world.silent.remove("i1" if first == "i0" else "i0")
        await clock.sleep(SETTINGS.idle_timeout_s)
        assert len(set(world.asked)) == len(world.asked) == 2
        assert [type(it) for it in world.ends()] == [SampleFinished]
