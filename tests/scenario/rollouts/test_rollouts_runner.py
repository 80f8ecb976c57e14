"""The runner over a fleet that misbehaves, on a virtual clock."""

import anyio
import msgspec
import pytest
import trio.testing

from fake_fleet import (
    FakeFleet,
    aborts_empty,
    answers,
    answers_nonsense,
    breaks,
    hangs,
    hangs_unseen,
)
from libra import clock
from libra.errors import DrainingError, InvariantError, OverloadedError, PeerError, RejectedError
from libra.ids import PolicyVersion
from libra.rollouts.accounts import BufferLimits
from libra.rollouts.buffer import CancelGroup, RolloutBuffer
from libra.rollouts.trajectory import alignment_error
from libra_supervisor.events import SampleFinished, SampleGaveUp, SampleProgressed, SampleStarted
from runner_runs import SETTINGS, Run, first_try, running
from trajectories import admitted, completion, prompt

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    # Rows are read in threads, for which a clock that jumps at once would not wait.
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0.005)}


async def test_a_group_becomes_scored_trajectories(tmp_path):
    async with running(tmp_path) as run:
        run.runner.start(admitted(3, n_samples=2))
        await run.until_idle()
    assert [type(e) for e in run.events] == [SampleStarted] * 2 + [SampleFinished] * 2
    assert sorted(e.trajectory.sample_index for e in run.of(SampleFinished)) == [0, 1]
    for event in run.of(SampleFinished):
        assert event.trajectory.reward == 2.0
        assert alignment_error(event.trajectory) is None
    case = run.scorer.cases[0]
    assert (case.prompt_text, case.answer, case.extras) == ("a", "b", {"level": 3})
    seeds = {r.sampling.seed for r in run.fleet.requests}
    assert len(seeds) == 2
    assert {r.prompt_id for r in run.fleet.requests} == {"row-3"}


@pytest.mark.case("T-B54", "T-B63")
@pytest.mark.parametrize(
    ("fault", "took_s"),
    [(hangs, 301.5), (breaks, 2.5), (answers_nonsense, 2.5), (aborts_empty, 1.5)],
)
async def test_a_request_that_fails_is_asked_for_again_and_nothing_is_missing(
    tmp_path, fault, took_s
):
    async with running(tmp_path, first_try(fault)) as run:
        for row in range(16):
            run.runner.start(admitted(row, n_samples=8))
        await run.until_idle()
    assert len(run.of(SampleFinished)) == 128
    assert run.failures() == []
    # Per sample: reading rows in threads lets the virtual clock jump in between.
    assert run.durations() == pytest.approx([took_s] * 128)
    assert run.runner.num_retries == 128
    assert (run.runner.num_running, run.fleet.num_running) == (0, 0)
    retries = [r for r in run.fleet.requests if r.request_id.endswith(".1")]
    assert {r.prompt_id for r in retries} == {None}
    first = {r.request_id[:-1]: r.sampling.seed for r in run.fleet.requests}
    assert all(first[r.request_id[:-1]] == r.sampling.seed for r in retries)


@pytest.mark.case("T-B54")
async def test_one_of_128_that_never_works_is_given_up_replaced_and_accounted(tmp_path):
    async def behave(request, progressed):
        is_bad = request.request_id.startswith("row-5/e0/a0/s3/")
        return await (breaks if is_bad else answers)(request, progressed)

    limits = BufferLimits(n_samples=8, batch_size=128, max_concurrent=128, max_head_offpolicyness=0)
    buffer = RolloutBuffer(limits)
    async with running(tmp_path, behave) as run:
        for row in range(16):
            run.runner.start(buffer.admit(prompt(row)))
        num_handled = 0
        with anyio.fail_after(60):
            while buffer.num_complete < 128:
                for event in run.events[num_handled:]:
                    num_handled += 1
                    handle(event, buffer, run.runner)
                for _ in range(buffer.num_admissible(serving_version=PolicyVersion(0))):
                    run.runner.start(buffer.admit_pending())
                await clock.sleep(0.5)
    assert buffer.take_batch(version=PolicyVersion(0)) is not None
    assert buffer.counts.running == 0
    assert buffer.dropped_by_reason == {"engine": 1, "sibling": 7}
    assert buffer.counts.submitted == 136
    (failure,) = run.failures()
    assert failure.message == "vllm-0 closed the connection"


def handle(event, buffer, runner):
    match event:
        case SampleStarted(group_id, index):
            buffer.on_started(group_id, index, now=clock.now())
        case SampleProgressed(group_id, index):
            buffer.on_progress(group_id, index, now=clock.now())
        case SampleFinished(trajectory):
            buffer.on_finished(trajectory)
        case SampleGaveUp(group_id, index, failure):
            for command in buffer.on_failed(group_id, index, failure.kind, failure.message):
                if isinstance(command, CancelGroup):
                    runner.cancel(command.group_id)


@pytest.mark.parametrize(
    ("error", "kind", "num_requests"),
    [
        (PeerError("vllm-0 is gone"), "engine", 3),
        (OverloadedError("the queue is full"), "engine", 3),
        (RejectedError("bad prompt"), "workflow", 1),
        (DrainingError("stopping"), "cancelled", 1),
    ],
)
async def test_errors_of_the_fleet_become_failures_of_their_kind(
    tmp_path, error, kind, num_requests
):
    async def behave(request, progressed):
        raise error

    async with running(tmp_path, behave) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
    assert [(f.kind, f.message) for f in run.failures()] == [(kind, str(error))]
    assert len(run.fleet.requests) == num_requests


@pytest.mark.case("T-B77")
async def test_an_answer_may_take_very_long_as_long_as_tokens_come(tmp_path):
    async def slow(request, progressed):
        for num_tokens in range(10):
            progressed(num_tokens)
            await clock.sleep(290)
        return await answers(request, progressed)

    async with running(tmp_path, slow) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
    assert len(run.of(SampleFinished)) == 1
    # Signs of life reach the accounts, so that no lease runs out meanwhile.
    assert len(run.of(SampleProgressed)) == pytest.approx(10, abs=1)


@pytest.mark.case("T-B77")
async def test_silence_is_counted_by_the_length_of_the_answer_so_far(tmp_path):
    async def stops(request, progressed):
        progressed(100)
        await anyio.sleep_forever()

    async with running(tmp_path, stops) as run:
        run.runner.start(admitted(0, n_samples=2))
        await run.until_idle()
    assert [f.kind for f in run.failures()] == ["timeout"] * 2
    assert "got nothing for 300 s after 100 tokens" in run.failures()[0].message
    assert run.runner.timeouts_by_tokens == {64: 2}


@pytest.mark.case("T-B56")
async def test_a_sample_that_nobody_hears_of_any_more_loses_its_lease(tmp_path):
    limits = BufferLimits(
        n_samples=1, batch_size=1, max_concurrent=1, max_head_offpolicyness=0, lease_s=60
    )
    buffer = RolloutBuffer(limits)
    async with running(tmp_path, hangs_unseen) as run:
        group = buffer.admit(prompt(0))
        run.runner.start(group)
        await clock.sleep(1)
        handle(run.events[0], buffer, run.runner)
        await clock.sleep(61)
        assert buffer.oldest_wait()[0] == group.group_id
        (command,) = buffer.on_tick(now=clock.now())
        run.runner.cancel(command.group_id)
        await clock.sleep(1)
        assert (buffer.counts.running, run.fleet.num_running) == (0, 0)
        assert run.of(SampleGaveUp) == []


@pytest.mark.case("T-B58", "T-B60")
async def test_an_answer_cut_by_a_reload_goes_on_with_the_same_tokens(tmp_path):
    async def reloads(request, progressed):
        num_prompt = len(request.prompt_token_ids)
        if request.request_id.endswith("/t1.0.0"):
            return completion(
                (10, 11, 12), version=3, finish_reason="abort", num_prompt_tokens=num_prompt
            )
        assert request.sampling.max_new_tokens == 5
        return completion((13, 14), version=4, num_prompt_tokens=num_prompt)

    async with running(tmp_path, reloads) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
    first, second = run.fleet.requests
    assert second.prompt_token_ids == (*first.prompt_token_ids, 10, 11, 12)
    assert second.sampling.seed != first.sampling.seed
    (event,) = run.of(SampleFinished)
    assert event.trajectory.token_ids == (*second.prompt_token_ids, 13, 14)
    start = len(first.prompt_token_ids)
    spans = [msgspec.structs.astuple(s) for s in event.trajectory.version_spans]
    assert spans == [(3, start, start + 3), (4, start + 3, start + 5)]
    assert (event.trajectory.oldest_version, event.trajectory.finish_reason) == (3, "stop")


async def test_an_answer_cut_at_its_last_token_is_whole(tmp_path):
    async def fills(request, progressed):
        return completion(
            range(10, 18), finish_reason="abort", num_prompt_tokens=len(request.prompt_token_ids)
        )

    async with running(tmp_path, fills) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
    (event,) = run.of(SampleFinished)
    assert (len(run.fleet.requests), event.trajectory.finish_reason) == (1, "length")


@pytest.mark.case("T-B60")
async def test_one_slow_sample_holds_up_nobody_else(tmp_path):
    async def behave(request, progressed):
        if request.request_id.startswith("row-0/e0/a0/s0/"):
            progressed(0)
            await clock.sleep(200)
        return await answers(request, progressed)

    async with running(tmp_path, behave) as run:
        for row in range(4):
            run.runner.start(admitted(row, n_samples=4))
        await clock.sleep(3)
        assert len(run.of(SampleFinished)) == 15
        assert run.runner.num_groups == 1


async def test_a_prompt_that_fills_the_model_is_a_failure_with_numbers(tmp_path):
    settings = msgspec.structs.replace(SETTINGS, max_model_len=10)
    async with running(tmp_path, settings=settings) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
    (failure,) = run.failures()
    assert "tokens, max_model_len is 10" in failure.message


async def test_an_answer_never_asks_for_more_than_the_model_holds(tmp_path):
    async with running(tmp_path) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
        num_prompt = len(run.fleet.requests[0].prompt_token_ids)
    settings = msgspec.structs.replace(SETTINGS, max_model_len=num_prompt + 3)
    async with running(tmp_path, settings=settings) as run:
        run.runner.start(admitted(0, n_samples=1))
        await run.until_idle()
    assert run.fleet.requests[0].sampling.max_new_tokens == 3


async def test_nothing_is_said_about_a_group_after_it_was_cancelled(tmp_path):
    async with running(tmp_path, hangs) as run:
        run.runner.start(admitted(0))
        run.runner.start(admitted(1))
        await clock.sleep(1)
        num_events = len(run.events)
        run.runner.cancel(admitted(0).group_id)
        run.runner.cancel(admitted(7).group_id)
        await clock.sleep(1)
        assert (run.fleet.num_running, run.runner.num_groups) == (2, 1)
        run.runner.cancel_all("the gang was lost")
        run.runner.start(admitted(0))
        await clock.sleep(1)
        assert (run.fleet.num_running, run.runner.num_groups) == (2, 1)
        assert {type(e) for e in run.events[num_events:]} == {SampleStarted}


async def test_a_group_cannot_be_started_twice_or_without_a_runner(tmp_path):
    run = Run(tmp_path, FakeFleet())
    with pytest.raises(InvariantError, match="while no runner runs"):
        run.runner.start(admitted(0))
    async with running(tmp_path, hangs) as run:
        run.runner.start(admitted(0))
        with pytest.raises(InvariantError, match="started twice"):
            run.runner.start(admitted(0))


async def test_a_sample_asked_for_again_begins_anew_and_ends_once(tmp_path):
    class Stuck:
        is_over = False

        async def behave(self, request, progressed):
            if "/s1/" in request.request_id and not self.is_over:
                await hangs(request, progressed)
            return await answers(request, progressed)

    stuck = Stuck()
    async with running(tmp_path, stuck.behave) as run:
        run.runner.start(admitted(0))
        await clock.sleep(50)
        assert [e.trajectory.sample_index for e in run.of(SampleFinished)] == [0]
        stuck.is_over = True
        run.runner.ask_again(admitted(0).group_id, (0, 1))
        await run.until_idle()
        # What had ended is not done again, and nobody hears of a second start.
        assert [e.trajectory.sample_index for e in run.of(SampleFinished)] == [0, 1]
        assert len(run.of(SampleStarted)) == 2
        assert run.of(SampleGaveUp) == []
        assert run.fleet.attempts_of(admitted(0).group_id) == 3
        # Not to the engine that has the prompt's other requests: that one may be what is silent.
        asked = [it.prompt_id for it in run.fleet.requests if "/s1/" in it.request_id]
        assert asked == ["row-0", None]
        run.runner.ask_again(admitted(0).group_id, (0, 1))
        await clock.sleep(50)
        assert len(run.of(SampleFinished)) == 2
