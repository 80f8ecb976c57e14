"""Host memory for the state of checkpoints, kept from one to the next.

New memory takes several times as long to write as memory that was written before, and training
stands still while a state is taken.
"""

import threading
from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from libra.hybrid.room import touched

ALIGNMENT: Final = 64
MAX_GROWTH_BYTES: Final = 1 << 30
"""What memory that is too small grows by at most, unless a tensor is larger."""

_FLOAT_BYTES: Final = 4


class HostMemory:
    """At most one arena that nobody uses; there are two while a second state waits."""

    def __init__(self) -> None:
        self._free: Arena | None = None
        self._preparing: threading.Thread | None = None

    def prepare(self, num_bytes: int) -> None:
        """Have memory of this size ready for the next `take`, written beside what goes on."""

        def write() -> None:
            arena = Arena(self)
            arena.add(touched(-(-num_bytes // _FLOAT_BYTES)).view(np.uint8))
            self.put_back(arena)

        # A daemon: a rank that ends does not wait for it.
        self._preparing = threading.Thread(target=write, name="host memory", daemon=True)
        self._preparing.start()

    def take(self) -> "Arena":
        """For one state; waits for what is being prepared."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        arena, self._free = self._free, None
        return arena or Arena(self)

    def put_back(self, arena: "Arena") -> None:
        """Keep it for the next state, or let it go when there is one for that."""
        if self._free is None:
            self._free = arena


class Arena:
    """The tensors of one state, one behind the other, and given back together."""

    def __init__(self, owner: HostMemory) -> None:
        self._owner = owner
        self._chunks: list[NDArray[np.uint8]] = []
        self._current = 0
        """The chunk that is being filled; those before it are full."""

        self._used_bytes = 0
        """Of that chunk."""

    @property
    def num_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def add(self, chunk: NDArray[np.uint8]) -> None:
        self._chunks.append(chunk)

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of whatever was there, over a storage of exactly its size."""
        sizes = torch.Size(shape)
        part = self._part(sizes.numel() * dtype.itemsize)
        return torch.from_numpy(part).view(dtype).reshape(sizes)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor.detach())

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of these tensors or a part of one."""
        if tensor.device.type != "cpu":
            return False
        address = tensor.data_ptr()
        starts = [chunk.ctypes.data for chunk in self._chunks]
        return any(
            start <= address < start + chunk.nbytes
            for start, chunk in zip(starts, self._chunks, strict=True)
        )

    def give_back(self) -> None:
        """None of its tensors is used any more; may be called in any thread."""
        self._current = self._used_bytes = 0
        self._owner.put_back(self)

    def _part(self, num_bytes: int) -> NDArray[np.uint8]:
        while self._current < len(self._chunks):
            chunk = self._chunks[self._current]
            begin = self._used_bytes
            if begin + num_bytes <= chunk.nbytes:
                self._used_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
                return chunk[begin : begin + num_bytes]
            self._current, self._used_bytes = self._current + 1, 0
        growth = min(self.num_bytes, MAX_GROWTH_BYTES)
        self.add(np.empty(max(num_bytes, growth, ALIGNMENT), np.uint8))
        return self._part(num_bytes)


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory of a contiguous tensor on the host, as a storage of exactly its size.

    A tensor that is written takes the whole of its storage with it.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return torch.from_numpy(flat.numpy()).view(tensor.dtype).reshape(tensor.shape)
