"""What a workflow may ask for."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

from libra.data.task import Task
from libra.data.tokenizer import PromptTokenizer
from libra.rollouts.group import AdmittedGroup
from libra.rollouts.trajectory import Completion, Trajectory


class RolloutClient(Protocol):
    """One sample's way to the engines. Failed requests are tried again behind it."""

    @property
    def group(self) -> AdmittedGroup: ...

    @property
    def sample_index(self) -> int: ...

    @property
    def tokenizer(self) -> PromptTokenizer: ...

    def room_tokens(self, num_prompt_tokens: int) -> int:
        """Tokens that may be generated after a prompt of that length; 0 when it fills the model."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Completion:
        """One answer, sampled as the run's configuration says; never longer than the room."""


Workflow: TypeAlias = Callable[[Task, RolloutClient], Awaitable[Trajectory]]
