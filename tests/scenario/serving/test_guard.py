"""Who may call what, and what a guarded reload refuses, does and reports."""

import json
import sys
import time

import anyio
import msgspec
import numpy as np
import pytest

from fake_engine import probe_logprobs
from guarded_app import TOKEN
from libra import clock
from libra.serving import reload as serving_reload
from libra.serving.launch import prepare
from libra.serving.middleware import MAX_RELOAD_BYTES, WEIGHT_ROUTES, LibraMiddleware
from libra.storage import manifests
from libra.storage.arrival import VISIBLE_WITHIN_S
from libra.storage.manifests import read_manifest, verify_weights
from libra.storage.receipt import stamps_of
from libra.weights.judge import ack_problems, judge_acks
from libra.weights.manifest import MANIFEST_NAME
from libra.wire.instance import WeightsReceipt
from weight_dirs import describe_version, publish_weights, tiny_tensors

pytestmark = pytest.mark.anyio

DEVELOPMENT_ROUTES = [
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/abort_requests"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/update_weight_version"),
    ("POST", "/init_weight_transfer_engine"),
    ("GET", "/server_info"),
    ("GET", "/is_sleeping"),
    ("POST", "/invocations"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/v1/responses"),
    ("GET", "/openapi.json"),
    ("POST", "/no/such/route"),
    *(("POST", route) for route in sorted(WEIGHT_ROUTES)),
]


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


@pytest.mark.parametrize(("method", "path"), DEVELOPMENT_ROUTES)
async def test_what_is_not_open_needs_the_token(app, method, path):
    for token in (None, "wrong", TOKEN + "x", TOKEN[:-1], ""):
        answer = await app.call(method, path, token=token)
        assert answer.status == 401
        assert answer.headers["x-libra-instance"] == "vllm-0"
    assert app.inner.seen == []
    assert (await app.call(method, path, token=TOKEN)).status == 200
    assert app.inner.seen == [(method, path)]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/tokenize")],
)
async def test_what_everybody_needs_is_open(app, method, path):
    assert (await app.call(method, path)).status == 200


async def test_a_path_that_only_looks_open_is_not(app):
    for path in ("/health/", "//pause", "/v1/completions/render", "/metrics/../pause", "/HEALTH"):
        assert (await app.call("GET", path)).status == 401


async def test_reload_needs_the_token_and_a_request_of_the_right_shape(app, running):
    body = msgspec.json.encode(app.request_for(1))
    async with running():
        assert (await app.call("POST", "/libra/reload", body=body)).status == 401
        for bad in (b"", b"{", b"[]", b"\xff", body[:-1]):
            answer = await app.call("POST", "/libra/reload", body=bad, token=TOKEN)
            assert answer.status == 400
        too_long = [b" " * 2**19] * (MAX_RELOAD_BYTES // 2**19 + 1)
        answer = await app.call("POST", "/libra/reload", chunks=too_long, token=TOKEN)
        assert answer.status == 400
        assert "longer than" in answer.json["error"]["message"]
    assert app.engine.calls == []


@pytest.mark.case("R-B87")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "run-2"}, "of run run-2; this server is of run-1"),
        ({"manifest_hash": "0" * 32}, "manifest hash"),
        ({"policy_version": 3}, "policy version is 2 instead of 3"),
        ({"probe_token_ids": (1,)}, "at least 2 tokens"),
        ({"probe_token_ids": (1,) * 64}, "a probe of 64 tokens; 63 leave room"),
        ({"probe_token_ids": (1, 100)}, "token 100 in a probe; there are 100"),
        ({"probe_token_ids": (1, -1)}, "token -1 in a probe"),
        ({"weights_directory": "/"}, "not a version under"),
        ({"weights_directory": "/etc"}, "not a version under"),
        ({"weights_directory": "WEIGHTS"}, "not a version under"),
        ({"weights_directory": "WEIGHTS/../base"}, "not a version under"),
        ({"weights_directory": "WEIGHTS/v000009"}, "not complete"),
        ({"weights_directory": "WEIGHTS/link"}, "not a version under"),
        ({"weights_directory": "WEIGHTS/loop"}, "not a version under"),
        ({"weights_directory": "WEIGHTS/v\0"}, "not a version under"),
    ],
)
async def test_a_request_that_must_not_be_served_changes_nothing(app, running, changes, message):
    (app.weights_directory / "link").symlink_to(app.weights_directory.parent / "base")
    (app.weights_directory / "loop").symlink_to(app.weights_directory / "loop")
    app.engine.step_s = 5.0  # what is not there is waited for, and a step costs real time
    if "weights_directory" in changes:
        path = changes["weights_directory"].replace("WEIGHTS", str(app.weights_directory))
        changes = changes | {"weights_directory": path}
    async with running():
        ack = await app.reload(2, **changes)
        assert message in ack.error
        assert ack.policy_version == 0
        assert (await app.state())["policy_version"] == 0
        answer = await app.complete()
    assert app.engine.calls == []
    assert answer.json["choices"][0]["libra_version_spans"] == [[0, 0, 20]]


@pytest.mark.parametrize("with_receipt", [False, True])
async def test_a_link_in_a_version_to_a_file_outside_is_refused(
    app, running, receipt_of, with_receipt
):
    directory, _ = app.published[2]
    outside = app.weights_directory.parent / "outside.safetensors"
    (directory / "model.safetensors").rename(outside)
    (directory / "model.safetensors").symlink_to(outside)
    receipt = WeightsReceipt(
        receipt_of(app.published[1][0]).kernel, stamps_of(directory, ["model.safetensors"])
    )
    async with running():
        ack = await app.reload(2, receipt=receipt if with_receipt else None)
        assert "model.safetensors is a link" in ack.error
        assert (await app.complete()).status == 200
    assert app.engine.calls == []


async def test_a_version_of_another_run_is_refused(app, running):
    app.published[4] = publish_weights(app.weights_directory, 4, run_id="run-2")
    async with running():
        assert "the run id is 'run-2' instead of 'run-1'" in (await app.reload(4)).error
        assert (await app.complete()).status == 200
    assert app.engine.calls == []


async def test_an_older_version_is_refused_unless_forced(app, running):
    async with running():
        await app.reload(2)
        for version in (1, 2):
            assert "not newer than the loaded v2" in (await app.reload(version)).error
        assert (await app.reload(1, force=True)).error is None
        assert (await app.state())["policy_version"] == 1


def without(name):
    return lambda tensors: tensors.pop(name)


def reshaped(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].reshape(4, 16)


def odd_dtype(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float16)


def stray(tensors):
    tensors["model.extra.weight"] = np.zeros(3, np.float32)


def with_nan(tensors):
    tensors["lm_head.weight"][0, 0] = np.nan


@pytest.mark.case("T-B68")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("lm_head.weight"), "lm_head.weight is missing"),
        (reshaped, "shape [4, 16] instead of [16, 4]"),
        (odd_dtype, "dtype F32 became F16 and F32"),
        (stray, "model.extra.weight is not in the model"),
        (with_nan, "NaN or Inf in lm_head.weight"),
    ],
)
async def test_weights_that_do_not_fit_are_refused_before_the_pause(app, running, damage, message):
    tensors = tiny_tensors(4)
    damage(tensors)
    app.published[4] = publish_weights(app.weights_directory, 4, tensors=tensors)
    async with running():
        ack = await app.reload(4)
        assert message in ack.error
        assert ack.verified == ("manifest",)
        assert (await app.state())["policy_version"] == 0
        assert (await app.complete()).status == 200
    assert app.engine.calls == []


@pytest.fixture
def receipt_of(monkeypatch):
    """The receipt of a directory's files, checked when they had been there for a second."""
    monkeypatch.setattr(clock, "wall_ns", lambda: time.time_ns() + 10**9)
    return lambda directory: verify_weights(directory, read_manifest(directory)[0])


async def test_with_a_receipt_that_holds_the_files_are_not_read_again(
    app, running, receipt_of, monkeypatch
):
    receipt = receipt_of(app.published[2][0])
    monkeypatch.setattr(serving_reload, "verify_and_stamp", None)
    async with running():
        request = app.request_for(2, receipt=receipt)
        ack = await app.reload(2, receipt=receipt)
    assert ack.error is None
    assert ack.verified == ("manifest", "receipt", "load", "probe")
    assert ack_problems(request, ack) == ()
    assert ack_problems(app.request_for(2), ack) != ()


@pytest.mark.case("T-B68")
async def test_a_receipt_does_not_cover_what_was_written_after_it(app, running, receipt_of):
    directory = app.published[2][0]
    receipt = receipt_of(directory)
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    async with running():
        await app.reload(1)
        ack = await app.reload(2, receipt=receipt)
        state = await app.state()
    assert "hashes to" in ack.error
    assert ack.verified == ("manifest",)
    assert state["policy_version"] == 1


@pytest.mark.case("T-B68")
async def test_a_receipt_does_not_spare_the_tensors_their_fit(app, running, receipt_of):
    tensors = tiny_tensors(4)
    del tensors["lm_head.weight"]
    app.published[4] = publish_weights(app.weights_directory, 4, tensors=tensors)
    async with running():
        ack = await app.reload(4, receipt=receipt_of(app.published[4][0]))
    assert "lm_head.weight is missing" in ack.error
    assert app.engine.calls == []


@pytest.mark.parametrize("are_settled", [True, False], ids=["settled", "from a clock ahead"])
async def test_weights_changed_while_the_engine_loads_them_are_not_served(
    app, running, receipt_of, monkeypatch, are_settled
):
    directory = app.published[2][0]
    receipt = receipt_of(directory) if are_settled else None
    monkeypatch.setattr(manifests, "are_settled", lambda _: are_settled)
    path = directory / "model.safetensors"
    load = app.engine.collective_rpc

    async def load_and_disturb(method, **how):
        await load(method, **how)
        path.write_bytes(path.read_bytes())

    app.engine.collective_rpc = load_and_disturb
    async with running():
        ack = await app.reload(2, receipt=receipt)
        answer = await app.complete()
    assert "was changed while it was loaded" in ack.error
    assert ack.policy_version is None
    assert answer.status == 503


@pytest.fixture
def started_on(app, monkeypatch):
    """The directory of v2, on which the server was started."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    directory, _ = app.published[2]
    environment = dict(app.environment)
    prepare(["--", str(directory)], environment)
    for name in environment.keys() - app.environment.keys():
        monkeypatch.setenv(name, environment[name])
    app.middleware = LibraMiddleware(app.inner, guard=app._guard)
    return directory


@pytest.mark.case("R-B82")
async def test_a_server_that_was_started_on_a_version_serves_it(app, running, started_on):
    assert started_on.name == "v000002"
    async with running():
        state = await app.call("GET", "/libra/state")
        answer = await app.complete()
    assert state.json["policy_version"] == 2
    assert answer.status == 200


@pytest.mark.parametrize("change", ["other bytes", "gone", "another manifest"])
async def test_weights_changed_while_a_server_starts_on_them_are_not_served(
    app, running, started_on, change
):
    directory = started_on
    if change == "gone":
        (directory / "model.safetensors").unlink()
    elif change == "other bytes":
        (app.published[3][0] / "model.safetensors").replace(directory / "model.safetensors")
    else:
        (app.published[3][0] / "manifest.json").replace(directory / "manifest.json")
    async with running():
        state = await app.call("GET", "/libra/state")
        answer = await app.complete()
        ack = await app.reload(1, force=True)
        cured = await app.complete()
    assert state.json["policy_version"] is None
    assert answer.status == 503
    assert str(directory).encode() in answer.body
    assert (ack.error, cured.status) == (None, 200)


@pytest.mark.case("R-B79")
async def test_a_version_of_an_earlier_attempt_is_not_taken_for_the_announced_one(app, running):
    """Another host may see the directory that stood there before for a while."""
    app.engine.step_s = 0.2
    directory, _ = app.published[2]
    stood_before = directory.with_name("stood_before")
    directory.rename(stood_before)
    app.published[2] = publish_weights(app.weights_directory, 2, tensors=tiny_tensors(9))
    request = app.request_for(2)
    to_come = directory.with_name("to_come")
    directory.rename(to_come)
    stood_before.rename(directory)

    async def come():
        await clock.sleep(VISIBLE_WITHIN_S / 2)
        assert app.engine.calls == []
        directory.rename(stood_before)
        to_come.rename(directory)

    async with running(), anyio.create_task_group() as tasks:
        tasks.start_soon(come)
        ack = await app.reload(2)
        state = await app.state()
    assert ack.error is None
    assert state["manifest_hash"] == request.manifest_hash


@pytest.mark.case("T-B68")
async def test_damaged_files_are_refused_before_the_pause(app, running):
    app.engine.step_s = 5.0  # what is short is waited for, and a step costs real time
    path = app.published[1][0] / "model.safetensors"
    content = path.read_bytes()
    async with running():
        for damaged in (content[:-1], b"", content[:-1] + bytes([content[-1] ^ 1])):
            path.write_bytes(damaged)
            ack = await app.reload(1)
            assert "model.safetensors" in ack.error
            assert ack.policy_version == 0
        path.unlink()
        assert "missing" in (await app.reload(1)).error
    assert app.engine.calls == []


async def test_one_dtype_may_replace_the_base_models_but_not_a_published_one(app, running):
    halves = {name: tensor.astype(np.float16) for name, tensor in tiny_tensors(1).items()}
    app.published[4] = publish_weights(app.weights_directory, 4, tensors=halves)
    async with running():
        assert (await app.reload(4)).error is None
        app.published[5] = publish_weights(app.weights_directory, 5)
        assert "dtype F16 became F32" in (await app.reload(5)).error


async def test_tied_embeddings_must_be_what_the_model_has(app, running):
    directory, _ = app.published[1]
    app.published[1] = (
        directory,
        describe_version(directory, 1, run_id="run-1", tied_embeddings=True),
    )
    async with running():
        assert "tied embeddings is True instead of False" in (await app.reload(1)).error


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


async def test_websockets_need_the_token(app):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await app(scope, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_state_is_small_and_needs_no_token(app, running):
    async with running():
        answer = await app.call("GET", "/libra/state")
    assert json.loads(answer.body) == {
        "instance_id": "vllm-0",
        "incarnation": "vllm-0-a",
        "run_id": "run-1",
        "policy_version": 0,
        "is_paused": False,
        "manifest_hash": None,
        "is_asleep": False,
    }


@pytest.mark.case("R-B79")
@pytest.mark.parametrize("shown_first", ["nothing", "the manifest", "a short file"])
async def test_a_version_that_the_disk_shows_late_is_waited_for_and_then_verified(
    app, running, shown_first
):
    directory, _ = app.published[1]
    weights, manifest = directory / "model.safetensors", directory / MANIFEST_NAME
    content, described = weights.read_bytes(), manifest.read_bytes()
    weights.unlink()
    if shown_first == "nothing":
        manifest.unlink()
    elif shown_first == "a short file":
        weights.write_bytes(content[:100])
    app.engine.step_s = 1.0
    acks = []
    async with running() as tasks:

        async def reload():
            acks.append(await app.reload(1))

        tasks.start_soon(reload)
        await clock.sleep(5.0)
        # Nothing was paused and the old version goes on.
        assert (acks, app.engine.calls) == ([], [])
        assert (await app.complete(max_tokens=3)).headers["x-libra-policy-versions"] == "0"
        manifest.write_bytes(described)
        weights.write_bytes(content)
        while not acks:
            await clock.sleep(0.5)
    assert ack_problems(app.request_for(1), acks[0]) == ()


@pytest.mark.case("R-B79")
async def test_what_the_disk_never_shows_is_refused_after_a_bounded_wait(app, running):
    (app.published[1][0] / "model.safetensors").unlink()
    app.engine.step_s = 5.0
    async with running():
        began = clock.now()
        ack = await app.reload(1)
        assert VISIBLE_WITHIN_S <= clock.now() - began <= VISIBLE_WITHIN_S + 5.0
        assert "model.safetensors is missing" in ack.error
        assert (ack.policy_version, ack.verified) == (0, ("manifest",))
    assert app.engine.calls == []


@pytest.mark.case("R-B79")
async def test_a_file_of_the_right_size_with_other_content_is_refused_at_once(app, running):
    path = app.published[1][0] / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-8] + bytes(8))
    async with running():
        began = clock.now()
        assert "hashes to" in (await app.reload(1)).error
        assert clock.now() - began < 5.0
