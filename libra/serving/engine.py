"""The engine as a reload needs it, and vLLM's AsyncLLM as that engine.

Two methods of the AsyncLLM instance are wrapped: `add_request`, so that nothing enters past the
gate and each request's epoch is exact, and `generate`, so that output tokens are counted and
no text is made for who reads token ids alone.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec

from libra.config.weights import PauseMode
from libra.errors import PeerError, RefusedError
from libra.ids import PolicyVersion
from libra.serving.answer_record import CURRENT_ANSWER, AnswerRecord, EngineRequest
from libra.serving.gate import Gate
from libra.serving.ledger import VersionLedger
from libra.serving.plugin import BEGIN_VERSION, COUNT_TOKENS
from libra.serving.worker import JOIN_TRANSFER, RECEIVE_WEIGHTS, REFRESH_TIED_HEADS
from libra.transfer.outcome import joint_checksum
from libra.wire.instance import TOKEN_IDS_ONLY, WeightsTransfer

# Below every other request's priority number: the probe is the first to be scheduled.
PROBE_PRIORITY = -(2**31)


class Engine(Protocol):
    """What `libra.serving.reload` asks of an engine."""

    @property
    def base_directory(self) -> Path:
        """Where the engine's first weights came from."""
        ...

    @property
    def has_tied_embeddings(self) -> bool: ...

    def probe_problem(self, token_ids: tuple[int, ...]) -> str:
        """Why the engine could not compute their logprobs; empty when it can."""
        ...

    async def is_paused(self) -> bool: ...

    async def pause(self, mode: PauseMode) -> None:
        """Return when no step runs any more."""
        ...

    async def load(self, directory: Path) -> None: ...

    async def join_transfer(self, transfer: WeightsTransfer, *, rank_offset: int) -> None:
        """Raises PeerError, or TransferAbortedError when another member failed."""
        ...

    async def receive(self, transfer: WeightsTransfer, *, nonce: str) -> str:
        """Load what comes through the group; returns its checksum. Raises as `join_transfer`."""
        ...

    async def reset_caches(self) -> None: ...

    async def begin_version(self, version: PolicyVersion) -> Mapping[str, int]:
        """Output tokens so far of every unfinished request, by the engine's request id."""
        ...

    async def count_tokens(self) -> Mapping[str, int]:
        """As `begin_version`, at any time but while weights are loaded: then it waits."""
        ...

    async def resume_with_probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Resume and return the prompt logprobs of all but the first token."""
        ...


class VllmEngine:
    """`client` is vLLM's AsyncLLM; `probe_sampling` makes the probe's SamplingParams."""

    def __init__(
        self,
        client: Any,
        gate: Gate,
        ledger: VersionLedger,
        *,
        probe_sampling: Callable[[], Any],
    ) -> None:
        self._client = client
        self._probe_sampling = probe_sampling
        self._gate = gate
        self._ledger = ledger
        self._probe_id: str | None = None
        self._probe_entered = anyio.Event()
        self._num_probes = 0
        self._add_request = client.add_request
        self._generate = client.generate
        self.base_directory = Path(client.model_config.model)
        client.add_request = self._gated_add_request
        client.generate = self._counted_generate

    @property
    def has_tied_embeddings(self) -> bool:
        config = self._client.model_config.hf_text_config
        return bool(getattr(config, "tie_word_embeddings", False))

    def probe_problem(self, token_ids: tuple[int, ...]) -> str:
        config = self._client.model_config
        num_tokens, vocab_size = config.max_model_len, config.hf_text_config.vocab_size
        if len(token_ids) >= num_tokens:
            return f"a probe of {len(token_ids)} tokens; {num_tokens - 1} leave room for an answer"
        outside = [it for it in token_ids if not 0 <= it < vocab_size]
        return f"token {outside[0]} in a probe; there are {vocab_size}" if outside else ""

    async def is_paused(self) -> bool:
        return bool(await self._client.is_paused())

    async def pause(self, mode: PauseMode) -> None:
        await self._client.pause_generation(mode=mode, clear_cache=True)

    async def load(self, directory: Path) -> None:
        await self._client.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
        if self.has_tied_embeddings:
            await self._client.collective_rpc(REFRESH_TIED_HEADS)

    async def join_transfer(self, transfer: WeightsTransfer, *, rank_offset: int) -> None:
        content = msgspec.msgpack.encode(transfer)
        arguments = {"transfer": content, "rank_offset": rank_offset}
        joint_checksum(await self._client.collective_rpc(JOIN_TRANSFER, kwargs=arguments))

    async def receive(self, transfer: WeightsTransfer, *, nonce: str) -> str:
        arguments = {"transfer": msgspec.msgpack.encode(transfer), "nonce": nonce}
        answers = await self._client.collective_rpc(RECEIVE_WEIGHTS, kwargs=arguments)
        checksum = joint_checksum(answers)
        if self.has_tied_embeddings:
            await self._client.collective_rpc(REFRESH_TIED_HEADS)
        return checksum

    async def reset_caches(self) -> None:
        await self._client.reset_mm_cache()
        if not await self._client.reset_prefix_cache(reset_running_requests=True):
            raise PeerError("the engine did not reset its prefix cache")

    async def begin_version(self, version: PolicyVersion) -> Mapping[str, int]:
        counts = await self._client.engine_core.call_utility_async(BEGIN_VERSION, int(version))
        return dict(counts)

    async def count_tokens(self) -> Mapping[str, int]:
        return dict(await self._client.engine_core.call_utility_async(COUNT_TOKENS))

    async def resume_with_probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        self._num_probes += 1
        self._probe_id = f"libra-probe-{self._num_probes}"
        self._probe_entered = anyio.Event()
        logprobs: list[float] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._probe, token_ids, logprobs)
            # The probe waits in the paused engine, so it runs in the first step after resuming.
            await self._probe_entered.wait()
            await self._client.resume_generation()
        return tuple(logprobs)

    async def _probe(self, token_ids: tuple[int, ...], logprobs: list[float]) -> None:
        outputs = self._generate(
            {"prompt_token_ids": list(token_ids)},
            self._probe_sampling(),
            self._probe_id,
            priority=PROBE_PRIORITY,
        )
        final = None
        async with aclosing(outputs):
            async for output in outputs:
                final = output
        given = None if final is None else final.prompt_logprobs
        if given is None or len(given) != len(token_ids):
            raise PeerError("the engine did not answer the probe")
        logprobs += [
            entry[token].logprob for token, entry in zip(token_ids[1:], given[1:], strict=True)
        ]

    async def _gated_add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if request_id == self._probe_id:
            queue = await self._add_request(request_id, prompt, params, *args, **kwargs)
            self._probe_entered.set()
            return queue
        record = CURRENT_ANSWER.get()
        try:
            async with self._gate.entry():
                epoch = self._ledger.current
                queue = await self._add_request(request_id, prompt, params, *args, **kwargs)
        except RefusedError:
            if record is not None:
                record.was_refused = True
            raise
        if record is not None:
            num_choices = getattr(params, "n", 1)
            record.add(EngineRequest(request_id, queue.request_id, num_choices, epoch))
        return queue

    def _counted_generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        _leave_out_text(sampling_params)
        outputs: AsyncGenerator[Any, None] = self._generate(
            prompt, sampling_params, request_id, *args, **kwargs
        )
        record = CURRENT_ANSWER.get()
        if record is None:
            return outputs
        are_deltas = sampling_params.output_kind.name == "DELTA"
        return _counted(outputs, record, request_id, are_deltas=are_deltas)


def _leave_out_text(params: Any) -> None:
    """Obey TOKEN_IDS_ONLY: detokenising costs the API process more than all else per token.

    Stop strings need the text.
    """
    if (params.extra_args or {}).pop(TOKEN_IDS_ONLY, False) and not params.stop:
        params.detokenize = False


async def _counted(
    outputs: AsyncGenerator[Any, None], record: AnswerRecord, request_id: str, *, are_deltas: bool
) -> AsyncGenerator[Any, None]:
    async with aclosing(outputs):
        async for output in outputs:
            request = record.find(request_id)
            if request is not None:
                request.count(output.outputs, are_deltas=are_deltas)
            yield output
