import json
from argparse import Namespace
from pathlib import Path

import pytest

from config_files import write_run
from libra.config.load import load_config
from libra.errors import ConfigError, DataError
from libra.planner.calibration import Observation
from libra_supervisor.cli.inspection import plan
from libra_supervisor.cli.main import main
from libra_supervisor.records.calibration import CalibrationStore, empty_book
from libra_supervisor.records.reader import observed_lengths
from libra_supervisor.run_directory import RunDirectory

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qwen3_14b_48gpu.yaml"


def planned(capsys, directory, *, lengths_of=None):
    overrides = (f"global_resource_planner.calibration_dir={directory}",)
    options = Namespace(config=CONFIG, overrides=overrides, as_json=False, lengths_of=lengths_of)
    assert plan(options) == 0
    return capsys.readouterr().out


def test_plan_uses_and_shows_what_was_measured(tmp_path, capsys):
    unknown = planned(capsys, tmp_path)
    assert "calibration: none" in unknown
    book = empty_book(load_config(CONFIG, (), {}, purpose="plan").config)
    quick = Observation(operation="grpo_update", predicted=10.0, measured=2.5)
    CalibrationStore(tmp_path).add(book, [quick])
    known = planned(capsys, tmp_path)
    assert "calibration of Qwen3ForCausalLM-40x5120-" in known
    assert "grpo_update: x0.25 from 1 measurements, last prediction off by -75%" in known
    # Training four times as quick needs fewer of the GPUs.
    assert train_gpus(known) < train_gpus(unknown)


def train_gpus(text):
    return int(text.partition("train ")[2].partition(" GPUs")[0])


def test_plan_for_the_lengths_that_a_run_had(tmp_path, capsys):
    (tmp_path / "trajectories").mkdir()
    line = json.dumps({"num_response_tokens": 500, "token_ids": [0] * 600})
    (tmp_path / "trajectories/step_000001.jsonl").write_text(f"{line}\n" * 5)
    shown = planned(capsys, tmp_path, lengths_of=tmp_path)
    assert "demand: observed: 5 trajectories" in shown
    short = planned(capsys, tmp_path)
    assert step_s(shown) < step_s(short)


def test_a_directory_without_trajectories_is_named(tmp_path):
    with pytest.raises(DataError, match="no trajectories yet"):
        observed_lengths(RunDirectory(tmp_path))


def test_the_newest_trajectories_come_first_and_prompts_are_what_was_not_sampled(tmp_path):
    (tmp_path / "trajectories").mkdir()
    for step, sampled in ((1, 9), (2, 5)):
        line = json.dumps({"num_response_tokens": sampled, "token_ids": [0] * (3 + sampled)})
        (tmp_path / f"trajectories/step_{step:06d}.jsonl").write_text(f"{line}\n")
    assert observed_lengths(RunDirectory(tmp_path)) == ((3, 5), (3, 9))


@pytest.mark.parametrize(
    "line",
    [
        b'{"num_response_tokens": 2, "token_ids": [1, 2,',
        b"",
        b"\xff",
        b'{"x": 1}',
        b'{"num_response_tokens": -1, "token_ids": [1]}',
        b'{"num_response_tokens": 2, "token_ids": [1]}',
    ],
)
def test_a_line_that_is_no_trajectory_is_named_by_file_and_number(tmp_path, line):
    (tmp_path / "trajectories").mkdir()
    whole = b'{"num_response_tokens": 1, "token_ids": [1, 2]}\n'
    (tmp_path / "trajectories/step_000001.jsonl").write_bytes(whole + line + b"\n")
    with pytest.raises(DataError, match=r"step_000001.jsonl:2: not a trajectory"):
        observed_lengths(RunDirectory(tmp_path))


def step_s(text):
    return float(text.partition("step ")[2].partition(" s")[0])


OVER_NODES = (
    *("nodes=[{host: 192.0.2.1}, {host: 192.0.2.2}]", "train_gpus=2", "rollout_gpus=4"),
    "heterogeneous_rollout.instances=[{tp: 1, count: 4}]",
)


def test_plan_says_what_lies_on_which_node(tmp_path, capsys):
    overrides = [part for it in OVER_NODES for part in ("-o", it)]
    assert main(["plan", str(write_run(tmp_path)), *overrides]) == 0
    shown = capsys.readouterr().out
    assert "node 0: vllm-0 on 0; vllm-1 on 1; vllm-2 on 2\n" in shown
    assert "node 1: 2 ranks on slots 1, 2; vllm-3 on 0\n" in shown
    assert main(["plan", str(write_run(tmp_path / "alone"))]) == 0
    assert "node" not in capsys.readouterr().out


def test_a_dry_run_of_a_follower_joins_nobody(tmp_path, capsys):
    overrides = [part for it in OVER_NODES for part in ("-o", it)]
    argv = ["run", str(write_run(tmp_path)), *overrides, "--run-dir", str(tmp_path / "run")]
    (tmp_path / "token").write_text("a-token-of-the-nodes")
    (tmp_path / "token").chmod(0o600)
    argv += ["-o", f"node_token_file={tmp_path / 'token'}", "--dry-run", "--node-rank", "1"]
    assert main(argv) == ConfigError.exit_code
    assert "run it on node 0 (192.0.2.1)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
