"""The verb score, with real reward workers."""

import json
import os
import re
import tempfile
from pathlib import Path

import pytest

from config_files import write_run
from libra_supervisor.cli.main import main
from tokenizer_dirs import write_tokenizer

SUPPORT = Path(__file__).parents[2] / "support"
ROWS = [
    {"prompt": "H", "answer": "4", "tried": "the answer is 4"},
    {"prompt": "A", "answer": "5", "tried": "6"},
    {"prompt": "V", "answer": "6", "tried": ""},
]


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Run the verb over three rows; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    config = write_run(tmp_path, reward="number_match")
    write_tokenizer(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return config, data


def score(configured, capsys, *arguments):
    config, data = configured
    code = main(["score", str(config), "-o", f"train_data={data}", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_rows_are_scored_by_their_answer_and_one_prompt_is_shown_as_tokens(configured, capsys):
    code, out, _ = score(configured, capsys, "--rows", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("the first prompt, ")
    assert "'<|im_start|>'" in lines[0]
    assert [line.split("  ")[-1] for line in lines[1:3]] == ["1.000", "1.000"]
    assert lines[3] == "2 rewards: mean 1.000, min 1, max 1"


def test_a_field_of_the_rows_can_be_the_response(configured, capsys):
    code, out, _ = score(configured, capsys, "--response-field", "tried", "--json")
    assert code == 0
    report = json.loads(out)
    assert [row["reward"] for row in report["rows"]] == [1.0, 0.0, 0.0]
    assert len(report["example_tokens"]) == len(report["example_token_ids"])
    code, _, err = score(configured, capsys, "--response-field", "nothing")
    assert code == 2
    assert "no field 'nothing' (beside prompt and answer it has: tried)" in err


def test_rows_without_a_reward_say_why_and_fail_the_verb(configured, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    code, out, err = score(configured, capsys, "-o", "reward=hostile_rewards:by_name")
    assert code == 2
    assert out.count("failed: KeyError: ") == 3
    assert "3 of 3 rows got no reward" in err


def test_a_reward_that_cannot_be_loaded_is_one_message_and_nothing_stays(
    configured, capsys, tmp_path
):
    code, out, err = score(configured, capsys, "-o", "reward=no_such_module:f")
    assert (code, out) == (2, "")
    assert "importing no_such_module failed" in err
    assert err.count("\n") == 1
    assert list((tmp_path / "temporary").iterdir()) == []


UNUSABLE = [
    (("reward=hostile_rewards:nothere",), "reward: .*has no function nothere"),
    (("reward=no_such_module:x",), "reward: .*importing no_such_module failed"),
    (("reward=exact_match", "reward_args={limt: 3}"), "reward_args: .*'limt'"),
    (("workflow=multi_turn",), "workflow_args: .*'tools'"),
]


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize(("overrides", "why"), UNUSABLE)
def test_code_that_cannot_be_used_is_not_valid(configured, capsys, monkeypatch, overrides, why):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    config, data = configured
    options = [part for text in overrides for part in ("-o", text)]
    where = (str(config), "-o", f"train_data={data}")
    assert main(["validate", "--data", *where, *options]) == 2
    said = capsys.readouterr().err
    assert re.search(rf"^  (.*: )?{why}", said, re.MULTILINE), said
    assert "workflow: reward" not in said
    # Nor does it leave a run that only --resume would go on with.
    run_dir = data.parent / "run"
    assert main(["run", *where, "-o", "device=cpu", *options, "--run-dir", str(run_dir)]) == 2
    assert re.search(why, capsys.readouterr().err)
    assert not run_dir.exists()
    assert list((data.parent / "temporary").iterdir()) == []


def test_code_that_can_be_used_is_valid(configured, capsys, tmp_path):
    config, data = configured
    assert main(["validate", "--data", str(config), "-o", f"train_data={data}"]) == 0
    assert "3 rows, 0 skipped" in capsys.readouterr().out
    assert list((tmp_path / "temporary").iterdir()) == []
