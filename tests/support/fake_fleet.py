"""A router over nothing: every request is answered as a test says."""

from collections.abc import Awaitable, Callable

import anyio

from libra import clock
from libra.errors import PeerError
from libra.ids import GroupId, InstanceId
from libra.rewards.coercion import RewardFailed
from trajectories import completion

Behaviour = Callable[..., Awaitable[object]]


class FakeFleet:
    """`behave(request, progressed)` answers; without it every answer is two tokens after 1 s."""

    def __init__(self, behave: Behaviour | None = None) -> None:
        self.requests = []
        self.num_running = 0
        self._behave = behave or answers

    async def generate(self, request, progressed):
        self.requests.append(request)
        self.num_running += 1
        try:
            return await self._behave(request, progressed)
        finally:
            self.num_running -= 1

    def place_of(self, _request_id):
        return InstanceId("vllm-0")

    def attempts_of(self, group_id: GroupId) -> int:
        return sum(r.request_id.startswith(f"{group_id}/") for r in self.requests)


async def answers(request, progressed):
    progressed(0)
    await clock.sleep(1)
    return completion((10, 11), num_prompt_tokens=len(request.prompt_token_ids))


async def hangs(request, progressed):
    progressed(0)
    await anyio.sleep_forever()


async def hangs_unseen(request, progressed):
    await anyio.sleep_forever()


async def breaks(request, progressed):
    progressed(0)
    await clock.sleep(1)
    raise PeerError("vllm-0 closed the connection")


async def answers_nonsense(request, progressed):
    answer = await answers(request, progressed)
    return type(answer)(
        **{**{f: getattr(answer, f) for f in answer.__struct_fields__}, "logprobs": ()}
    )


async def aborts_empty(request, progressed):
    progressed(0)
    return completion((), finish_reason="abort", num_prompt_tokens=len(request.prompt_token_ids))


class FakeScorer:
    """The number of sampled tokens, or what `outcome_of` says for a response."""

    def __init__(self, outcome_of=None) -> None:
        self._outcome_of = outcome_of
        self.cases = []

    async def score(self, case) -> float | RewardFailed:
        self.cases.append(case)
        if self._outcome_of is not None:
            return self._outcome_of(case)
        return float(case.num_response_tokens)
