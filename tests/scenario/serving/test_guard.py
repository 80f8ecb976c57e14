"""What a guarded reload does and reports, and what becomes of requests meanwhile."""

import anyio
import pytest

from fake_engine import probe_logprobs
from guarded_app import TOKEN
from libra import clock
from libra.serving.middleware import WEIGHT_ROUTES
from libra.weights.judge import ack_problems, judge_acks

pytestmark = pytest.mark.anyio


async def test_a_good_reload_is_proven_in_every_field(app, running):
    async with running():
        request = app.request_for(2)
        ack = await app.reload(2)
        state = await app.state()
    assert ack_problems(request, ack) == ()
    assert ack.error is None
    assert ack.probe_logprobs == probe_logprobs(request.probe_token_ids, 2)
    assert ack.model_load_s == pytest.approx(0.5, abs=0.4)
    assert ack.lock_wait_s >= 0
    assert state["policy_version"] == 2
    assert state["manifest_hash"] == request.manifest_hash
    assert state["is_paused"] is False


@pytest.mark.case("R-B85")
@pytest.mark.case("T-B65")
async def test_the_prefix_cache_is_reset_between_load_and_resume(app, running):
    async with running():
        await app.reload(1)
    names = [call[0] for call in app.engine.calls]
    assert names == [
        "pause",
        "reload_weights",
        "reset_mm_cache",
        "reset_prefix_cache",
        "libra_begin_version",
        "resume",
    ]
    assert app.engine.calls[0] == ("pause", "keep", True)
    assert ("reset_prefix_cache", True) in app.engine.calls


@pytest.mark.case("R-B89")
@pytest.mark.case("R-B94")
@pytest.mark.parametrize("fault", ["load", "probe"])
async def test_after_a_failed_load_nothing_is_answered_until_a_good_one(app, running, fault):
    kept = []

    async def ask():
        kept.append(await app.complete(max_tokens=1000))

    async with running(), anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await clock.sleep(0.2)
        app.engine.load_error = RuntimeError("CUDA out of memory") if fault == "load" else None
        app.engine.probe_error = fault == "probe"
        ack = await app.reload(1)
        assert ack.policy_version is None
        assert ("CUDA out of memory" if fault == "load" else "not finite") in ack.error
        assert (await app.state())["policy_version"] is None
        assert (await app.state())["manifest_hash"] is None
        assert not app.engine.requests, "no request may run on unknown weights"
        refused = await app.complete()
        assert refused.status == 503
        assert refused.json["error"]["message"].startswith("weights unknown: loading v1 failed")
        # A check that fails while the weights are unknown does not make them known.
        assert (await app.reload(2, manifest_hash="0")).policy_version is None
        assert (await app.complete()).status == 503
        app.engine.probe_error = False
        assert (await app.reload(1)).error is None
        assert (await app.complete()).json["choices"][0]["libra_version_spans"] == [[1, 0, 20]]
    if fault == "load":
        (choice,) = kept[0].json["choices"]
        assert choice["finish_reason"] == "abort"
        assert [span[0] for span in choice["libra_version_spans"]] == [0]
    else:
        assert kept[0].status == 503


async def test_requests_that_waited_for_a_reload_that_failed_are_refused(app, running):
    answers = []

    async def ask(**how):
        answers.append(await app.complete(**how))

    async with running(), anyio.create_task_group() as tasks:
        app.engine.load_error = RuntimeError("torn")
        tasks.start_soon(app.reload, 1)
        await clock.sleep(0.1)
        assert app.engine.pause_mode == "keep"
        tasks.start_soon(ask)
        tasks.start_soon(lambda: ask(stream=True))
    whole, stream = sorted(answers, key=lambda answer: answer.status, reverse=True)
    assert whole.status == 503
    assert whole.json["error"]["message"].startswith("weights unknown")
    assert b"token_ids" not in stream.body


async def test_the_state_is_told_while_the_engine_is_busy_loading(app, running):
    async def hang():
        await anyio.sleep_forever()

    async with running(), anyio.create_task_group() as tasks:
        app.engine.load_s = 5.0
        tasks.start_soon(app.reload, 1)
        while app.engine.pause_mode is None:
            await clock.sleep(0.01)
        app.engine.is_paused, asked = hang, app.engine.is_paused
        with anyio.fail_after(1.0):
            state = await app.state()
        app.engine.is_paused = asked
    assert (state["is_paused"], state["policy_version"]) == (True, 0)


@pytest.mark.case("T-B60")
async def test_reloads_come_one_at_a_time_and_the_wait_is_measured(app, running):
    acks = {}

    async def reload(version):
        acks[version] = await app.reload(version)

    async with running(), anyio.create_task_group() as tasks:
        app.engine.load_s = 3.0
        for version in (1, 2, 3):
            tasks.start_soon(reload, version)
            await clock.sleep(0.5)
    assert [acks[v].error for v in (1, 2, 3)] == [None, None, None]
    loads = [call for call in app.engine.calls if call[0] == "reload_weights"]
    assert [path[-1] for _, path in loads] == ["1", "2", "3"]


@pytest.mark.case("R-B94")
@pytest.mark.parametrize("path", sorted(WEIGHT_ROUTES))
async def test_a_route_that_may_change_weights_makes_the_version_unknown(app, running, path):
    kept = []

    async def ask():
        kept.append(await app.complete(max_tokens=50))

    async with running(), anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await clock.sleep(0.2)
        await app.call("POST", path, token=TOKEN)
        assert (await app.state())["policy_version"] is None
        assert (await app.complete()).status == 503
        await clock.sleep(1.0)
        assert kept[0].status == 503
        if path == "/sleep":
            await app.call("POST", "/wake_up", token=TOKEN)
        assert (await app.reload(1)).error is None
        assert (await app.complete()).status == 200


@pytest.mark.case("T-B66")
@pytest.mark.parametrize("loads", [True, False])
async def test_an_engine_that_slept_answers_only_after_a_load_that_its_probe_proves(
    app, running, loads
):
    """Level 2 throws the weights away; an engine that wakes has whatever its memory holds."""
    async with running():
        assert (await app.reload(1)).error is None
        await app.call("POST", "/sleep", token=TOKEN)
        await app.call("POST", "/wake_up", token=TOKEN)
        app.engine.weights = 99
        assert (await app.complete()).status == 503
        if not loads:
            app.engine.collective_rpc = ignore_load
        app.engine.calls.clear()
        request = app.request_for(2)
        ack = await app.reload(2)
    steps = [call[0] for call in app.engine.calls]
    # Sleep has paused it; it runs again only with the probe, after load and caches.
    assert steps.index("resume") > steps.index("reset_prefix_cache")
    assert not loads or steps.index("reset_prefix_cache") > steps.index("reload_weights")
    verdict = judge_acks(
        request,
        (ack,),
        trainer_probe_logprobs=probe_logprobs(request.probe_token_ids, 2),
        probe_tolerance=1e-3,
    )
    assert verdict.accepted == (("vllm-0",) if loads else ())
    assert loads or "vllm-0" in verdict.refused


async def ignore_load(_method, *, kwargs=None):
    """What a load does on an engine whose memory is not mapped: nothing, and no error."""
