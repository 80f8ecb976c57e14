"""Triton kernels for the scores of tokens: each logit is read once forward and once backward.

Imported on CUDA only. The plain torch versions beside them in `libra.trainer.head` are the
reference; they move about ten times as many bytes, which is a tenth of a training step.
"""

from typing import Any

import torch
import triton
import triton.language as tl

# Annotations of kernels are strings: the compiler reads them as code, and knows no `Any`.
BLOCK = 4096
NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _row_sums(  # noqa: PLR0913, PLR0917 - a kernel takes what it needs one by one
    logits: "Any",
    targets: "Any",
    sums: "Any",
    row_stride: "Any",
    num_rows: "Any",
    num_valid: "Any",
    inverse_temperature: "Any",
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    largest = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, num_valid, block):
        columns = start + tl.arange(0, block)
        values = tl.load(
            logits + row * row_stride + columns, mask=columns < num_valid, other=-float("inf")
        )
        scaled = values.to(tl.float32) * inverse_temperature
        new_largest = tl.maximum(largest, tl.max(scaled, axis=0))
        rescale = tl.exp(largest - new_largest)
        weights = tl.exp(scaled - new_largest)
        # 0 times the infinity of a masked column would be NaN.
        finite = tl.where(columns < num_valid, scaled, 0.0)
        total = total * rescale + tl.sum(weights, axis=0)
        weighted = weighted * rescale + tl.sum(weights * finite, axis=0)
        largest = new_largest
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < num_valid)
    of_target = tl.load(logits + row * row_stride + target, mask=is_here, other=0.0)
    tl.store(sums + row, largest)
    tl.store(sums + num_rows + row, total)
    tl.store(sums + 2 * num_rows + row, weighted)
    tl.store(sums + 3 * num_rows + row, of_target.to(tl.float32) * inverse_temperature)


@triton.jit  # type: ignore[untyped-decorator]
def _logit_gradients(  # noqa: PLR0913, PLR0917
    logits: "Any",
    targets: "Any",
    log_sums: "Any",
    entropies: "Any",
    of_logprobs: "Any",
    of_entropies: "Any",
    row_stride: "Any",
    num_columns: "Any",
    num_valid: "Any",
    inverse_temperature: "Any",
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    here = logits + row * row_stride + columns
    is_valid = columns < num_valid
    values = tl.load(here, mask=is_valid, other=0.0).to(tl.float32)
    log_p = values * inverse_temperature - tl.load(log_sums + row)
    of_logprob = tl.load(of_logprobs + row)
    of_entropy = tl.load(of_entropies + row)
    gradient = -tl.exp(log_p) * (of_logprob + of_entropy * (log_p + tl.load(entropies + row)))
    gradient += tl.where(columns == tl.load(targets + row), of_logprob, 0.0)
    gradient = tl.where(is_valid, gradient * inverse_temperature, 0.0)
    tl.store(here, gradient.to(logits.dtype.element_ty), mask=columns < num_columns)


def row_sums(
    logits: torch.Tensor, targets: torch.Tensor, *, num_valid: int, temperature: float
) -> torch.Tensor:
    """float32[4, n] of logits [n, v] over the temperature, in the first `num_valid` columns.

    Per row: the largest l; the sum of exp(l - largest); the same weighted by l; and the target's
    l, 0 where the target is not among the columns. `targets` are column indices, int64[n].
    """
    num_rows = len(logits)
    sums = torch.empty(4, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _row_sums[(num_rows,)](
            logits,
            targets,
            sums,
            logits.stride(0),
            num_rows,
            num_valid,
            1.0 / temperature,
            block=BLOCK,
            num_warps=NUM_WARPS,
        )
    return sums


def gradients_in_place(
    logits: torch.Tensor,
    targets: torch.Tensor,
    per_row: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    num_valid: int,
    temperature: float,
) -> torch.Tensor:
    """Turn logits [n, v] into the gradient of the scores; columns past `num_valid` become 0.

    `per_row`: log of the softmax's denominator, entropy, and the gradients of the logprob and of
    the entropy, each float32[n].
    """
    num_rows, num_columns = logits.shape
    if num_rows:
        _logit_gradients[(num_rows, triton.cdiv(num_columns, BLOCK))](
            logits,
            targets,
            *(values.contiguous() for values in per_row),
            logits.stride(0),
            num_columns,
            num_valid,
            1.0 / temperature,
            block=BLOCK,
            num_warps=NUM_WARPS,
        )
    return logits
