"""examples/search: its configuration, its data, its tool and its reward fit each other."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import trio.testing

from libra.config.load import load_config
from libra.data.task import Task
from libra.data.tokenizer import PromptTokenizer
from libra.ids import PromptId
from libra.rewards.case import RewardCase
from libra.rollouts.trajectory import alignment_error
from libra.workflows.loading import load_workflow
from libra_supervisor.validate.names import shipped_names
from scripted_engine import ScriptedClient
from tokenizer_dirs import write_tokenizer

pytestmark = pytest.mark.anyio
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "search"
ROWS = [
    json.loads(line)
    for name in ("train.jsonl", "eval.jsonl")
    for line in (EXAMPLE / name).read_text(encoding="utf-8").splitlines()
]


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0.05)}


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return import_module("local_search")


@pytest.fixture
def config():
    return load_config(EXAMPLE / "search.yaml", purpose="plan", shipped=shipped_names()).config


def case(text, answer, *, num_turns=2):
    return RewardCase(
        prompt_id="row-0",
        prompt_text="",
        response_text=text,
        answer=answer,
        extras={},
        finish_reason="stop",
        num_response_tokens=1,
        num_turns=num_turns,
    )


def test_every_question_can_be_answered_by_at_most_two_searches(example):
    assert len({row["prompt"] for row in ROWS}) == 60
    for row in ROWS:
        found = example.search(row["prompt"])
        if mayor := re.search(r"whose mayor is (.*)\?", row["prompt"]):
            (town,) = re.findall(rf"{mayor[1]} has been mayor of (.*?) since", found)
            found = example.search(town)
        assert row["answer"] in found, row


@pytest.mark.parametrize("query", ["", '"', "AND OR NOT (", "NEAR(a b)", "* ^ : -", "\0"])
def test_no_query_breaks_the_tool(example, query):
    assert isinstance(example.search(query), str)


def test_the_reward_wants_the_answer_in_few_turns(example):
    assert example.answered(case("It is on the wend.", "Wend")) == 1.0
    assert example.answered(case("It is on the Quill.", "Wend")) == 0.0
    assert example.answered(case("Wend", "Wend", num_turns=4)) == 0.9


async def test_a_search_in_the_middle_is_one_trajectory_and_not_trained(example, config, tmp_path):
    tokenizer = PromptTokenizer(write_tokenizer(tmp_path))
    workflow = load_workflow(config.data.workflow, config.data.workflow_args)
    messages = ({"role": "user", "content": ROWS[0]["prompt"]},)
    task = Task(
        prompt_id=PromptId("row-0"),
        prompt_token_ids=tuple(tokenizer.encode_chat(messages)),
        messages=messages,
        prompt_text=ROWS[0]["prompt"],
        answer=ROWS[0]["answer"],
        extras={},
    )
    wanted = {"name": "search", "arguments": {"query": ROWS[0]["prompt"]}}
    turns = [f"<tool_call>{json.dumps(wanted)}</tool_call>", f"It is {ROWS[0]['answer']}."]
    script = [[*tokenizer.encode_fragment(t), tokenizer.eos_token_id] for t in turns]
    client = ScriptedClient(tokenizer, script)
    trajectory = await workflow(task, client)
    assert example.search(ROWS[0]["prompt"]).splitlines()[0] in tokenizer.decode(client.prompts[1])
    assert alignment_error(trajectory) is None
    assert sum(trajectory.loss_mask) == sum(map(len, script))
    said = case(trajectory.response_text, ROWS[0]["answer"], num_turns=trajectory.num_turns)
    assert example.answered(said) == 1.0
