"""The Python in docs/workflows.md does what the page says."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from libra.data.tokenizer import PromptTokenizer
from libra.rollouts.trajectory import alignment_error
from libra.rollouts.transcript import Transcript
from scripted_engine import ScriptedClient
from tokenizer_dirs import write_tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "workflows.md"
REWARD, OVERLONG, WORKFLOW = re.findall(
    r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


@pytest.fixture
def anyio_backend():
    return "asyncio"


def defined_by(snippet, **names):
    exec(compile(snippet, str(PAGE), "exec"), names)  # noqa: S102 - our own page
    return names


def test_the_reward_of_the_page_scores():
    reward = defined_by(REWARD)["short_and_right"]
    case = SimpleNamespace(answer="Wend", response_text="the Wend", num_response_tokens=150)
    assert reward(case) == 1.0
    assert reward(case, limit=100) == 0.9


def test_the_reward_of_the_page_for_answers_in_time_scores():
    reward = defined_by(OVERLONG)["right_and_in_time"]
    for num_tokens, wanted in ((768, 1.0), (896, 0.5), (1024, 0.0)):
        case = SimpleNamespace(answer="a", response_text="a", num_response_tokens=num_tokens)
        assert reward(case) == wanted


@pytest.mark.anyio
async def test_the_workflow_of_the_page_gives_one_trajectory_of_two_turns(tmp_path):
    twice = defined_by(WORKFLOW, Transcript=Transcript)["twice"]
    tokenizer = PromptTokenizer(write_tokenizer(tmp_path))
    script = [tokenizer.encode_fragment(text) for text in ("HAVING", "SONG")]
    client = ScriptedClient(tokenizer, script)
    task = SimpleNamespace(prompt_token_ids=tuple(tokenizer.encode_fragment("go")))
    trajectory = await twice(task, client, hint="\nmore ")
    hint = tokenizer.encode_fragment("\nmore ")
    assert list(client.prompts[1]) == [*client.prompts[0], *script[0], *hint]
    assert (trajectory.num_turns, trajectory.response_text) == (2, "SONG")
    assert sum(trajectory.loss_mask) == len(script[0]) + len(script[1])
    assert alignment_error(trajectory) is None
