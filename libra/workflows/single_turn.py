"""One prompt, one answer."""

from libra.data.task import Task
from libra.rollouts.trajectory import Trajectory
from libra.rollouts.transcript import Transcript
from libra.workflows.client import RolloutClient
from libra.workflows.text import decoded


async def single_turn(task: Task, client: RolloutClient) -> Trajectory:
    """Ask once; the response text is the answer without special tokens."""
    completion = await client.generate(task.prompt_token_ids)
    transcript = Transcript()
    transcript.add_turn(task.prompt_token_ids, completion)
    text = await decoded(client.tokenizer, completion.token_ids)
    return transcript.trajectory(client.group, client.sample_index, response_text=text)
