"""Tracks for spans that overlap freely: each takes the lowest lane that is free. Pure."""

from heapq import heappop, heappush


class Lanes:
    """Lanes of one kind; as many exist as were ever needed at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._free: list[int] = []
        self._num_lanes = 0

    def take(self) -> int:
        if self._free:
            return heappop(self._free)
        self._num_lanes += 1
        return self._num_lanes - 1

    def give_back(self, lane: int) -> None:
        heappush(self._free, lane)

    def track(self, lane: int) -> str:
        """`vllm-0 #3`."""
        return f"{self._name} #{lane}"
