"""What a user gets wrong first: one clear message, the right exit code, nothing left running."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


def run(tmp_path, quickstart, *arguments, environ=None):
    command = [
        *(sys.executable, "-m", "libra_supervisor.cli", "run"),
        *(str(ROOT / "configs/quickstart.yaml"), "--run-dir", str(tmp_path / "run")),
        *("-o", f"model_path={quickstart / 'model'}"),
        *("-o", f"train_data={quickstart / 'train.jsonl'}"),
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=90, env=environ, check=False
    )
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "run" / "logs").glob("vllm-*.log")), "a server was started"
    return done


def test_a_missing_model_names_the_key_and_the_path(tmp_path, quickstart):
    done = run(tmp_path, quickstart, "-o", "model_path=/no/such/model")
    assert done.returncode == 2
    assert "model_path" in done.stderr
    assert "/no/such/model" in done.stderr


@pytest.mark.parametrize("mode", [(), ("--dry-run",)])
def test_a_workflow_that_cannot_be_loaded_leaves_no_run_behind(tmp_path, quickstart, mode):
    done = run(tmp_path, quickstart, "-o", "workflow=no_such_module_:f", *mode)
    assert done.returncode == 2
    assert "importing no_such_module_ failed" in done.stderr
    assert not (tmp_path / "run").exists()


def test_wrong_keys_and_values_are_all_reported_at_once(tmp_path, quickstart):
    config = tmp_path / "wrong.yaml"
    config.write_text(
        f"base_config: {ROOT / 'configs/quickstart.yaml'}\n"
        "learing_rate: 1e-6\n"
        "batch_size: 63\n"
        "min_rollout_gpus: 1\n"
        "train_tp_size: three\n"
    )
    command = [sys.executable, "-m", "libra_supervisor.cli", "run", str(config)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    for part in (
        "wrong.yaml:2",
        "learning_rate",
        "wrong.yaml:4",
        "global_resource_planner.min_rollout_gpus",
        "wrong.yaml:5",
    ):
        assert part in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.case("T-B39")
def test_a_broken_line_in_the_data_is_named_with_file_line_and_column(tmp_path, quickstart):
    data = tmp_path / "broken.jsonl"
    good = json.dumps({"prompt": "digits", "answer": "digits"})
    data.write_text(f'{good}\n{good}\n{{"prompt": \n')
    done = run(tmp_path, quickstart, "-o", f"train_data={data}")
    assert done.returncode == 2
    assert f"{data}:3:" in done.stderr


def test_a_port_in_use_is_named_with_its_key_and_what_to_do(tmp_path, quickstart):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tmp_path, quickstart, "-o", f"rollout_port_base={port}")
    assert done.returncode == 5
    assert f"rollout_port_base: 127.0.0.1:{port} is in use" in done.stderr


def test_too_little_memory_is_found_before_anything_starts(tmp_path, quickstart):
    done = run(tmp_path, quickstart, "-o", f"rollout_kv_cache_bytes={2**42}")
    assert done.returncode == 5
    assert "memory" in done.stderr
    assert "rollout_kv_cache_bytes" in done.stderr


def test_a_run_directory_that_holds_a_run_needs_resume(tmp_path, quickstart):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.resolved.json").write_text("{}")
    done = run(tmp_path, quickstart)
    assert done.returncode == 2
    assert "--resume" in done.stderr


def test_a_plan_that_keeps_no_minimum_has_its_own_exit_code(tmp_path, quickstart):
    done = run(tmp_path, quickstart, "-o", "global_resource_planner.min_rollout_gpus=3")
    assert done.returncode in (2, 3)
    assert "min_rollout_gpus" in done.stderr


def test_a_dry_run_checks_everything_and_starts_nothing(tmp_path, quickstart):
    done = run(tmp_path, quickstart, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "train 2 GPUs" in done.stdout
    assert not (tmp_path / "run").exists()
