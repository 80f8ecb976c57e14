"""A rollout client whose answers are written beforehand."""

from libra.rollouts.trajectory import Completion
from trajectories import admitted, completion


class ScriptedClient:
    """Answers with `script`, one entry per turn: token ids, or a whole Completion."""

    def __init__(self, tokenizer, script, *, max_model_len=10_000):
        self.group = admitted(0)
        self.sample_index = 1
        self.tokenizer = tokenizer
        self.prompts = []
        self._script = list(script)
        self._max_model_len = max_model_len

    def room_tokens(self, num_prompt_tokens):
        return max(0, self._max_model_len - num_prompt_tokens)

    async def generate(self, prompt_token_ids, *, max_new_tokens=None, stop_token_ids=()):
        self.prompts.append(tuple(prompt_token_ids))
        answer = self._script.pop(0)
        if isinstance(answer, Completion):
            return answer
        return completion(answer, num_prompt_tokens=len(prompt_token_ids))
