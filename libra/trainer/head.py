"""Log probability and entropy of chosen tokens, without the logits of a whole batch at once.

The output layer is applied to the hidden states of sampled tokens only, a bounded number of rows
at a time, and over the slice of the vocabulary that this rank holds. Nothing of the size
[tokens, vocabulary] outlives its chunk: backward computes the logits of each chunk again.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from libra.trainer.batch import MicroBatch

PADDED_LOGIT = -1e30
"""Logit of vocabulary rows that are padding: exp gives 0, and 0 times it is still 0."""


SMALLEST_CHUNK_LOGITS = 1 << 20


class Head(NamedTuple):
    """What scoring needs to know about this rank's slice of the output layer."""

    vocab_start: int
    """Id of the slice's first row."""

    num_valid: int
    """Rows of the slice that are not padding."""

    group: Any
    """The tensor-parallel group; None when one rank holds the whole vocabulary."""


class Sampling(NamedTuple):
    """How the engine turned logits into the distribution it drew from."""

    temperature: float = 1.0
    top_p: float = 1.0


class ScoreRequest(NamedTuple):
    """Which tokens to score. `n` tokens, rows in any order."""

    head: Head
    positions: torch.Tensor
    """int64[n]: index of the predicting position into the flattened [s, b]."""

    targets: torch.Tensor
    """int64[n]: the tokens whose probability is wanted."""

    sampling: Sampling
    chunk_tokens: int
    """Logits of at most this many tokens exist at a time."""


def token_scores(hidden: torch.Tensor, weight: torch.Tensor, request: ScoreRequest) -> torch.Tensor:
    """Hidden states [n, h] at the predicting positions -> float32[2, n], logprobs and entropies.

    Differentiable in the hidden states and in this rank's slice [v, h] of the output weight.
    """
    scores: torch.Tensor = _TokenScores.apply(hidden, weight, request)  # type: ignore[no-untyped-call]
    return scores


def score_request(
    head: Head, batch: MicroBatch, sampling: Sampling, *, logit_rows: int, vocab_slice: int
) -> ScoreRequest:
    """For every token of the batch that counts, with the logits of `logit_rows` sequences."""
    return ScoreRequest(
        head=head,
        positions=batch.scored,
        targets=batch.targets,
        sampling=sampling,
        chunk_tokens=chunk_tokens(
            logit_rows=logit_rows, longest=batch.packing.longest, vocab_slice=vocab_slice
        ),
    )


def chunk_tokens(*, logit_rows: int, longest: int, vocab_slice: int) -> int:
    """How many tokens' logits may exist at once: `logit_rows` sequences of the longest length.

    Small models are not cut up: 4 MiB of float32 logits are always allowed.
    """
    return max(logit_rows * longest, SMALLEST_CHUNK_LOGITS // vocab_slice, 1)


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
            sums = _row_sums(_logits(hidden[chunk], weight, chunk, request), chunk, request)
            scores[:, chunk], log_sums[chunk] = _scores(sums, request.head.group)
        ctx.save_for_backward(hidden, weight, log_sums, scores[1])
        ctx.request = request
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, log_sums, entropies = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient: torch.Tensor | None = None
        for chunk in _chunks(len(hidden), ctx.request.chunk_tokens):
            per_row = (log_sums[chunk], entropies[chunk], *(g[chunk] for g in gradients[0]))
            logits = _logits(hidden[chunk], weight, chunk, ctx.request)
            of_logits = _logit_gradients(logits, chunk, per_row, ctx.request)
            torch.matmul(of_logits, weight, out=hidden_gradient[chunk])
            of_weight = of_logits.t() @ hidden[chunk]
            if weight_gradient is None:
                weight_gradient = of_weight
            else:
                # Summed in float32: bfloat16 would lose what the later chunks add.
                weight_gradient = weight_gradient.float().add_(of_weight)
        if weight_gradient is None:
            weight_gradient = torch.zeros_like(weight)
        return hidden_gradient, weight_gradient.to(weight.dtype), None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(at, at + chunk_tokens) for at in range(0, num_tokens, chunk_tokens)]


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, chunk: slice, request: ScoreRequest
) -> torch.Tensor:
    """Logits [n, v] in the model's precision, as the engine's are; cut to top-p."""
    logits = hidden @ weight.t()
    if request.sampling.top_p < 1.0:
        logits.masked_fill_(_outside_top_p(logits, chunk, request), PADDED_LOGIT)
    return logits


def _outside_top_p(logits: torch.Tensor, chunk: slice, request: ScoreRequest) -> torch.Tensor:
    """Which of this rank's logits the sampler could not draw, bool[n, v].

    As in vLLM: the tokens of least probability go while their sum is at most 1 - p, the likeliest
    never. A token that was drawn stays, should rounding put it on the other side here.
    """
    scaled = _scaled(logits.clone(), request)
    head = request.head
    if head.group is not None:
        parts = [torch.empty_like(scaled) for _ in range(dist.get_world_size(head.group))]
        dist.all_gather(parts, scaled, group=head.group)
        scaled = torch.cat(parts, dim=-1)
    rising, order = scaled.sort(dim=-1)
    is_cut = rising.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - request.sampling.top_p
    is_cut[:, -1] = False
    outside = torch.zeros_like(is_cut).scatter_(1, order, is_cut)
    # Every slice of the vocabulary has the same width, so positions are token ids.
    outside.scatter_(1, request.targets[chunk][:, None], value=False)
    return outside[:, head.vocab_start : head.vocab_start + logits.shape[1]]


def _scores(sums: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [2, n] and log of the softmax's denominator [n], over the whole vocabulary.

    `sums` are those of `row_sums` in `libra.trainer.head_kernels`, over this rank's slice.
    """
    largest, denominator, weighted, target = sums
    if group is not None:
        everywhere = largest.clone()
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=group)
        rescale = (largest - everywhere).exp()
        largest = everywhere
        sums = torch.stack([denominator * rescale, weighted * rescale, target])
        dist.all_reduce(sums, group=group)
        denominator, weighted, target = sums
    log_sum = denominator.log() + largest
    return torch.stack([target - log_sum, log_sum - weighted / denominator]), log_sum


def _row_sums(logits: torch.Tensor, chunk: slice, request: ScoreRequest) -> torch.Tensor:
    targets = request.targets[chunk] - request.head.vocab_start
    num_valid = request.head.num_valid
    if logits.is_cuda:
        from libra.trainer.head_kernels import row_sums  # noqa: PLC0415 - needs triton

        return row_sums(
            logits, targets, num_valid=num_valid, temperature=request.sampling.temperature
        )
    scaled = _scaled(logits, request)
    largest = scaled.amax(dim=-1)
    weights = (scaled - largest[:, None]).exp_()
    column, is_here = _own_columns(targets, num_valid)
    target = torch.where(is_here, scaled.gather(1, column).squeeze(1), 0.0)
    return torch.stack([largest, weights.sum(-1), weights.mul_(scaled).sum(-1), target])


def _logit_gradients(
    logits: torch.Tensor,
    chunk: slice,
    per_row: tuple[torch.Tensor, ...],
    request: ScoreRequest,
) -> torch.Tensor:
    targets = request.targets[chunk] - request.head.vocab_start
    log_sum, entropy, of_logprob, of_entropy = per_row
    if logits.is_cuda:
        from libra.trainer.head_kernels import gradients_in_place  # noqa: PLC0415

        return gradients_in_place(
            logits,
            targets,
            (log_sum, entropy, of_logprob, of_entropy),
            num_valid=request.head.num_valid,
            temperature=request.sampling.temperature,
        )
    log_p = _scaled(logits, request) - log_sum[:, None]
    probabilities = log_p.exp()
    of_logits = log_p.add_(entropy[:, None]).mul_(-of_entropy[:, None]).sub_(of_logprob[:, None])
    of_logits.mul_(probabilities)
    column, is_here = _own_columns(targets, request.head.num_valid)
    of_logits.scatter_add_(1, column, torch.where(is_here, of_logprob, 0.0)[:, None])
    return of_logits.div_(request.sampling.temperature).to(logits.dtype)


def _scaled(logits: torch.Tensor, request: ScoreRequest) -> torch.Tensor:
    """float32 logits under the sampling temperature, with padding that no softmax sees."""
    scaled = logits.float()
    if request.sampling.temperature != 1.0:
        scaled = scaled / request.sampling.temperature
    scaled[:, request.head.num_valid :] = PADDED_LOGIT
    return scaled


def _own_columns(targets: torch.Tensor, num_valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column [n, 1] of each target, and whether it is in this rank's slice [n]."""
    is_here = (targets >= 0) & (targets < num_valid)
    return torch.where(is_here, targets, 0)[:, None], is_here
