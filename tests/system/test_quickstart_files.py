"""What the scripts write is what the library reads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from libra.data.dataset import PromptDataset, PromptRules
from libra.data.formats import open_source
from libra.data.task import PromptFields
from libra.data.tokenizer import PromptTokenizer
from libra.rewards.character_class import CLASSES

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPTS / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "quickstart"
    done = run("make_quickstart.py", out)
    assert done.returncode == 0, done.stderr
    return out


def tree(directory):
    return {p: p.stat().st_mtime_ns for p in directory.rglob("*")}


@pytest.mark.system
@pytest.mark.timeout(180)
def test_the_quickstarts_prompts_name_their_class_in_one_token(quickstart):
    tokenizer = PromptTokenizer(quickstart / "model")
    for name in ("train.jsonl", "eval.jsonl"):
        rows = PromptDataset(
            open_source(quickstart / name),
            tokenizer,
            fields=PromptFields(),
            rules=PromptRules(max_prompt_tokens=56),
        )
        for row in rows.rows:
            task = rows.task(int(row))
            assert task.answer in CLASSES
            (class_id,) = tokenizer.encode_fragment(task.answer)
            assert class_id in task.prompt_token_ids
    assert tokenizer.decode(tokenizer.encode_fragment("aZ 9~\n")) == "aZ 9~\n"


@pytest.mark.system
@pytest.mark.timeout(180)
def test_the_quickstarts_evaluation_asks_in_words_that_training_does_not(quickstart):
    train, evaluation = (
        {json.loads(line)["prompt"] for line in (quickstart / name).read_text().splitlines()}
        for name in ("train.jsonl", "eval.jsonl")
    )
    assert train
    assert evaluation
    assert not train & evaluation


@pytest.mark.system
@pytest.mark.timeout(180)
def test_a_second_call_changes_nothing_and_another_seed_makes_another_model(quickstart):
    before = tree(quickstart)
    assert "is there already" in run("make_quickstart.py", quickstart).stdout
    assert tree(quickstart) == before
    weights = (quickstart / "model" / "model.safetensors").read_bytes()
    other = quickstart.parent / "other"
    assert run("make_quickstart.py", other, "--seed", "1").returncode == 0
    assert (other / "model" / "model.safetensors").read_bytes() != weights
    # A directory that was damaged, or made by another recipe, is made again.
    (other / "train.jsonl").write_text("")
    assert "wrote" in run("make_quickstart.py", other).stdout
    assert (other / "model" / "model.safetensors").read_bytes() == weights
    assert [p.name for p in quickstart.parent.iterdir() if p.name.startswith(".")] == []


@pytest.mark.system
@pytest.mark.timeout(60)
def test_a_directory_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    done = run("make_quickstart.py", tmp_path)
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.system
@pytest.mark.timeout(60)
def test_arithmetic_questions_are_right_and_the_same_for_the_same_seed(tmp_path):
    out = tmp_path / "new" / "a.jsonl"
    assert run("make_arithmetic.py", out, "--rows", 200, "--seed", 3).returncode == 0
    first = out.read_bytes()
    assert run("make_arithmetic.py", out, "--rows", 200, "--seed", 3).returncode == 0
    assert out.read_bytes() == first
    assert run("make_arithmetic.py", out, "--rows", 200, "--seed", 4).returncode == 0
    assert out.read_bytes() != first
    rows = [json.loads(line) for line in first.splitlines()]
    assert len(rows) == 200
    for row in rows:
        numbers = [int(w.strip("?.")) for w in row["prompt"].split() if w.strip("?.").isdigit()]
        low, high = sorted(numbers)
        expected = {"+": high + low, "-": high - low, "*": high * low}[row["operation"]]
        assert row["answer"] == str(expected)
