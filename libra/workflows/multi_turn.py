"""Answers with tool calls in between, as one trajectory."""

from collections.abc import Sequence

from libra.data.task import Task
from libra.errors import ConfigError
from libra.rollouts.trajectory import Trajectory
from libra.rollouts.transcript import Transcript
from libra.user_code import function_at
from libra.workflows.client import RolloutClient
from libra.workflows.text import decoded, encoded_after_answer
from libra.workflows.tools import Toolbox, calls_in


def check_multi_turn(
    *, tools: Sequence[str], max_turns: int = 8, tool_timeout_s: float = 30.0
) -> None:
    """Raise ConfigError for arguments with which no sample could be answered."""
    if isinstance(tools, str) or not all(isinstance(name, str) for name in tools):
        raise ConfigError(f"workflow_args: tools is {tools!r}; it is a list of module:function")
    if not isinstance(max_turns, int) or max_turns < 1:
        raise ConfigError(f"workflow_args: max_turns is {max_turns!r}; it is a number from 1")
    if not isinstance(tool_timeout_s, (int, float)) or not tool_timeout_s > 0:
        raise ConfigError(f"workflow_args: tool_timeout_s is {tool_timeout_s!r}; it is above 0")
    functions = [function_at(name) for name in tools]
    try:
        Toolbox(functions, timeout_s=tool_timeout_s).schemas()
    except (AttributeError, NameError, TypeError, ValueError) as error:
        raise ConfigError(
            f"workflow_args: the tools' signatures cannot be shown to the model: {error}"
        ) from error


async def multi_turn(
    task: Task,
    client: RolloutClient,
    *,
    tools: Sequence[str],
    max_turns: int = 8,
    tool_timeout_s: float = 30.0,
) -> Trajectory:
    """Let the policy call `tools` (each `module:function`) until it answers without a call.

    A prompt that is plain text is sent as it is, and the chat template writes what follows it. The
    next turn's prompt is the ids so far plus the tools' answers, tokenised by themselves: no
    sampled token is ever tokenised again. The response text is that of the last turn. The
    conversation ends early when `max_turns` or the model's length is reached.
    """
    toolbox = Toolbox([function_at(name) for name in tools], timeout_s=tool_timeout_s)
    transcript = Transcript()
    prompt = task.prompt_token_ids
    if task.messages:
        # Not those of the task: a workflow that calls this one with tools has shown none there.
        prompt = tuple(client.tokenizer.encode_chat(task.messages, tools=toolbox.schemas()))
    while True:
        completion = await client.generate(prompt)
        transcript.add_turn(prompt, completion)
        text = await decoded(client.tokenizer, completion.token_ids)
        calls = calls_in(text) if completion.finish_reason == "stop" else []
        if not calls or transcript.num_turns == max_turns:
            break
        answers = [
            {"role": "tool", "name": getattr(call, "name", ""), "content": answer}
            for call, answer in zip(calls, await toolbox.answers(calls), strict=True)
        ]
        added = await encoded_after_answer(client.tokenizer, answers, completion.token_ids)
        prompt = (*transcript.token_ids, *added)
        if client.room_tokens(len(prompt)) == 0:
            break
    return transcript.trajectory(client.group, client.sample_index, response_text=text)
