"""The pool with real worker processes."""

import os
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest

from libra import clock
from libra.errors import ChildError, ConfigError
from libra.rewards.case import RewardCase
from libra.rewards.coercion import RewardFailed
from libra.rewards.messages import WorkerOrder, WorkerReady
from libra.wire.framing import encode_frame
from libra_supervisor.process.peer import connect, listen
from libra_supervisor.rewards import worker as worker_module
from libra_supervisor.rewards.pool import RewardPool
from libra_supervisor.rewards.worker import RewardSettings, running_worker
from processes import alive, site

pytestmark = pytest.mark.anyio
BY_NAME = "hostile_rewards:by_name"


def case(answer, response_text=""):
    return RewardCase(
        prompt_id="row-0",
        prompt_text="",
        response_text=response_text,
        answer=answer,
        extras={},
        finish_reason="stop",
        num_response_tokens=1,
        num_turns=1,
    )


@asynccontextmanager
async def pool_of(tmp_path, reward=BY_NAME, num_workers=1, **settings):
    async with site(tmp_path) as place:
        common = RewardSettings(
            run_id=place.run_id,
            run_dir=tmp_path,
            reward=reward,
            reward_args={},
            env={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            cwd=str(Path.cwd()),
            **{"timeout_s": 0.5, "memory_bytes": 2**30, **settings},
        )
        start = partial(running_worker, spawner=place.spawner, settings=common)
        pool = RewardPool(start, num_workers=num_workers)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run)
            yield pool
            tasks.cancel_scope.cancel()


@pytest.mark.case("T-B76")
@pytest.mark.parametrize(
    ("misbehaviour", "reason"),
    [
        ("hangs", "took longer than 0.5 s"),
        ("computes for ever", "took longer than 0.5 s"),
        ("leaves a child", "took longer than 0.5 s"),
        ("segfaults", "the worker killed by SIGSEGV"),
        ("exits at once", "the worker exited with code 4"),
        ("eats memory", "MemoryError"),
        ("exits", "called sys.exit(3)"),
        ("raises", "ZeroDivisionError"),
        ("speaks in halves", "ValueError: half a character: \\ud800"),
        ("does not say", "ShylyError, whose message cannot be shown"),
        ("closes everything", "the worker exited with code 1"),
        ("returns a function", "returned a function, not a number"),
        ("returns nan", "returned nan"),
    ],
)
async def test_a_misbehaving_reward_costs_its_own_sample_only(tmp_path, misbehaviour, reason):
    async with pool_of(tmp_path) as pool:
        outcome = await pool.score(case(misbehaviour))
        assert isinstance(outcome, RewardFailed)
        assert outcome.reason.startswith(reason)
        assert await pool.score(case("scores")) == 1.0
        assert (pool.num_scored, pool.failed_by_reason.total()) == (1, 1)


@pytest.mark.case("T-B76")
@pytest.mark.parametrize("response_text", ["\ud800", object()])
async def test_a_case_that_cannot_be_sent_costs_its_own_sample_only(tmp_path, response_text):
    async with pool_of(tmp_path) as pool:
        outcome = await pool.score(case("scores", response_text))
        assert isinstance(outcome, RewardFailed)
        assert outcome.reason.startswith("the case cannot be sent to a worker: ")
        assert await pool.score(case("scores")) == 1.0
        assert pool.num_replaced == 0


@pytest.mark.case("T-B76")
async def test_the_loop_does_not_lag_while_workers_are_killed_and_replaced(tmp_path):
    longest_lag_s = 0.0

    async def watch():
        nonlocal longest_lag_s
        while True:
            began_at = anyio.current_time()
            await clock.sleep(0.01)
            longest_lag_s = max(longest_lag_s, anyio.current_time() - began_at - 0.01)

    async with pool_of(tmp_path, num_workers=2) as pool:
        await pool.wait_ready()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            async with anyio.create_task_group() as scores:
                for answer in ("hangs", "prints", "segfaults", "prints", "hangs", "scores"):
                    scores.start_soon(pool.score, case(answer))
            tasks.cancel_scope.cancel()
        assert pool.num_replaced >= 2
    assert longest_lag_s < 0.1


@pytest.mark.case("T-B76")
async def test_what_a_killed_reward_had_started_is_ended_too(tmp_path):
    async with pool_of(tmp_path) as pool:
        await pool.score(case("leaves a child"))
        await pool.score(case("scores"))
    pid = int((tmp_path / "logs" / "reward-0.log").read_text().split()[-1])
    assert alive([pid]) == []


async def test_printing_does_not_disturb_the_answers(tmp_path):
    async with pool_of(tmp_path, timeout_s=10.0) as pool:
        assert await pool.score(case("prints")) == 0.5
        assert await pool.score(case("scores")) == 1.0
        assert pool.num_replaced == 0


async def test_a_worker_that_dies_between_two_cases_is_replaced_without_losing_one(tmp_path):
    async with pool_of(tmp_path) as pool:
        assert await pool.score(case("dies later")) == 0.25
        await clock.sleep(0.6)
        assert await pool.score(case("scores")) == 1.0
        assert pool.num_replaced == 1


async def test_a_reward_that_forks_answers_once(tmp_path):
    async with pool_of(tmp_path, timeout_s=10.0) as pool:
        for _ in range(5):
            assert await pool.score(case("forks")) == 0.5
            assert await pool.score(case("scores")) == 1.0
        assert pool.num_replaced == 0


async def test_numbers_of_other_libraries_count(tmp_path):
    async with pool_of(tmp_path) as pool:
        assert await pool.score(case("returns numpy")) == 0.5


async def test_cases_are_scored_side_by_side(tmp_path):
    async with pool_of(tmp_path, reward="hostile_rewards:length", num_workers=2) as pool:
        scores = {}

        async def score(text):
            scores[text] = await pool.score(case(None, text))

        async with anyio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(score, "x" * number)
        assert scores == {"x" * number: float(number) for number in range(30)}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("no_such_module_here:f", "importing no_such_module_here failed"),
        ("hostile_rewards:no_such_function", "has no function no_such_function"),
        ("nothing", "no 'nothing'; use one of"),
    ],
)
async def test_a_reward_that_cannot_be_loaded_ends_the_pool_with_the_reason(
    tmp_path, reward, message
):
    with pytest.raises(ConfigError, match=message):
        async with pool_of(tmp_path, reward=reward) as pool:
            await pool.wait_ready()


async def test_a_pool_that_has_ended_fails_the_case_and_hides_no_cause(tmp_path):
    async with pool_of(tmp_path) as pool:
        assert await pool.score(case("scores")) == 1.0
    assert await pool.score(case("scores")) == RewardFailed("the reward pool has stopped")


async def test_workers_that_cannot_start_end_the_pool_with_what_they_said(tmp_path):
    with pytest.raises(ChildError, match="reward-0"):
        async with pool_of(tmp_path, memory_bytes=2**20) as pool:
            await pool.wait_ready()


class Leaving:
    """A child whose watcher ends the caller's wait in the moment in which it is not needed more."""

    child_id = "reward-0"

    def __init__(self, scope):
        self.scope = scope

    async def wait(self):
        try:
            await anyio.sleep_forever()
        finally:
            self.scope.cancel()


@pytest.mark.case("T-B76")
async def test_who_stops_waiting_as_a_worker_gets_ready_keeps_no_connection(tmp_path):
    path = tmp_path / "worker.sock"
    ready = encode_frame(msgspec.msgpack.encode(WorkerReady("first")))
    with listen(path) as listener, connect(path) as worker:
        listener.setblocking(False)
        worker.sendall(ready)
        with anyio.CancelScope() as scope:
            await worker_module._first_contact(Leaving(scope), listener, "first")
        assert scope.cancelled_caught
        worker.setblocking(False)
        assert worker.recv(1) == b""


def test_a_worker_whose_supervisor_was_killed_ends_without_a_word(tmp_path):
    path = tmp_path / "worker.sock"
    order = WorkerOrder(
        socket_path=str(path), incarnation="i", reward="character_class", reward_args={}
    )
    with listen(path) as listener:
        worker = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-m", "libra.rewards.worker", msgspec.json.encode(order).decode()],
            stderr=subprocess.PIPE,
        )
        connection, _ = listener.accept()
        with connection:
            connection.sendall(encode_frame(msgspec.msgpack.encode(case("digits"))))
            # It has answered, and nobody has read a word.
            while not len(connection.recv(1 << 16, socket.MSG_PEEK)) > len(ready()):
                time.sleep(0.01)
        assert worker.communicate(timeout=20)[1] == b""
    assert worker.returncode == 0


def ready():
    return encode_frame(msgspec.msgpack.encode(WorkerReady("i")))
