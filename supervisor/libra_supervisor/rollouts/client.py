"""One sample's client: its workflow asks, engines answer, failures are tried again elsewhere."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import anyio
import msgspec

from libra import clock
from libra.data.tokenizer import PromptTokenizer
from libra.errors import DrainingError, LibraError, PeerError, RefusedError
from libra.ids import InstanceId, RequestId
from libra.rollouts.generation import GenerationRequest, completion_error, joined
from libra.rollouts.group import AdmittedGroup
from libra.rollouts.seeds import sampling_seed
from libra.rollouts.trajectory import Completion
from libra.wire.instance import Sampling

Progressed = Callable[[int], None]
"""Called with the number of answer tokens so far."""


class Router(Protocol):
    """Places one request on one instance and brings back the answer."""

    async def generate(self, request: GenerationRequest, progressed: Progressed) -> Completion:
        """One answer. Cancelling it frees the instance.

        Calls `progressed(0)` when an instance has taken the request, and again whenever it learns
        that the instance works on it. From the first call on, silence counts against the idle
        limit.
        Raises PeerError (the instance's fault), RefusedError (try later), DrainingError (the run
        is stopping) or RejectedError (the request is wrong).
        """

    def place_of(self, request_id: RequestId) -> InstanceId | None:
        """The instance that has a request of `generate`; None: it waits for one, or is over."""


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The run's sampling and patience."""

    run_seed: int
    max_model_len: int
    max_new_tokens: int
    vocab_size: int | None = None
    """Rows of the model's embedding; None when its shape is not known."""

    temperature: float = 1.0
    top_p: float = 1.0
    idle_timeout_s: float | None = 300.0
    """Longest time without a sign that an engine works on a request that it took. There is no limit
    on a whole answer: it would cut exactly the longest ones."""

    max_request_attempts: int = 3
    """Tries of one engine request, each placed anew by the router."""

    retry_delay_s: float = 0.5
    """Before the second try; doubles with each further one."""


class EngineSilentError(PeerError):
    """An engine took a request and then gave no sign of life."""


class RoomSpentError(LibraError):
    """A prompt fills the model's context: nothing can be generated after it."""


class SampleClient:
    """Implements `libra.workflows.client.RolloutClient` for one sample."""

    def __init__(
        self,
        group: AdmittedGroup,
        sample_index: int,
        *,
        router: Router,
        tokenizer: PromptTokenizer,
        settings: GenerationSettings,
        before: "SampleClient | None" = None,
    ) -> None:
        """`before` is of a try of the sample that got no answer in time.

        The engines that it waited for get the sample only when no other can serve, and the one that
        has the prompt's other requests has no precedence: it may be one of those.
        """
        self._is_again = before is not None
        self._silent = frozenset[InstanceId]() if before is None else before.silent_engines()
        self._engine_of: dict[RequestId, InstanceId] = {}
        """Of requests in progress, where they were when they last gave a sign of life."""

        self.group = group
        self.sample_index = sample_index
        self.tokenizer = tokenizer
        self._router = router
        self._settings = settings
        self._num_turns = 0
        self.num_tokens = 0
        """Answer tokens of the request in progress, as far as the router says."""

        self.num_retries = 0
        self.progressed_at: float | None = None
        """The last sign of life; None before the first."""

    def silent_engines(self) -> frozenset[InstanceId]:
        """Those that have not answered: that have a request now, and of before."""
        return self._silent.union(self._engine_of.values())

    def room_tokens(self, num_prompt_tokens: int) -> int:
        return max(0, self._settings.max_model_len - num_prompt_tokens)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Completion:
        prompt = tuple(prompt_token_ids)
        wanted = min(max_new_tokens or self._settings.max_new_tokens, self.room_tokens(len(prompt)))
        if wanted == 0:
            raise RoomSpentError(
                f"{self._name} has a prompt of {len(prompt)} tokens, "
                f"max_model_len is {self._settings.max_model_len}"
            )
        # Its own from here on: a workflow may ask for several answers at a time.
        self._num_turns += 1
        ask = partial(self._piece, self._num_turns, stop_token_ids)
        answer = await ask(prompt, wanted, piece=0)
        piece = 1
        # An engine that was paused by aborting gives back what it has: the rest is asked for with
        # the answer so far as part of the prompt, so that no sampled token is lost.
        while answer.finish_reason == "abort" and len(answer.token_ids) < wanted:
            left = wanted - len(answer.token_ids)
            rest = await ask(prompt + answer.token_ids, left, piece=piece)
            answer = joined(answer, rest)
            piece += 1
        if answer.finish_reason == "abort":
            return msgspec.structs.replace(answer, finish_reason="length")
        return answer

    @property
    def _name(self) -> str:
        return self.group.trajectory_id(self.sample_index)

    async def _piece(
        self,
        turn: int,
        stop_token_ids: Sequence[int],
        prompt: tuple[int, ...],
        wanted: int,
        *,
        piece: int,
    ) -> Completion:
        """One answer or the last error, after `max_request_attempts` tries."""
        settings = self._settings
        seed = sampling_seed(
            settings.run_seed,
            self.group,
            sample_index=self.sample_index,
            turn=turn,
            piece=piece,
        )
        sampling = Sampling(
            max_new_tokens=wanted,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=seed,
            stop_token_ids=tuple(stop_token_ids),
        )
        attempt = 0
        while True:
            request = GenerationRequest(
                request_id=RequestId(f"{self._name}/t{turn}.{piece}.{attempt}"),
                prompt_id=None if attempt or self._is_again else self.group.prompt.prompt_id,
                prompt_token_ids=prompt,
                sampling=sampling,
                avoided=self._silent,
            )
            try:
                return await self._ask(request)
            except DrainingError:
                raise
            except (PeerError, RefusedError):
                attempt += 1
                if attempt >= settings.max_request_attempts:
                    raise
            self.num_retries += 1
            await clock.sleep(settings.retry_delay_s * 2 ** (attempt - 1))

    async def _ask(self, request: GenerationRequest) -> Completion:
        idle_timeout_s = self._settings.idle_timeout_s
        self.num_tokens = 0
        self.progressed_at = clock.now()
        with anyio.CancelScope() as scope:

            def progressed(num_tokens: int) -> None:
                self.num_tokens = num_tokens
                self.progressed_at = clock.now()
                if (engine := self._router.place_of(request.request_id)) is not None:
                    self._engine_of[request.request_id] = engine
                if idle_timeout_s is not None:
                    scope.deadline = self.progressed_at + idle_timeout_s

            try:
                completion = await self._router.generate(request, progressed)
            finally:
                engine = self._engine_of.pop(request.request_id, None)
            self.progressed_at = clock.now()
            error = completion_error(completion)
            if error is not None:
                raise PeerError(f"{completion.instance_id} answered {request.request_id}: {error}")
            if completion.finish_reason == "abort" and not completion.token_ids:
                raise PeerError(f"{completion.instance_id} aborted {request.request_id}")
            return completion
        if engine is not None:
            self._silent |= {engine}
        raise EngineSilentError(
            f"{request.request_id} got nothing for {idle_timeout_s} s after "
            f"{self.num_tokens} tokens"
        )
