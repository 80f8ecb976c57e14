"""Several supervisors, each a process with its gateway, over one fleet and one shared directory."""

import json
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import pytest
from anyio import to_thread

from fake_vllm import FakeVllm
from libra import clock

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
SCRIPT = Path(__file__).parents[2] / "support/children/gateway_rank.py"
LONG = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 1000}
NUM_ENGINES = 4


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Supervisor:
    """One process. Requests through it stay open until they are cancelled."""

    def __init__(self, directory, rank, urls, session):
        argv = [sys.executable, str(SCRIPT), str(directory), rank, *urls]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)  # noqa: S603
        self._session = session

    async def listen(self):
        self.url = f"http://127.0.0.1:{int(await to_thread.run_sync(self.process.stdout.readline))}"

    async def view(self):
        async with self._session.get(self.url + "/view") as answer:
            return json.loads(await answer.read())

    async def until(self, is_true):
        """The first view for which `is_true` holds; the test's time limit bounds the wait."""
        while not is_true(view := await self.view()):
            await clock.sleep(0.05)
        return view

    async def hold_one(self):
        """Ask for an answer that does not end; a supervisor that dies ends it."""
        try:
            async with self._session.post(self.url + "/v1/completions", json=LONG) as answer:
                await answer.read()
        except aiohttp.ClientError:
            return

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class World:
    def __init__(self, directory, engines, session):
        self.directory, self.engines, self._session = directory, engines, session
        self.supervisors = {}

    async def start(self, rank):
        urls = [engine.url for engine in self.engines]
        supervisor = Supervisor(self.directory, rank, urls, self._session)
        self.supervisors[rank] = supervisor
        await supervisor.listen()
        return supervisor

    def running(self):
        """What the engines really have, by engine."""
        return Counter({engine.instance_id: engine.num_running for engine in self.engines})

    async def place(self, tasks, rank):
        """One request through `rank`; returns when it runs and everybody has heard of it."""
        total = self.running().total() + 1
        tasks.start_soon(self.supervisors[rank].hold_one)
        await self.until_all_see(total)

    async def until_all_see(self, total):
        while self.running().total() != total:
            await clock.sleep(0.01)
        for supervisor in self.supervisors.values():
            await supervisor.until(lambda view: seen(view) == total)


def seen(view):
    return sum(view["own"].values()) + sum(view["remote"].values())


@asynccontextmanager
async def world_in(directory):
    async with AsyncExitStack() as stack:
        engines = [FakeVllm(f"vllm-{k}") for k in range(NUM_ENGINES)]
        for engine in engines:
            engine.token_delay_s = 1.0
            await stack.enter_async_context(engine)
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, trust_env=False)
        )
        world = World(directory, engines, session)
        try:
            yield world
        finally:
            for supervisor in world.supervisors.values():
                supervisor.kill()
            with anyio.move_on_after(10, shield=True):
                while world.running().total():
                    await clock.sleep(0.05)
                await clock.sleep(0.2)  # connections of pollers close too


async def test_supervisors_over_one_fleet_fill_it_as_one_and_forget_one_that_was_killed(tmp_path):
    async with world_in(tmp_path) as world, anyio.create_task_group() as tasks:
        for rank in ("a", "b", "c"):
            await world.start(rank)
        for rank in "aaaabbcc":
            await world.place(tasks, rank)
        # By their own views alone b and c would have begun with the same engines.
        assert set(world.running().values()) == {2}
        views = [await world.supervisors[rank].view() for rank in "abc"]
        assert [sum(view["own"].values()) for view in views] == [4, 2, 2]
        assert [view["live_ranks"] for view in views] == [["b", "c"], ["a", "c"], ["a", "b"]]

        world.supervisors.pop("c").kill()
        # Its file stays, and counts until the TTL is over; then its load is gone everywhere.
        assert (tmp_path / "load_c.json").exists()
        await world.until_all_see(6)
        assert (await world.supervisors["a"].view())["live_ranks"] == ["b"]
        assert (tmp_path / "load_c.json").exists()
        for rank in "ab":
            await world.place(tasks, rank)
        assert set(world.running().values()) == {2}

        # It comes back under its name: what its former life had in flight is not counted again.
        await world.start("c")
        await world.until_all_see(8)
        for rank in "cccc":
            await world.place(tasks, rank)
        assert set(world.running().values()) == {3}
        tasks.cancel_scope.cancel()


async def test_a_request_that_ends_is_taken_off_the_load_in_every_supervisor(tmp_path):
    async with world_in(tmp_path) as world:
        await world.start("a")
        await world.start("b")
        async with anyio.create_task_group() as tasks:
            for rank in "abab":
                await world.place(tasks, rank)
            tasks.cancel_scope.cancel()
        await world.until_all_see(0)
        assert all(engine.num_aborted for engine in world.engines)
