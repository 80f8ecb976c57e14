"""Which weights a guarded server takes: what it checks before, while and after it loads."""

import sys
import time

import anyio
import numpy as np
import pytest

from libra import clock
from libra.serving import reload as serving_reload
from libra.serving.launch import prepare
from libra.serving.middleware import LibraMiddleware
from libra.storage import manifests
from libra.storage.arrival import VISIBLE_WITHIN_S
from libra.storage.manifests import read_manifest, verify_weights
from libra.storage.receipt import stamps_of
from libra.weights.judge import ack_problems
from libra.weights.manifest import MANIFEST_NAME
from libra.wire.instance import WeightsReceipt
from weight_dirs import describe_version, publish_weights, tiny_tensors

pytestmark = pytest.mark.anyio


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
