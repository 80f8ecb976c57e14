"""A conversation as token ids, kept exactly as the engine read and wrote them."""

from typing import TYPE_CHECKING

from libra.errors import LibraError
from libra.rollouts.generation import completion_error
from libra.rollouts.group import AdmittedGroup
from libra.rollouts.trajectory import Completion, FinishReason, Trajectory
from libra.wire.instance import VersionSpan

if TYPE_CHECKING:
    from libra.ids import InstanceId


class PrefixBrokenError(LibraError):
    """A turn's prompt does not begin with the ids of the turns before.

    Training on it would train on tokens that the policy did not sample in that context.
    """


class AlignmentBrokenError(LibraError):
    """Token ids, logprobs and version spans of an answer do not describe the same tokens."""


class Transcript:
    """Turns so far. Each turn's prompt repeats everything before it, id by id."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._loss_mask: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._instance_ids: list[InstanceId] = []
        self._num_prompt_tokens = 0
        self._num_turns = 0
        self._finish_reason: FinishReason = "error"

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    @property
    def num_turns(self) -> int:
        return self._num_turns

    def add_turn(self, prompt_token_ids: tuple[int, ...], completion: Completion) -> None:
        """Append one answer and whatever its prompt added since the last one.

        Added prompt tokens (tools, users) get loss mask 0, every sampled token gets 1, an
        end-of-sequence token like any other. Raises PrefixBrokenError or AlignmentBrokenError.
        """
        so_far = len(self._token_ids)
        if list(prompt_token_ids[:so_far]) != self._token_ids:
            raise PrefixBrokenError(
                f"turn {self._num_turns + 1} has a prompt of {len(prompt_token_ids)} tokens that "
                f"does not repeat the {so_far} before it"
            )
        error = completion_error(completion)
        if error is not None:
            raise AlignmentBrokenError(f"{completion.instance_id} answered with {error}")
        self._append_context(prompt_token_ids[so_far:])
        if self._num_turns == 0:
            self._num_prompt_tokens = len(prompt_token_ids)
        self._append_answer(completion)
        self._num_turns += 1

    def trajectory(
        self, group: AdmittedGroup, sample_index: int, *, response_text: str
    ) -> Trajectory:
        """What has been recorded, not scored yet."""
        return Trajectory(
            trajectory_id=group.trajectory_id(sample_index),
            prompt_id=group.prompt.prompt_id,
            group_id=group.group_id,
            sample_index=sample_index,
            token_ids=self.token_ids,
            loss_mask=tuple(self._loss_mask),
            rollout_logprobs=tuple(self._logprobs),
            version_spans=tuple(self._spans),
            num_prompt_tokens=self._num_prompt_tokens,
            finish_reason=self._finish_reason,
            num_turns=self._num_turns,
            instance_ids=tuple(self._instance_ids),
            response_text=response_text,
        )

    def _append_context(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids += token_ids
        self._loss_mask += [0] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)

    def _append_answer(self, completion: Completion) -> None:
        start = len(self._token_ids)
        self._token_ids += completion.token_ids
        self._loss_mask += [1] * len(completion.token_ids)
        self._logprobs += completion.logprobs
        self._spans += (
            VersionSpan(s.policy_version, start + s.start, start + s.end)
            for s in completion.version_spans
        )
        self._instance_ids.append(completion.instance_id)
        self._finish_reason = completion.finish_reason
