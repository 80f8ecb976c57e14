"""A rank's gradient sums and weights as the lanes carry them: flat, in an order of their own.

Megatron pads its buffers for the number of data-parallel ranks, which the core and a hybrid replica
have a different number of. Parameters in the order of their names have no padding.
"""

import sys
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from libra.hybrid.checksum import Floats, checksum
from libra.transfer.packing import Checksum

if sys.byteorder != "little":
    raise ImportError("hybrid lanes are written for little-endian machines")

_WORD_BYTES = 8
_ODD = 0x5851F42D4C957F2D


class GradientView:
    """Reads and writes the buffers of one Megatron model."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._parameters = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        self.count = sum(parameter.numel() for _, parameter in self._parameters)

    @property
    def layout_hash(self) -> str:
        """Equal for two ranks whose gradients can be added."""
        shapes = [(name, tuple(it.shape), str(it.dtype)) for name, it in self._parameters]
        return blake2b(repr(shapes).encode(), digest_size=16).hexdigest()

    @torch.no_grad()
    def write(self, room: Floats) -> None:
        """Copy the gradient sums into float32[count]."""
        for gradient, part in self._pairs(room):
            part.copy_(gradient)

    @torch.no_grad()
    def load(self, values: Floats) -> None:
        """Put float32[count] in the place of the gradient sums."""
        for gradient, part in self._pairs(values):
            gradient.copy_(part)

    @torch.no_grad()
    def add(self, values: Floats) -> None:
        """Add float32[count] to the gradient sums."""
        for gradient, part in self._pairs(values):
            gradient.add_(part.to(gradient.device))

    def scale(self, factor: float) -> None:
        self._model.scale_gradients(factor)

    @torch.no_grad()
    def square_sum(self) -> float:
        """Of this rank's gradient sums; to compare with, so float32 is exact enough."""
        norms = [torch.linalg.vector_norm(gradient) for gradient in self._gradients()]
        return float(torch.stack(norms).double().square().sum())

    @torch.no_grad()
    def weights_digest(self) -> int:
        """64 bits over this rank's weights as they are, bit for bit."""
        total = 0
        for _, parameter in self._parameters:
            total = (total * _ODD + _digest(parameter.detach())) % 2**64
        return total

    def gather_shards(self) -> None:
        """Make the reduced gradients whole where each data-parallel rank holds a shard of them.

        Every rank of the world takes part.
        """
        model = self._model
        if not model.ddp_config.use_distributed_optimizer:
            return
        for buffer in model.buffers + model.expert_parallel_buffers:
            group = buffer.data_parallel_group
            if group.size() == 1:
                continue
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // group.size()
                own = bucket.grad_data[group.rank() * size : (group.rank() + 1) * size]
                torch.distributed.all_gather_into_tensor(bucket.grad_data, own.clone(), group=group)

    def _gradients(self) -> Iterator[torch.Tensor]:
        for _, parameter in self._parameters:
            yield parameter.main_grad

    def _pairs(self, values: Floats) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each gradient and its part of `values`, in its shape."""
        flat, start = torch.from_numpy(values), 0
        for gradient in self._gradients():
            end = start + gradient.numel()
            yield gradient, flat[start:end].view(gradient.shape)
            start = end


def _digest(weights: torch.Tensor) -> int:
    words = _as_words(weights)
    if words.is_cuda:
        whole = Checksum(words.device)
        whole.add(words)
        return int(whole.value.item()) % 2**64
    return checksum(words.view(torch.float32).numpy())


def _as_words(weights: torch.Tensor) -> Any:
    """The bytes as uint8[n], n a multiple of eight; what is added is zeros."""
    raw = weights.contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % _WORD_BYTES:
        raw = raw.clone()
    missing = -raw.numel() % _WORD_BYTES
    return torch.nn.functional.pad(raw, (0, missing)) if missing else raw
