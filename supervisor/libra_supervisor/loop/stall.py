"""How long the event loop kept its tasks waiting: what a blocking call does to everyone else.

A task asks to be woken every PERIOD_S and sees how much later it was. A stall shows with its
length less up to one period.
"""

from collections import deque
from typing import Final, Never

from libra import clock

PERIOD_S: Final = 0.02
WINDOW_S: Final = 60.0
BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class StallMeter:
    """Counts stalls by length since the start, and keeps the longest of the last WINDOW_S. Pure."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._longest: deque[tuple[float, float]] = deque()
        """(when, length), lengths falling: only what can still become the longest."""

    def on_woken(self, *, late_s: float, now: float) -> None:
        late_s = max(0.0, late_s)
        place = next((k for k, bound in enumerate(BOUNDS_S) if late_s <= bound), len(BOUNDS_S))
        self._counts[place] += 1
        self._sum_s += late_s
        while self._longest and self._longest[-1][1] <= late_s:
            self._longest.pop()
        self._longest.append((now, late_s))
        self._forget(now)

    def longest_s(self, *, now: float) -> float:
        """The longest stall of the last WINDOW_S; 0 when nothing was measured in it."""
        self._forget(now)
        return self._longest[0][1] if self._longest else 0.0

    @property
    def sum_s(self) -> float:
        return self._sum_s

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and number of stalls up to it, as Prometheus counts."""
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        found, total = [], 0
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found

    def _forget(self, now: float) -> None:
        while self._longest and self._longest[0][0] <= now - WINDOW_S:
            self._longest.popleft()


async def measure_stalls(meter: StallMeter) -> Never:
    """Measure the loop that runs this task, until it is cancelled."""
    while True:
        due_at = clock.now() + PERIOD_S
        await clock.sleep_until(due_at)
        now = clock.now()
        meter.on_woken(late_s=now - due_at, now=now)
