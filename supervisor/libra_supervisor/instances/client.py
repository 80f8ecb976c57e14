"""The calls Libra makes to one vLLM server started by `libra.serving.launch`.

Errors are those of `libra_supervisor.instances.transport`.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from libra.errors import PeerError
from libra.ids import InstanceId, RequestId
from libra.rollouts.trajectory import Completion
from libra.wire.decoding import decoded_json
from libra.wire.instance import (
    TOKEN_IDS_ONLY,
    InstanceState,
    OpenRequests,
    ReloadAck,
    ReloadRequest,
    Sampling,
)
from libra_supervisor.instances.answers import completion_of, prompt_logprobs_of
from libra_supervisor.instances.transport import Call, CallLimits, InstanceTransport

T = TypeVar("T")

COMPLETION_LIMITS = CallLimits()
"""No limit on the first byte: a long answer is no fault, and a server that hangs is found by its
lack of progress and ended, which ends its calls."""

MAX_SHORT_BYTES = 16 * 2**20
"""Of what is read at once on the event loop: a page of vLLM has 57 KB."""

SHORT_CALL = CallLimits(connect_s=2.0, first_byte_s=5.0, whole_s=10.0, max_bytes=MAX_SHORT_BYTES)
MODEL_NAME = "policy"
"""The name under which every instance serves the policy."""


class InstanceClient:
    """Calls to one instance. An asynchronous context manager, on asyncio."""

    def __init__(
        self,
        instance_id: InstanceId,
        base_url: str,
        *,
        token: str,
        completion_limits: CallLimits = COMPLETION_LIMITS,
    ) -> None:
        """`base_url` like `http://127.0.0.1:8000` or `http://[::1]:8000`."""
        self.instance_id = instance_id
        self._transport = InstanceTransport(instance_id, base_url)
        self._authorization = {"Authorization": f"Bearer {token}"}
        self._completion_limits = completion_limits

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._transport.__aexit__(exc_type, exc, traceback)

    async def complete(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: RequestId
    ) -> Completion:
        """One sampled answer, its token ids and logprobs exactly as the engine gave them.

        Cancel it to make the server stop generating.
        """
        call = Call(
            method="POST",
            path="/v1/completions",
            doing=f"completing {request_id}",
            limits=self._completion_limits,
            body=_completion_body(prompt_token_ids, sampling),
            headers={"X-Request-Id": request_id},
            is_resent_when_stale=True,
        )
        content = await self._transport.call(call)
        return completion_of(content, self.instance_id, num_prompt_tokens=len(prompt_token_ids))

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, request_id: RequestId
    ) -> tuple[float, ...]:
        """Return the logprob of each token but the first, given those before it."""
        body = {
            "model": MODEL_NAME,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        call = Call(
            method="POST",
            path="/v1/completions",
            doing=f"scoring {request_id}",
            limits=self._completion_limits,
            body=msgspec.json.encode(body),
            headers={"X-Request-Id": request_id},
            is_resent_when_stale=True,
        )
        return prompt_logprobs_of(await self._transport.call(call), self.instance_id, token_ids)

    async def reload(self, request: ReloadRequest, *, timeout_s: float) -> ReloadAck:
        """Ask for a guarded reload and wait for its ACK, which may report a failure.

        Never sent twice: whether a lost answer hides a reload is what `state` tells.
        """
        call = Call(
            method="POST",
            path="/libra/reload",
            doing=f"reloading v{request.policy_version}",
            limits=CallLimits(first_byte_s=timeout_s),
            body=msgspec.json.encode(request),
            headers=self._authorization,
        )
        return self._decoded(await self._transport.call(call), ReloadAck, call)

    async def sleep(self, *, timeout_s: float) -> None:
        """Have its workers give their device memory back, the weights into host memory.

        Ends what is in flight. Until `wake_up` nothing but health is to be asked for.
        """
        await self._transport.call(self._memory_call("/sleep?level=1", timeout_s))

    async def wake_up(self, *, timeout_s: float) -> None:
        """Have its workers take their device memory again, with the weights that they had."""
        await self._transport.call(self._memory_call("/wake_up", timeout_s))

    def _memory_call(self, path: str, timeout_s: float) -> Call:
        return Call(
            method="POST",
            path=path,
            doing=f"answering {path}",
            limits=CallLimits(first_byte_s=timeout_s, whole_s=timeout_s),
            headers=self._authorization,
        )

    async def state(self) -> InstanceState:
        call = Call(
            method="GET",
            path="/libra/state",
            doing="telling its state",
            limits=SHORT_CALL,
            headers=self._authorization,
        )
        return self._decoded(await self._transport.call(call), InstanceState, call)

    async def open_requests(self) -> dict[str, int]:
        """Answer tokens so far of what the server works on, by request id (`OpenRequests`)."""
        call = Call(
            method="GET",
            path="/libra/requests",
            doing="telling its requests",
            limits=SHORT_CALL,
            headers=self._authorization,
        )
        return self._decoded(await self._transport.call(call), OpenRequests, call).num_tokens

    async def health(self) -> None:
        """Return when the server calls itself healthy, which says nothing about its progress."""
        await self._transport.call(
            Call(method="GET", path="/health", doing="checking its health", limits=SHORT_CALL)
        )

    async def metrics_text(self, *, timeout_s: float) -> str:
        """The page as it is; `timeout_s` is for all of it, the connection included."""
        limits = CallLimits(connect_s=timeout_s, whole_s=timeout_s, max_bytes=MAX_SHORT_BYTES)
        call = Call(method="GET", path="/metrics", doing="giving its metrics", limits=limits)
        return (await self._transport.call(call)).decode(errors="replace")

    def _decoded(self, content: bytes, kind: type[T], call: Call) -> T:
        try:
            return decoded_json(content, kind)
        except PeerError as exc:
            raise PeerError(f"{self.instance_id} was unclear while {call.doing}: {exc}") from exc


def _completion_body(prompt_token_ids: Sequence[int], sampling: Sampling) -> bytes:
    return msgspec.json.encode(
        {
            "model": MODEL_NAME,
            "prompt": list(prompt_token_ids),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop_token_ids": sampling.stop_token_ids,
            "logprobs": 0,
            "return_token_ids": True,
            # Nor are token ids turned into text one by one for their logprobs.
            "return_tokens_as_token_ids": True,
            "vllm_xargs": {TOKEN_IDS_ONLY: 1},
        }
    )
