"""Log probability and entropy of chosen tokens, without the logits of a whole batch at once.

The output layer is applied to the hidden states of sampled tokens only, a bounded number of rows
at a time, and over the slice of the vocabulary that this rank holds. Nothing of the size
[tokens, vocabulary] outlives its chunk: backward computes the logits of each chunk again.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

PADDED_LOGIT = -1e30
"""Logit of vocabulary rows that are padding: exp gives 0, and 0 times it is still 0."""


class Head(NamedTuple):
    """What scoring needs to know about this rank's slice of the output layer."""

    vocab_start: int
    """Id of the slice's first row."""

    num_valid: int
    """Rows of the slice that are not padding."""

    group: Any
    """The tensor-parallel group; None when one rank holds the whole vocabulary."""


class ScoreRequest(NamedTuple):
    """Which tokens to score. `n` tokens, rows in any order."""

    head: Head
    positions: torch.Tensor
    """int64[n]: index of the predicting position into the flattened [s, b]."""

    targets: torch.Tensor
    """int64[n]: the tokens whose probability is wanted."""

    temperature: float
    chunk_tokens: int
    """Logits of at most this many tokens exist at a time."""


def score_tokens(
    hidden_states: torch.Tensor,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    context: ScoreRequest,
    config: Any,
    **_unused: Any,
) -> torch.Tensor:
    """GPTModel's `output_processor`: [s, b, hidden] -> float32[2, n], logprobs and entropies.

    Differentiable in the hidden states and the output weight.
    """
    if config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states)
    else:
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states)
    weight = output_layer.weight if output_weight is None else output_weight
    chosen = hidden_states.flatten(0, 1).index_select(0, context.positions)
    scores: torch.Tensor = _TokenScores.apply(chosen, weight, context)  # type: ignore[no-untyped-call]
    return scores


class _TokenScores(torch.autograd.Function):
    """float32[2, n] from hidden [n, h] and this rank's weight [v, h].

    With p = softmax(logits), H the entropy and e the one-hot target:
    d logprob / d logits = e - p, and d H / d logits = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, request: ScoreRequest
    ) -> torch.Tensor:
        scores = hidden.new_empty((2, len(hidden)), dtype=torch.float32)
        log_sums = hidden.new_empty(len(hidden), dtype=torch.float32)
        for chunk in _chunks(len(hidden), request.chunk_tokens):
            logits = _logits(hidden[chunk], weight, request)
            scores[:, chunk], log_sums[chunk] = _score_chunk(logits, chunk, request)
        ctx.save_for_backward(hidden, weight, log_sums, scores[1])
        ctx.request = request
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, log_sums, entropies = ctx.saved_tensors
        request: ScoreRequest = ctx.request
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        for chunk in _chunks(len(hidden), request.chunk_tokens):
            of_logprob, of_entropy = (gradients[0][row, chunk, None] for row in (0, 1))
            log_p = _logits(hidden[chunk], weight, request) - log_sums[chunk, None]
            probabilities = log_p.exp()
            of_logits = log_p.add_(entropies[chunk, None]).mul_(-of_entropy).sub_(of_logprob)
            of_logits.mul_(probabilities)
            rows, local = _own_targets(chunk, request)
            of_logits[rows, local] += of_logprob[rows, 0]
            of_logits = of_logits.div_(request.temperature).to(weight.dtype)
            torch.matmul(of_logits, weight, out=hidden_gradient[chunk])
            weight_gradient += of_logits.t() @ hidden[chunk]
        return hidden_gradient, weight_gradient.to(weight.dtype), None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(at, at + chunk_tokens) for at in range(0, num_tokens, chunk_tokens)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, request: ScoreRequest) -> torch.Tensor:
    """Logits under the sampling temperature, float32[n, v].

    The product is taken in the model's precision, as the engine's is.
    """
    logits = (hidden @ weight.t()).float()
    if request.temperature != 1.0:
        logits /= request.temperature
    logits[:, request.head.num_valid :] = PADDED_LOGIT
    return logits


def _score_chunk(
    logits: torch.Tensor, chunk: slice, request: ScoreRequest
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [2, n] and log of the softmax's denominator [n], over the whole vocabulary."""
    largest = logits.amax(dim=-1)
    if request.head.group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=request.head.group)
    shifted = logits.sub_(largest[:, None])
    rows, local = _own_targets(chunk, request)
    target = torch.zeros_like(largest)
    target[rows] = shifted[rows, local]
    exponentials = shifted.exp()
    sums = torch.stack([exponentials.sum(-1), (exponentials * shifted).sum(-1), target])
    if request.head.group is not None:
        dist.all_reduce(sums, group=request.head.group)
    denominator, weighted, target = sums
    log_denominator = denominator.log()
    scores = torch.stack([target - log_denominator, log_denominator - weighted / denominator])
    return scores, log_denominator + largest


def _own_targets(chunk: slice, request: ScoreRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the chunk whose target is in this rank's slice, and its column there."""
    local = request.targets[chunk] - request.head.vocab_start
    rows = ((local >= 0) & (local < request.head.num_valid)).nonzero().squeeze(1)
    return rows, local[rows]
