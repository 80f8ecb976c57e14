"""One vLLM instance as a fluid: decode steps pass continuously, requests come and go at events.

The costs of a step are the planner's (`InstanceCost`), but summed over the batch as it really is:
arrivals at any time, admission when the cache has room for the prompt, and preemption of the newest
request when it has none for the next token. Prefill is time in which nothing decodes.
"""

from collections import Counter, deque
from heapq import heappop, heappush
from itertools import count
from math import inf, sqrt

import msgspec

from libra.ids import PolicyVersion, PromptId, TrajectoryId
from libra.planner.rollout_cost import InstanceCost, step_seconds

_WATERMARK = 0.01
"""Part of the cache that admission leaves free."""

_NEARLY = 1e-9
"""Steps this close to an event have reached it."""


class EngineRequest(msgspec.Struct, gc=False, eq=False):
    """One trajectory on one instance. Mutable: it remembers its tokens over preemptions."""

    trajectory_id: TrajectoryId
    prompt_id: PromptId
    prompt_tokens: int
    response_tokens: int
    oldest_version: PolicyVersion | None = None
    """Policy of the first token; None before there is one."""

    generated: float = 0.0
    serial: int = 0
    """Of the newest admission; a heap entry with another serial is out of date."""

    admitted_at_step: float = 0.0


class EngineCounts(msgspec.Struct, frozen=True, kw_only=True):
    num_running: int
    num_waiting: int
    kv_use_fraction: float
    num_preemptions: int
    busy_s: float


class Engine:
    """The state of one instance. Call `advance` before anything that changes it."""

    def __init__(self, cost: InstanceCost) -> None:
        self.policy_version = PolicyVersion(0)
        self._cost = cost
        self._now = 0.0
        self._step = 0.0
        self._stall_s = 0.0
        self._cached_tokens = 0.0
        self._running: dict[TrajectoryId, EngineRequest] = {}
        self._finishing: list[tuple[float, int, EngineRequest]] = []
        self._waiting: deque[EngineRequest] = deque()
        self._prompts: Counter[PromptId] = Counter()
        self._serial = count(1)
        self._num_preemptions = 0
        self._busy_s = 0.0
        self._is_frozen = False
        self._is_closed = False

    @property
    def is_empty(self) -> bool:
        """Nothing decodes; requests may wait."""
        return not self._running

    def counts(self) -> EngineCounts:
        return EngineCounts(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_use_fraction=min(1.0, self._cached_tokens / self._cost.capacity_tokens),
            num_preemptions=self._num_preemptions,
            busy_s=self._busy_s,
        )

    def advance(self, now: float) -> list[EngineRequest]:
        """Decode until `now`; the requests that finished, in order.

        `now` must not lie beyond `next_due_at()`: events in between would be missed.
        """
        elapsed, self._now = now - self._now, now
        if self._is_frozen or not self._running:
            return []
        self._busy_s += elapsed
        stalled = min(self._stall_s, elapsed)
        self._stall_s -= stalled
        steps = self._steps_within(elapsed - stalled)
        self._step += steps
        self._cached_tokens += steps * len(self._running)
        finished = self._take_finished()
        self._make_room()
        self._admit()
        return finished

    def submit(self, request: EngineRequest) -> None:
        self._waiting.append(request)
        self._admit()

    def next_due_at(self) -> float:
        """When a request finishes or the cache is full; inf when neither will happen."""
        if self._is_frozen or not self._running:
            return inf
        self._drop_outdated()
        steps = self._finishing[0][0] - self._step
        if len(self._running) > 1:
            room = self._cost.capacity_tokens - self._cached_tokens
            steps = min(steps, room / len(self._running))
        steps = max(0.0, steps)
        return self._now + self._stall_s + self._seconds_of(steps)

    def freeze(self) -> None:
        """Stop decoding (a reload); requests keep their cache and place."""
        self._is_frozen = True

    def thaw(self) -> None:
        self._is_frozen = self._is_closed = False
        self._admit()

    def close(self) -> None:
        """Admit nothing more until `thaw`; what runs goes on to its end."""
        self._is_closed = True

    def evict(self, *, keeps_tokens: bool) -> None:
        """Take every running request's cache away: it waits again, first come first.

        With `keeps_tokens` it goes on after its last token, else it starts from the prompt.
        """
        for request in reversed(list(self._running.values())):
            self._remove(request)
            request.generated = self._generated(request) if keeps_tokens else 0.0
            self._waiting.appendleft(request)

    def _steps_within(self, seconds: float) -> float:
        """Solve `_seconds_of(steps) = seconds`."""
        growth = self._cost.cached_token_s * len(self._running) / 2
        first = self._first_step_s()
        if growth > 0:
            gpu = (sqrt(first * first + 4 * growth * seconds) - first) / (2 * growth)
        else:
            gpu = seconds / first
        api_s = self._cost.api_token_s * len(self._running)
        return min(gpu, seconds / api_s) if api_s > 0 else gpu

    def _seconds_of(self, steps: float) -> float:
        growth = self._cost.cached_token_s * len(self._running) / 2
        gpu = steps * (self._first_step_s() + growth * steps)
        return max(gpu, steps * self._cost.api_token_s * len(self._running))

    def _first_step_s(self) -> float:
        return step_seconds(
            self._cost, num_sequences=len(self._running), cached_tokens=self._cached_tokens
        )

    def _take_finished(self) -> list[EngineRequest]:
        finished = []
        self._drop_outdated()
        while self._finishing and self._finishing[0][0] <= self._step + _NEARLY * (1 + self._step):
            request = heappop(self._finishing)[2]
            self._remove(request)
            request.generated = request.response_tokens
            finished.append(request)
            self._drop_outdated()
        return finished

    def _make_room(self) -> None:
        """Preempt the newest while the cache is full, but never the only one."""
        limit = self._cost.capacity_tokens * (1 - _NEARLY)
        while self._cached_tokens >= limit and len(self._running) > 1:
            newest = next(reversed(self._running.values()))
            generated = self._generated(newest)
            self._remove(newest)
            newest.generated = generated
            self._waiting.appendleft(newest)
            self._num_preemptions += 1

    def _admit(self) -> None:
        if self._is_frozen or self._is_closed:
            return
        limit = self._cost.capacity_tokens * (1 - _WATERMARK)
        while self._waiting and len(self._running) < self._cost.max_sequences:
            request = self._waiting[0]
            tokens = request.prompt_tokens + request.generated
            if self._running and self._cached_tokens + tokens > limit:
                return
            self._waiting.popleft()
            self._start(request, tokens)

    def _start(self, request: EngineRequest, tokens: float) -> None:
        computed = tokens
        if self._prompts[request.prompt_id]:
            # A sibling's prompt is in the prefix cache; only what follows it is computed.
            computed -= request.prompt_tokens
        self._prompts[request.prompt_id] += 1
        cost = self._cost
        self._stall_s += cost.prompt_token_s * computed + cost.prompt_square_s * computed**2
        self._cached_tokens += tokens
        if not request.generated:
            request.oldest_version = self.policy_version
        request.serial = next(self._serial)
        request.admitted_at_step = self._step - request.generated
        self._running[request.trajectory_id] = request
        ends_at = request.admitted_at_step + request.response_tokens
        heappush(self._finishing, (ends_at, request.serial, request))

    def _remove(self, request: EngineRequest) -> None:
        del self._running[request.trajectory_id]
        self._prompts[request.prompt_id] -= 1
        if not self._prompts[request.prompt_id]:
            del self._prompts[request.prompt_id]
        self._cached_tokens -= request.prompt_tokens + self._generated(request)
        request.serial = 0
        if not self._running:
            # Nothing is left: what rounding left over goes too.
            self._cached_tokens = self._stall_s = 0.0

    def _generated(self, request: EngineRequest) -> float:
        return self._step - request.admitted_at_step

    def _drop_outdated(self) -> None:
        while self._finishing and self._finishing[0][1] != self._finishing[0][2].serial:
            heappop(self._finishing)
