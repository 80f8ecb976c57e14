import json
from pathlib import Path

import pytest

from libra_supervisor.cli.main import main

CONFIG = str(Path(__file__).resolve().parents[3] / "configs" / "qwen3_14b_48gpu.yaml")
SMALL = ["-o", "batch_size=96", "-o", "mini_batch_size=96", "-o", "max_concurrent_rollouts=192"]


def test_simulate_prints_rates_steps_and_the_estimate(capsys):
    assert main(["simulate", CONFIG, *SMALL, "--steps", "3"]) == 0
    text = capsys.readouterr().out
    assert "response tokens/s per GPU" in text
    assert "the planner expected a step of" in text


def test_simulate_writes_json_for_programs(capsys):
    assert main(["simulate", CONFIG, *SMALL, "--steps", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in result["steps"]] == [1, 2, 3]


def test_a_trace_gives_the_lengths(capsys, tmp_path):
    trace = tmp_path / "lengths.jsonl"
    trace.write_text('{"prompt_tokens": 50, "response_tokens": [700]}\n')
    arguments = ["simulate", CONFIG, *SMALL, "--steps", "2", "--json", "--trace", str(trace)]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert {step["num_response_tokens"] for step in result["steps"]} == {96 * 700}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "/nowhere/lengths.jsonl"], "/nowhere/lengths.jsonl: cannot be read"),
        (["--steps", "1"], "at least 2 steps"),
        (["--growth", "-2"], "must be above -1"),
    ],
)
def test_what_cannot_be_simulated_is_refused_as_configuration(capsys, arguments, said):
    assert main(["simulate", CONFIG, *SMALL, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_comparison_names_every_scenario(capsys):
    assert main(["simulate", CONFIG, *SMALL, "--steps", "2", "--compare"]) == 0
    text = capsys.readouterr().out
    for scenario in ("colocated", "static 24+24, TP1", "planned", "mixed TP, lengths known"):
        assert scenario in text


def test_a_drift_file_is_run_on_plans_that_stay_and_one_that_follows(capsys, tmp_path):
    drift = tmp_path / "drift.jsonl"
    phase = {"prompt_tokens": 256, "response_mean_tokens": 4000, "response_sigma": 0.8}
    lines = [phase | {"from_step": 0}, phase | {"from_step": 3, "response_mean_tokens": 500}]
    drift.write_text("\n".join(json.dumps(line) for line in lines))
    arguments = ["simulate", CONFIG, *SMALL, "--steps", "6", "--drift", str(drift)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for shown in ("static", "planned at start", "elastic", "best kept", "regret of elastic"):
        assert shown in text
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_changes"] == 1
    assert found["regret_fraction"] == found["elastic"]["total_s"] / found["best"]["total_s"] - 1


def test_a_drift_file_that_is_not_there_is_refused(capsys):
    assert main(["simulate", CONFIG, *SMALL, "--drift", "/nowhere/drift.jsonl"]) == 2
    assert "/nowhere/drift.jsonl: cannot be read" in capsys.readouterr().err
