"""Workflows that fail, exit or return nonsense, on a virtual clock: each costs its sample only."""

import asyncio
import sys
from math import nan

import anyio
import msgspec
import numpy as np
import pytest
import trio.testing

import hostile_rewards
from fake_fleet import FakeFleet, FakeScorer, breaks
from libra import clock
from libra.errors import InvariantError
from libra.rewards.coercion import RewardFailed
from libra.wire.instance import VersionSpan
from libra.workflows.single_turn import single_turn
from libra_supervisor.events import SampleFinished, SampleGaveUp
from libra_supervisor.rollouts.user_tasks import contain_exits
from runner_runs import Run, first_try, running
from trajectories import admitted

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    # Rows are read in threads, for which a clock that jumps at once would not wait.
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0.005)}


@pytest.mark.case("T-B62")
@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad luck"),
        KeyError("x"),
        OSError(5, "disk"),
        SystemExit(3),
        ValueError("\ud800" * 10**6),
        hostile_rewards.ShylyError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_of_the_workflow_costs_its_sample_only(tmp_path, error):
    async def fragile(task, client):
        if client.sample_index == 1:
            raise error
        return await single_turn(task, client)

    async with running(tmp_path, workflow=fragile) as run:
        run.runner.start(admitted(0, n_samples=3))
        await run.until_idle()
    assert len(run.of(SampleFinished)) == 2
    (failure,) = run.failures()
    assert failure.kind == "workflow"
    assert failure.message.startswith(type(error).__name__)
    assert len(failure.message.encode()) <= 500


async def exit_in_a_task():
    await asyncio.get_running_loop().create_task(leave())


async def exit_in_a_task_of_a_group():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave)
        await anyio.sleep_forever()


async def exit_in_a_grandchild():
    await asyncio.get_running_loop().create_task(exit_in_a_task_of_a_group())


async def exit_when_cancelled():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave_when_cancelled)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def leave():
    sys.exit(3)


async def leave_when_cancelled():
    try:
        await anyio.sleep_forever()
    finally:
        sys.exit(3)


@pytest.mark.case("T-B62")
@pytest.mark.timeout(20)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    "way", [exit_in_a_task, exit_in_a_task_of_a_group, exit_in_a_grandchild, exit_when_cancelled]
)
async def test_a_task_of_a_workflow_that_exits_costs_its_sample_only(tmp_path, anyio_backend, way):
    async def leaving(task, client):
        await way()

    contain_exits()
    run = await until_given_up(Run(tmp_path, FakeFleet(), workflow=leaving))
    (failure,) = run.failures()
    assert failure.kind == "workflow"
    assert "Error" in failure.message or "Group" in failure.message


async def until_given_up(run):
    """Run one sample, in real time, until it has failed."""
    has_failed = anyio.Event()

    async def post(event):
        await run.post(event)
        if isinstance(event, SampleGaveUp):
            has_failed.set()

    run.runner._parts = msgspec.structs.replace(run.runner._parts, post=post)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run.runner.run)
        await clock.sleep(0.1)
        run.runner.start(admitted(0, n_samples=1))
        await has_failed.wait()
        tasks.cancel_scope.cancel()
    return run


@pytest.mark.case("T-B62")
@pytest.mark.timeout(20)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_workflow_that_waits_for_what_it_cancelled_costs_its_sample_only(
    tmp_path, anyio_backend
):
    async def impatient(task, client):
        lookup = asyncio.get_running_loop().create_future()
        lookup.cancel()
        await lookup

    run = await until_given_up(Run(tmp_path, FakeFleet(), workflow=impatient))
    assert [(f.kind, f.message) for f in run.failures()] == [
        ("workflow", "it waited for something that was cancelled")
    ]


@pytest.mark.case("T-B62")
async def test_a_bug_of_the_runner_ends_the_run(tmp_path):
    run = Run(tmp_path, FakeFleet())

    async def post(event):
        if isinstance(event, SampleFinished):
            raise ZeroDivisionError

    run.runner._parts = msgspec.structs.replace(run.runner._parts, post=post)

    async def run_for_ten_seconds():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.runner.run)
            await clock.sleep(0.1)
            run.runner.start(admitted(0))
            await clock.sleep(10)
            raise AssertionError("ten seconds later the run still goes on")

    with pytest.raises(ExceptionGroup) as raised:
        await run_for_ten_seconds()
    assert raised.group_contains(ZeroDivisionError)


@pytest.mark.case("T-B62")
async def test_an_invariant_broken_inside_a_workflow_is_not_the_samples_fault(tmp_path):
    async def workflow(task, client):
        raise InvariantError("two and two are five")

    async def run_for_ten_seconds():
        async with running(tmp_path, workflow=workflow) as run:
            run.runner.start(admitted(0))
            await clock.sleep(10)
            raise AssertionError("ten seconds later the run still goes on")

    with pytest.raises(ExceptionGroup) as raised:
        await run_for_ten_seconds()
    assert raised.group_contains(InvariantError)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"loss_mask": ()}, "alignment", "mask entries"),
        ({"rollout_logprobs": nan}, "alignment", "logprob nan"),
        ({"rollout_logprobs": -1.0}, "alignment", "that the policy did not sample"),
        ({"num_prompt_tokens": 0}, "alignment", "0 prompt tokens in"),
        ({"num_prompt_tokens": 10**6}, "alignment", "a loss mask inside the 1000000 prompt"),
        ({"version_spans": ()}, "alignment", "version spans that cover other tokens"),
        ({"version_spans": (VersionSpan(0, 5, 5),)}, "alignment", "version span [5, 5) after"),
        ({"token_ids": np.arange(5)}, "workflow", "cannot be kept: Encoding objects of type numpy"),
        ({"num_prompt_tokens": "2"}, "workflow", "cannot be kept: Expected `int`, got `str`"),
        ({"finish_reason": "done"}, "workflow", "cannot be kept: Invalid enum value 'done'"),
        ({"response_text": "\ud800"}, "workflow", "cannot be kept: "),
        ({"token_ids": (1,) * 65}, "workflow", "returned 65 tokens, max_model_len is 64"),
        ({"token_ids": (1, -1)}, "workflow", "returned token id -1"),
        ({"token_ids": (1, 200)}, "workflow", "returned token id 200, the model has 200"),
        ({"trajectory_id": "x"}, "workflow", "trajectory_id 'x', not 'row-0/e0/a0/s0'"),
        ({"group_id": "x"}, "workflow", "returned group_id 'x', not 'row-0/e0/a0'"),
        ({"prompt_id": "x"}, "workflow", "returned prompt_id 'x', not 'row-0'"),
        ({"sample_index": 1}, "workflow", "returned sample_index 1, not 0"),
        ({"reward": float("inf")}, "reward", "returned inf"),
    ],
)
async def test_what_a_workflow_returns_is_checked_at_the_border(tmp_path, change, kind, message):
    async def workflow(task, client):
        trajectory = await single_turn(task, client)
        changed = dict(change)
        if "rollout_logprobs" in change:
            changed["rollout_logprobs"] = (change["rollout_logprobs"],) * len(trajectory.token_ids)
        return msgspec.structs.replace(trajectory, **changed)

    async with running(tmp_path, workflow=workflow) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
    (failure,) = run.failures()
    assert failure.kind == kind
    assert message in failure.message


async def test_lists_and_rewards_of_numpy_are_taken_as_what_they_stand_for(tmp_path):
    async def workflow(task, client):
        made = await single_turn(task, client)
        return msgspec.structs.replace(
            made,
            token_ids=list(made.token_ids),
            loss_mask=list(made.loss_mask),
            reward=np.float32(0.5),
        )

    async with running(tmp_path, workflow=workflow) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
    (finished,) = run.of(SampleFinished)
    kept = finished.trajectory
    assert (type(kept.token_ids), type(kept.loss_mask), kept.reward) == (tuple, tuple, 0.5)


async def test_a_workflow_that_returns_no_trajectory_fails_its_sample(tmp_path):
    async def workflow(task, client):
        return "done"

    async with running(tmp_path, workflow=workflow) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
    assert run.failures()[0].message == "returned a str, no Trajectory"


async def test_a_workflow_may_ask_for_several_answers_at_a_time(tmp_path):
    async def branching(task, client):
        async with anyio.create_task_group() as branches:
            for _ in range(3):
                branches.start_soon(client.generate, task.prompt_token_ids)
        return await single_turn(task, client)

    async with running(tmp_path, first_try(breaks), workflow=branching) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
    assert len(run.of(SampleFinished)) == 1
    ids = [request.request_id for request in run.fleet.requests]
    assert len(set(ids)) == len(ids) == 8
    # Tried again with the seed that it had, which no other has.
    seeds = {request.sampling.seed for request in run.fleet.requests}
    assert len(seeds) == 4


async def test_a_workflow_may_score_itself(tmp_path):
    async def workflow(task, client):
        return msgspec.structs.replace(await single_turn(task, client), reward=0.25)

    async with running(tmp_path, workflow=workflow) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
    assert run.of(SampleFinished)[0].trajectory.reward == 0.25
    assert run.scorer.cases == []


@pytest.mark.case("T-B13")
async def test_a_failed_reward_is_a_failed_sample(tmp_path):
    scorer = FakeScorer(lambda case: RewardFailed("returned nan"))
    async with running(tmp_path, scorer=scorer) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
    assert [(f.kind, f.message) for f in run.failures()] == [("reward", "returned nan")]
