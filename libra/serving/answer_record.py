"""What became of one HTTP request inside the engine: its engine requests and their tokens."""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Protocol

from libra.errors import InvariantError, RefusedError
from libra.serving.ledger import Epoch, spans_of
from libra.wire.instance import WEIGHTS_UNKNOWN, VersionSpan


class EngineOutput(Protocol):
    """The part of vLLM's CompletionOutput that is read."""

    index: int
    token_ids: Sequence[int]


class EngineRequest:
    """One prompt in the engine; with `num_choices` above 1 the engine splits it."""

    def __init__(self, external_id: str, internal_id: str, num_choices: int, epoch: Epoch) -> None:
        self.external_id = external_id
        self.num_choices = num_choices
        self.epoch = epoch
        self._internal_id = internal_id
        self._num_tokens = [0] * num_choices

    def count(self, outputs: Sequence[EngineOutput], *, are_deltas: bool) -> None:
        for output in outputs:
            before = self._num_tokens[output.index] if are_deltas else 0
            self._num_tokens[output.index] = before + len(output.token_ids)

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """The ids that the engine knows its choices by."""
        return tuple(self._engine_id(choice) for choice in range(self.num_choices))

    def spans(self, choice: int) -> list[tuple[Epoch, VersionSpan]]:
        return list(spans_of(self.epoch, self._engine_id(choice), self._num_tokens[choice]))

    def _engine_id(self, choice: int) -> str:
        # vLLM names the parts of a split request "<index>_<request id>".
        return self._internal_id if self.num_choices == 1 else f"{choice}_{self._internal_id}"


class AnswerRecord:
    """Filled by `libra.serving.engine` while vLLM handles the request."""

    def __init__(self) -> None:
        self.was_refused = False
        self.num_tokens_seen = 0
        """When the engine was last asked."""

        self._requests: dict[str, EngineRequest] = {}

    @property
    def requests(self) -> tuple[EngineRequest, ...]:
        """Empty until the engine has been handed anything."""
        return tuple(self._requests.values())

    def add(self, request: EngineRequest) -> None:
        self._requests[request.external_id] = request

    def find(self, external_id: str) -> EngineRequest | None:
        return self._requests.get(external_id)

    async def spans(self, choice_index: int) -> list[VersionSpan]:
        """Spans of one choice, as numbered in the answer.

        Waits until the epochs are judged; raises RefusedError if one failed its probe.
        """
        requests = sorted(self._requests.values(), key=_prompt_number)
        for request in requests:
            if choice_index < request.num_choices:
                return await _proven(request.spans(choice_index))
            choice_index -= request.num_choices
        raise InvariantError("vLLM answered a choice that no engine request belongs to")


async def _proven(spans: list[tuple[Epoch, VersionSpan]]) -> list[VersionSpan]:
    for epoch, span in spans:
        if not await epoch.wait_until_judged():
            raise RefusedError(
                f"{WEIGHTS_UNKNOWN}: v{span.policy_version}, which produced tokens, is unproven"
            )
    return [span for _, span in spans]


def _prompt_number(request: EngineRequest) -> int:
    """Read k from the "-k" that ends the id of prompt k; other answers have one prompt."""
    suffix = request.external_id.rpartition("-")[2]
    return int(suffix) if suffix.isdecimal() else 0


CURRENT_ANSWER: ContextVar[AnswerRecord | None] = ContextVar("CURRENT_ANSWER", default=None)
