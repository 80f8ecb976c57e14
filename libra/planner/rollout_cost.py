"""Seconds that one vLLM instance needs for a block of requests, in closed form.

Continuous batching starts every request of the block at once and lets the shortest leave first,
so with lengths L1 >= L2 >= ... the step s runs n(s) = #{k: Lk >= s} sequences. Summed over steps,
every term below is a prefix sum over the sorted requests, and every term grows with the block:
that is what makes the layout search exact (libra.planner.layout).

* A decode step reads all resident weights, or computes 2 x parameters per sequence, whichever
  takes longer: with `m_k` the marginal cost of the k-th sequence, sum over steps of m_1 + ... +
  m_n(s) is sum over k of m_k Lk.
* It reads every cached token: sum of L (prompt + (L + 1) / 2), the block's token-steps.
* When the cache (or max_num_seqs) cannot hold the block, the number of steps is bounded by
  token-steps / capacity (or tokens / max_num_seqs) instead of by the longest request.
* One API process hands out a bounded number of tokens per second, whatever the GPU could do.
"""

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from libra.planner.demand import Demand

_LATE_STARTERS = 1.15
"""Steps of an instance whose requests wait for room, over token-steps by capacity: those that start
late end late, and leave the cache half empty. One number for what depends on the load: see
docs/decisions/0008-planner-cost-model.md for its error."""


class InstanceCost(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of one instance of one TP degree. All are at least 0, in seconds per unit."""

    tp: int
    step_s: float
    """Per decode step, whatever its size: launches, scheduling, latency of the collectives."""

    weights_s: float
    """Per decode step: reading the weights that every token uses."""

    expert_s: float
    """Per sequence of a decode step until all experts are touched: reading its experts."""

    num_expert_sequences: int
    """Sequences after which every expert is read anyway; 0 for a dense model."""

    compute_s: float
    """Per sequence of a decode step beyond `num_free_sequences`: computing one token."""

    num_free_sequences: int
    """Sequences whose computation hides behind reading weights."""

    token_s: float
    """Per generated token: volume of the tensor-parallel collectives."""

    cached_token_s: float
    """Per cached token and decode step: reading its keys and values."""

    prompt_token_s: float
    """Per prompt token: computing it once."""

    prompt_square_s: float
    """Per squared prompt length: causal attention of the prefill."""

    api_token_s: float
    """Per generated token: the API process, beside the GPU's work and not added to it."""

    capacity_tokens: int
    """Tokens the KV cache holds."""

    max_sequences: int
    """vLLM's max_num_seqs."""


class Workload:
    """Requests sorted by response, longest first, with the prefix sums that costs need.

    Sums are integers, so that a sub-block's cost never exceeds its block's by rounding.
    """

    def __init__(self, requests: Sequence[tuple[int, int]]) -> None:
        """`requests` are (prompt tokens to compute, response tokens), in any order."""
        ordered = sorted(requests, key=lambda request: (-request[1], -request[0]))
        self._requests = ordered
        self.lengths = [length for _, length in ordered]
        self.tokens = _prefix(self.lengths)
        self.token_steps = _prefix([p * n + n * (n + 1) // 2 for p, n in ordered])
        self.prompts = _prefix([p for p, _ in ordered])
        self.prompt_squares = _prefix([p * p for p, _ in ordered])

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, num_requests: int) -> "Workload":
        """So many requests, evenly spaced by length, beginning with the longest."""
        step = len(self) / num_requests
        return Workload([self._requests[int(k * step)] for k in range(num_requests)])


def workload_of(demand: Demand) -> Workload:
    """All batches in flight together: `num_batches` times the requests of one step.

    Divided by `num_batches`, its time is that of one step: responses that outlast a step overlap
    the next one, as far as staleness lets them.
    """
    share = demand.prefill_share
    one_step = [
        (max(1, round(prompt * share)), response)
        for prompt, response in zip(demand.prompt_tokens, demand.response_tokens, strict=True)
    ]
    return Workload(one_step * demand.num_batches)


def _hidden_sequences(cost: InstanceCost, step_s: float, *, at_most: int) -> int:
    """Sequences whose tokens the API process handles within a step of the engine."""
    if step_s >= at_most * cost.api_token_s:
        return at_most
    return int(step_s / cost.api_token_s)


def block_seconds(cost: InstanceCost, work: Workload, begin: int, end: int) -> float:
    """Time for requests [begin, end) of `work` on one instance; 0.0 for an empty block.

    Growing the block at either side never lowers it.
    """
    if begin >= end:
        return 0.0
    sums = work.tokens
    longest = work.lengths[begin]
    tokens = sums[end] - sums[begin]
    token_steps = work.token_steps[end] - work.token_steps[begin]
    crowded_steps = _LATE_STARTERS * max(
        tokens / cost.max_sequences, token_steps / cost.capacity_tokens
    )
    crowded = cost.weights_s * crowded_steps + cost.expert_s * min(
        tokens, cost.num_expert_sequences * crowded_steps
    )
    routed = sums[min(end, begin + cost.num_expert_sequences)] - sums[begin]
    computed = sums[end] - sums[min(end, begin + cost.num_free_sequences)]
    roomy = cost.weights_s * longest + cost.expert_s * routed + cost.compute_s * computed
    gpu = (
        max(crowded, roomy)
        + cost.step_s * max(longest, crowded_steps)
        + cost.token_s * tokens
        + cost.cached_token_s * token_steps
        + cost.prompt_token_s * (work.prompts[end] - work.prompts[begin])
        + cost.prompt_square_s * (work.prompt_squares[end] - work.prompt_squares[begin])
    )
    # Where the API process keeps up with the engine it costs nothing; each sequence beyond those
    # delays every step. After the crowd the longest requests go on at the engine's own pace.
    step_s = cost.step_s + cost.weights_s
    num_hidden = _hidden_sequences(cost, step_s, at_most=end - begin)
    shown = sums[end] - sums[min(end, begin + num_hidden)]
    api = step_s * max(longest, crowded_steps) + cost.api_token_s * shown
    return max(gpu, api)


def step_seconds(cost: InstanceCost, *, num_sequences: float, cached_tokens: float) -> float:
    """One decode step of `num_sequences` that have `cached_tokens` in the cache together."""
    read = cost.weights_s + cost.expert_s * min(num_sequences, cost.num_expert_sequences)
    return (
        cost.step_s
        + max(read, cost.compute_s * num_sequences)
        + cost.token_s * num_sequences
        + cost.cached_token_s * cached_tokens
    )


def _prefix(values: Sequence[int]) -> list[int]:
    return [0, *accumulate(values)]
