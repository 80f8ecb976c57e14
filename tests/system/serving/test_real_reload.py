"""Guarded reloads of real vLLM servers on CPU.

`a` goes from version to version; `b` was started on v1 and says what v1 really answers.
"""

import json
import math

import aiohttp
import anyio
import numpy as np
import pytest

from libra import clock
from libra.errors import RefusedError, RejectedError
from libra.wire.instance import VersionSpan
from real_reloads import PROBE, complete, reload, request_for
from real_servers import TOKEN

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(300)]

PROMPT_OF_WATCHED = [21, 22, 23]
LONG_PROMPT = [(7 * k) % 400 + 10 for k in range(300)]


async def post(url, path, body, *, token=TOKEN, **headers):
    headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, json=body, headers=headers) as response,
    ):
        return response.status, await response.read()


async def until_answering(client, request_id, *, num_tokens=5):
    """Wait until more than `num_tokens` of the request's answer are there; returns how many."""
    with anyio.fail_after(60):
        while (told := (await client.open_requests()).get(request_id, -1)) <= num_tokens:
            await clock.sleep(0.02)
    return told


async def test_a_server_says_what_it_was_started_with(a, b, versions):
    base, published = await a.state(), await b.state()
    assert (base.policy_version, base.manifest_hash) == (0, None)
    assert (published.policy_version, published.manifest_hash) == (1, versions[1][1])
    assert (base.instance_id, base.incarnation) == ("vllm-a", "vllm-a-first")
    assert (await complete(b)).version_spans == (VersionSpan(1, 0, 24),)


async def test_a_reloaded_server_answers_exactly_as_one_started_on_that_version(a, b, versions):
    before = await complete(a)
    ack = await reload(a, versions, 1)
    reloaded, fresh = await complete(a), await complete(b)
    assert reloaded.version_spans == fresh.version_spans == (VersionSpan(1, 0, 24),)
    assert reloaded.token_ids == fresh.token_ids
    assert reloaded.logprobs == fresh.logprobs
    assert before.logprobs != reloaded.logprobs
    assert (await a.state()).policy_version == 1
    # The other way round: b reloads what it has, and both probes agree.
    assert (await reload(b, versions, 1)).probe_logprobs == ack.probe_logprobs
    # Back and forth.
    second = await reload(a, versions, 2)
    assert second.probe_logprobs != ack.probe_logprobs
    assert (await reload(a, versions, 1)).probe_logprobs == ack.probe_logprobs
    assert (await complete(a)).logprobs == fresh.logprobs


@pytest.mark.case("R-B85")
@pytest.mark.case("T-B65")
async def test_a_prefix_cached_under_old_weights_is_not_used(a, b, versions):
    await reload(a, versions, 2)
    for _ in range(2):
        cached = await complete(a, LONG_PROMPT)
    assert cached.num_cached_tokens > 0
    await reload(a, versions, 1)
    reloaded, fresh = await complete(a, LONG_PROMPT), await complete(b, LONG_PROMPT)
    assert reloaded.num_cached_tokens == 0
    assert (reloaded.token_ids, reloaded.logprobs) == (fresh.token_ids, fresh.logprobs)


def drop_a_tensor(tensors):
    del tensors["model.norm.weight"]


def reshape_a_tensor(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].reshape(256, 256)


def put_in_a_nan(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = math.nan


def add_a_tensor(tensors):
    tensors["model.extra.weight"] = np.zeros(4, np.float32)


@pytest.mark.case("T-B68")
async def test_bad_checkpoints_are_refused_and_the_old_version_goes_on(a, files, versions):
    await reload(a, versions, 2)
    good = await complete(a)
    bad = {
        "is missing": files.publish(10, damage=drop_a_tensor),
        "instead of [512, 128]": files.publish(11, damage=reshape_a_tensor),
        "NaN or Inf": files.publish(12, damage=put_in_a_nan),
        "is not in the model": files.publish(13, damage=add_a_tensor),
        "bytes": files.publish(14),
        "hashes to": files.publish(15),
    }
    # A file that is too short would be waited for: on a shared disk it may still come.
    for version, more in ((14, b"more"), (15, b"")):
        path = bad["bytes" if version == 14 else "hashes to"][0] / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        path.write_bytes(content + more)
    for version, (message, published) in enumerate(bad.items(), start=10):
        request = request_for({version: published}, version, force=False)
        ack = await a.reload(request, timeout_s=60.0)
        assert message in ack.error
        assert ack.policy_version == 2
        again = await complete(a)
        assert (again.token_ids, again.logprobs) == (good.token_ids, good.logprobs)
        assert again.version_spans == (VersionSpan(2, 0, 24),)
    assert not (await a.state()).is_paused


async def test_requests_that_must_not_be_served_are_refused(servers, a, files, versions):
    await reload(a, versions, 2)
    for changes, message in (
        ({"force": False}, "not newer"),
        ({"weights_directory": str(files.base)}, "not a version under"),
        ({"weights_directory": "/etc"}, "not a version under"),
        ({"run_id": "run-2"}, "of run run-2"),
        ({"manifest_hash": versions[3][1]}, "manifest hash"),
    ):
        request = request_for(versions, 1, **changes)
        ack = await a.reload(request, timeout_s=60.0)
        assert message in ack.error
        assert ack.policy_version == 2
    async with servers[0].client(token="wrong") as stranger:
        with pytest.raises(RejectedError, match="401"):
            await stranger.reload(request_for(versions, 3), timeout_s=60.0)
    assert (await a.state()).policy_version == 2


async def test_development_routes_are_closed_to_local_users(urls):
    routes = (
        "/pause",
        "/resume",
        "/sleep",
        "/wake_up",
        "/collective_rpc",
        "/update_weights",
        "/start_weight_update",
        "/reset_prefix_cache",
        "/abort_requests",
        "/inference/v1/generate",
    )
    for route in routes:
        assert (await post(urls[0], route, {}, token=None))[0] == 401
        assert (await post(urls[0], route, {}, token="wrong"))[0] == 401
    status, content = await post(urls[0], "/reset_prefix_cache", {})
    assert (status, json.loads(content)) == (200, {"success": True})


def spans_in(events):
    found = {}
    for event in events.decode().split("\n\n"):
        if "libra_version_spans" in event:
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                found[choice["index"]] = choice["libra_version_spans"]
    return found


@pytest.mark.case("T-B58")
@pytest.mark.case("R-B92")
async def test_reloads_in_the_middle_show_in_every_answers_spans(a, urls, versions):
    """vLLM's own spans, where it has them, are the reference."""
    await reload(a, versions, 1)
    body = {"model": "policy", "max_tokens": 1200, "ignore_eos": True, "return_token_ids": True}
    asks = {
        "native": (
            "/inference/v1/generate",
            {
                "model": "policy",
                "token_ids": list(PROBE),
                "sampling_params": {"max_tokens": 1200, "ignore_eos": True},
            },
        ),
        "whole": ("/v1/completions", body | {"prompt": [[5, 6], [7, 8, 9]], "n": 2}),
        "stream": ("/v1/completions", body | {"prompt": [5, 6], "n": 2, "stream": True}),
        "chat": (
            "/v1/chat/completions",
            body | {"messages": [{"role": "user", "content": "1 plus 2"}]},
        ),
    }
    answers = {}

    async def ask(name):
        status, answers[name] = await post(urls[0], *asks[name], **{"X-Request-Id": name})
        assert status == 200, answers[name]

    async with anyio.create_task_group() as tasks:
        for name in asks:
            tasks.start_soon(ask, name)
        for version, num_tokens in ((2, 20), (3, 200)):
            for name in asks.keys() - {"native"}:
                await until_answering(a, name, num_tokens=num_tokens)
            await reload(a, versions, version)
    (native,) = json.loads(answers["native"])["choices"]
    reference = [[int(s["version"]), s["start"], s["end"]] for s in native["weight_versions"]]
    spans = [choice["libra_version_spans"] for choice in json.loads(answers["whole"])["choices"]]
    spans += spans_in(answers["stream"]).values()
    spans += [choice["libra_version_spans"] for choice in json.loads(answers["chat"])["choices"]]
    assert len(spans) == 4 + 2 + 1
    for one in [reference, *spans]:
        assert [span[0] for span in one] == [1, 2, 3]
        assert [span[1] for span in one] == [0, one[0][2], one[1][2]]
        assert one[-1][2] == 1200
        # All ran in one batch, so their boundaries are a few steps apart at most.
        for k in (0, 1):
            assert abs(one[k][2] - reference[k][2]) <= 8


async def long_answer(url, *, num_tokens, request_id="long"):
    """A choice of exactly that many tokens, unless it is aborted."""
    body = {"model": "policy", "prompt": list(PROBE), "max_tokens": num_tokens, "seed": 5}
    body |= {"ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    status, content = await post(url, "/v1/completions", body, **{"X-Request-Id": request_id})
    assert status == 200, content
    return json.loads(content)["choices"][0]


async def test_prompts_with_seeds_beyond_one_step_of_the_engine_are_all_answered(urls):
    """Seen with vLLM 0.32: a part of such a prompt ended the whole CPU engine."""
    answers = []

    async def ask(seed):
        body = {"model": "policy", "prompt": [1 + seed] * 500, "max_tokens": 2, "seed": seed}
        answers.append(await post(urls[0], "/v1/completions", body))

    async with anyio.create_task_group() as tasks:
        for seed in range(24):
            tasks.start_soon(ask, seed)
    assert {status for status, _ in answers} == {200}, answers[0]


async def test_leaving_out_the_text_changes_neither_ids_nor_logprobs(a, urls, versions):
    await reload(a, versions, 2)
    body = {"model": "policy", "prompt": list(PROBE), "max_tokens": 64, "seed": 5, "logprobs": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    only_ids = {"vllm_xargs": {"libra_token_ids_only": 1}, "return_tokens_as_token_ids": True}
    found = []
    for more in ({}, only_ids):
        status, content = await post(urls[0], "/v1/completions", body | more)
        assert status == 200, content
        found.append(json.loads(content)["choices"][0])
    (with_text, without) = found
    assert (bool(with_text["text"]), without["text"]) == (True, "")
    assert without["token_ids"] == with_text["token_ids"]
    logprobs = [choice["logprobs"]["token_logprobs"] for choice in found]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-5)


async def test_unchanged_weights_leave_a_stream_token_identical(a, urls, versions):
    await reload(a, versions, 3)
    unbroken = await long_answer(urls[0], num_tokens=800)
    kept = []

    async def ask():
        kept.append(await long_answer(urls[0], num_tokens=800))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until_answering(a, "long")
        await reload(a, versions, 3)
    assert len(kept[0]["libra_version_spans"]) == 2
    assert kept[0]["token_ids"] == unbroken["token_ids"]


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_the_pause_modes_wait_and_abort(a, urls, versions, mode):
    await reload(a, versions, 1)
    answers = []

    async def ask():
        answers.append(await long_answer(urls[0], num_tokens=1500))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until_answering(a, "long")
        await reload(a, versions, 2, pause_mode=mode)
    (answer,) = answers
    num_tokens = len(answer["token_ids"])
    assert answer["finish_reason"] == ("abort" if mode == "abort" else "length")
    assert answer["libra_version_spans"] == [[1, 0, num_tokens]]
    assert (num_tokens < 1500) == (mode == "abort")


@pytest.mark.case("R-B94")
@pytest.mark.case("R-B89")
async def test_weights_changed_behind_the_guard_are_not_served(a, b, urls, versions):
    await reload(a, versions, 1)
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}
    status, _ = await post(urls[0], "/collective_rpc", rpc)
    assert status == 500
    assert (await a.state()).policy_version is None
    with pytest.raises(RefusedError, match="weights unknown: /collective_rpc was called"):
        await complete(a)
    await reload(a, versions, 1)
    assert (await complete(a)).logprobs == (await complete(b)).logprobs


@pytest.mark.case("R-B14")
@pytest.mark.case("T-B54")
async def test_a_running_request_is_told_with_a_growing_number_of_tokens_also_over_a_reload(
    a, urls, versions
):
    # An end token may come at any time, and then there is nothing left to be told.
    body = {"model": "policy", "prompt": PROMPT_OF_WATCHED, "max_tokens": 1900, "seed": 1}
    body |= {"ignore_eos": True}

    async def ask():
        answer = await post(urls[0], "/v1/completions", body, **{"X-Request-Id": "watched"})
        pytest.fail(f"it was over before it was looked at twice: {answer}")

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            first = await until_answering(a, "watched")
            await reload(a, versions, 2)
            await until_answering(a, "watched", num_tokens=first + 5)
            tasks.cancel_scope.cancel()
        while await a.open_requests():
            await clock.sleep(0.05)


async def test_a_cancelled_call_stops_the_engine(a):
    with anyio.move_on_after(0.3):
        await complete(a, max_new_tokens=1900)
    with anyio.fail_after(5.0):
        while 'num_requests_running{engine="0",model_name="policy"} 0.0' not in (
            await a.metrics_text(timeout_s=5.0)
        ):
            await clock.sleep(0.2)


@pytest.mark.case("T-B72")
async def test_a_hundred_requests_during_reloads_are_all_answered_and_labelled(a, versions):
    await reload(a, versions, 1)
    answers = []

    async def ask(k):
        answers.append(await complete(a, [5, 6, 10 + k % 50], max_new_tokens=40, seed=k))

    async with anyio.create_task_group() as tasks:
        for k in range(100):
            tasks.start_soon(ask, k)
            await clock.sleep(0.01)
            if k in (30, 60):
                tasks.start_soon(reload, a, versions, 2 if k == 30 else 3)
    assert len(answers) == 100
    seen = {span.policy_version for answer in answers for span in answer.version_spans}
    assert seen == {1, 2, 3}
    for answer in answers:
        order = [span.policy_version for span in answer.version_spans]
        assert order == sorted(order)
