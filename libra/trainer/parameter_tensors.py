"""A flat buffer of parameters, kept parameter by parameter."""

from bisect import bisect_right
from collections.abc import Callable, Iterable

import torch


class ParameterTensors:
    """A flat buffer of which only parameters are kept: a tensor for each of them."""

    def __init__(
        self, ranges: Iterable[tuple[int, int]], empty: Callable[[int], torch.Tensor]
    ) -> None:
        """`ranges`: where each parameter begins and ends; `empty`: float32[n] on the host."""
        self._ranges = sorted(ranges)
        self._tensors = [empty(end - begin) for begin, end in self._ranges]
        self._tensor_at = dict(zip(self._ranges, self._tensors, strict=True))

    def __getitem__(self, where: slice) -> torch.Tensor:
        """The whole of one parameter, as Megatron asks for it."""
        return self._tensor_at[where.start, where.stop]

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Copy `values` to `begin`, but for what lies between parameters and behind them."""
        end = begin + values.numel()
        at = max(0, bisect_right(self._ranges, begin, key=lambda it: it[0]) - 1)
        for (first, last), tensor in zip(self._ranges[at:], self._tensors[at:], strict=True):
            if first >= end:
                break
            low, high = max(first, begin), min(last, end)
            if low < high:
                tensor[low - first : high - first].copy_(values[low - begin : high - begin])


def host_tensor(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32)
