"""Virtual time: a queue of callbacks."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Timeline:
    """Runs callbacks in order of their instants; equal instants keep the order of scheduling."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    @property
    def now(self) -> float:
        return self._now

    def at(self, instant: float, action: Callable[[], None]) -> None:
        """Call `action` at `instant`, or at once when that has passed."""
        heappush(self._due, (max(instant, self._now), next(self._serial), action))

    def run(self, *, until: Callable[[], bool]) -> bool:
        """Go on until `until()` holds; False when nothing is left to happen before that."""
        while not until():
            if not self._due:
                return False
            self._now, _, action = heappop(self._due)
            action()
        return True
