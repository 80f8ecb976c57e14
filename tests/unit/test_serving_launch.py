import importlib.util
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from libra.errors import ConfigError, DataError
from libra.serving.identity import identity_from
from libra.serving.launch import PLUGIN_PATH, WARM_MODULES, prepare, wait_for_go
from libra.serving.plugin import begin_version
from weight_dirs import publish_weights


@pytest.fixture(autouse=True)
def same_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "weights").mkdir()
    return {
        "LIBRA_INSTANCE_ID": "vllm-0",
        "LIBRA_INCARNATION": "vllm-0-a",
        "LIBRA_RUN_ID": "run-1",
        "LIBRA_WEIGHTS_DIR": str(tmp_path / "weights"),
        "LIBRA_TOKEN_FILE": str(tmp_path / "token"),
    }


def test_arguments_are_passed_on_with_ours_behind(environment, tmp_path):
    arguments = prepare(["--", str(tmp_path / "base"), "--port", "1"], environment)
    assert arguments == [
        str(tmp_path / "base"),
        "--port",
        "1",
        "--middleware",
        "libra.serving.middleware.LibraMiddleware",
        "--scheduling-policy",
        "priority",
        "--worker-extension-cls",
        "libra.serving.worker.WorkerExtension",
    ]
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["VLLM_USE_RUST_FRONTEND"] == "0"
    assert environment["LIBRA_SERVED_VERSION"] == "0"


def test_the_plugin_is_offered_to_this_process_and_its_children(environment, tmp_path):
    environment |= {"PYTHONPATH": "/before", "VLLM_PLUGINS": "other"}
    prepare(["--", str(tmp_path / "base")], environment)
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(PLUGIN_PATH), "/before"]
    assert environment["VLLM_PLUGINS"] == "other,libra"
    (plugin,) = entry_points(group="vllm.general_plugins", name="libra")
    assert plugin.value == "libra.serving.plugin:register"


@pytest.mark.parametrize("arguments", [[], ["--"], ["model"]])
def test_wrong_usage_is_explained(environment, arguments):
    with pytest.raises(ConfigError, match="usage"):
        prepare(arguments, environment)


@pytest.mark.parametrize(
    "flag",
    [
        "--api-server-count=2",
        "--api_server_count",
        "-dp",
        "--headless",
        "--scheduling-policy=fcfs",
        "--worker-extension-cls=x.Y",
    ],
)
def test_arguments_that_would_break_the_ledger_are_refused_by_name(environment, flag):
    with pytest.raises(ConfigError, match="cannot be used"):
        prepare(["--", "model", flag], environment)


def test_every_missing_variable_is_named_at_once(environment):
    del environment["LIBRA_RUN_ID"], environment["LIBRA_TOKEN_FILE"]
    with pytest.raises(ConfigError, match="LIBRA_RUN_ID, LIBRA_TOKEN_FILE must be set"):
        identity_from(environment)


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_an_unusable_token_file_is_named(environment, tmp_path, content):
    (tmp_path / "token").unlink()
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match="LIBRA_TOKEN_FILE names"):
        identity_from(environment)


@pytest.mark.case("T-B67")
def test_a_published_version_is_verified_and_told(environment, tmp_path):
    directory, manifest_hash = publish_weights(tmp_path / "weights", 7)
    prepare(["--", str(directory)], environment)
    identity = identity_from(environment)
    assert (identity.served_version, identity.served_manifest_hash) == (7, manifest_hash)


def test_a_damaged_or_foreign_version_is_not_served(environment, tmp_path):
    foreign, _ = publish_weights(tmp_path / "weights", 8, run_id="run-2")
    with pytest.raises(DataError, match="published by run run-2"):
        prepare(["--", str(foreign)], environment)
    damaged, _ = publish_weights(tmp_path / "weights", 9)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"more")
    with pytest.raises(DataError, match=r"model\.safetensors"):
        prepare(["--", str(damaged)], environment)


class FakeCore:
    def __init__(self, *, is_paused=True):
        self._is_paused = is_paused
        self.scheduler = type("Scheduler", (), {"requests": {}})()

    def is_scheduler_paused(self):
        return self._is_paused


class NewerCore(FakeCore):
    label = None

    def set_weight_version(self, label):
        self.label = label


def test_the_engine_counts_its_unfinished_requests():
    core = FakeCore()
    for name, num_tokens in (("r", 3), ("0_s", 0)):
        core.scheduler.requests[name] = type("R", (), {"num_output_tokens": num_tokens})()
    assert begin_version(core, 5) == {"r": 3, "0_s": 0}
    newer = NewerCore()
    assert begin_version(newer, 6) == {}
    assert newer.label == "6"


def test_a_version_begins_only_in_a_paused_engine():
    with pytest.raises(RuntimeError, match="paused"):
        begin_version(FakeCore(is_paused=False), 5)


def test_a_server_without_devices_says_that_it_waits_and_goes_on_when_it_is_told(tmp_path):
    go_file, seen = tmp_path / "vllm-0-a", []

    def sleep(_seconds):
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        if len(seen) == 3:
            go_file.touch()

    wait_for_go(go_file, sleep=sleep)
    assert seen == [["vllm-0-a.waiting"]] * 3
    assert list(tmp_path.iterdir()) == []


def test_what_is_imported_ahead_is_there():
    [package] = importlib.util.find_spec("vllm").submodule_search_locations
    for name in WARM_MODULES:
        path = Path(package, *name.split(".")[1:])
        assert path.with_suffix(".py").exists() or path.is_dir(), name
