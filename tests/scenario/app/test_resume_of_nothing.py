"""--resume where there is nothing to resume, as units that always pass it do at first."""

import json

import pytest

from config_files import write_run
from libra_supervisor.cli.main import main
from tokenizer_dirs import write_tokenizer


@pytest.fixture
def resumed(tmp_path, capsys):
    """Resume in a directory, without starting anything; returns the lines of stderr."""
    config = write_run(tmp_path, "importance_floor: 0.1", device="cpu")
    write_tokenizer(tmp_path / "model")
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "H", "answer": "4"}) + "\n")

    def resume(*arguments, exit_code=0):
        assert main(["run", str(config), "--dry-run", *arguments]) == exit_code
        return capsys.readouterr().err.splitlines()

    return resume


@pytest.mark.parametrize("is_there", [True, False])
def test_the_first_line_says_that_a_new_run_begins(resumed, tmp_path, is_there):
    run_dir = tmp_path / "mistyped"
    if is_there:
        run_dir.mkdir()
    first, *others = resumed("--run-dir", str(run_dir), "--resume")
    assert f"--resume: {run_dir} holds no run; A NEW RUN BEGINS there at step 1" in first
    assert any("importance_floor" in line for line in others)
    assert not any("NEW RUN" in line for line in resumed("--run-dir", str(run_dir)))


def test_it_is_not_said_of_a_run_that_is_there(resumed, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.resolved.json").write_text("{}")
    lines = resumed("--run-dir", str(run_dir), "--resume", exit_code=2)
    assert not any("NEW RUN" in line for line in lines)
