"""A circuit breaker per incarnation: closed, open for a while, half-open with one trial.

Only faults of the instance count. A bad request proves that the instance answers; saturation
proves that it lives and only asks for a pause. A trial that is cancelled, or that has no outcome
within TRIAL_LEASE_S, gives its place to the next one, so half-open cannot last for ever.
"""

from math import inf
from typing import Literal, TypeAlias

from libra.errors import InvariantError

FAULTS_TO_OPEN = 3
"""Faults in a row that open a closed breaker."""

OPEN_INITIAL_S = 1.0
OPEN_MAX_S = 30.0
TRIAL_LEASE_S = 30.0
"""A generation may take long; after this another request may try the instance too."""

SATURATED_DEFAULT_S = 0.5
"""Pause after 429 or 503 without Retry-After; the next one in a row doubles it."""

SATURATED_MIN_S = 0.05
SATURATED_MAX_S = 5.0
"""Bounds of what Retry-After may ask for."""

BreakerState: TypeAlias = Literal["closed", "open", "half_open"]


class Breaker:
    """Outcomes in, `state(now)` and `is_saturated(now)` out."""

    __slots__ = (
        "_num_faults",
        "_num_saturated",
        "_open_s",
        "_open_until",
        "_saturated_until",
        "_trial_serial",
        "_trial_until",
    )

    def __init__(self) -> None:
        self._num_faults = 0
        self._open_s = 0.0
        self._open_until = -inf
        self._trial_serial: int | None = None
        self._trial_until = -inf
        self._num_saturated = 0
        self._saturated_until = -inf

    @property
    def is_calm(self) -> bool:
        """True when a success would change nothing."""
        return self._num_faults == 0 and self._num_saturated == 0

    def state(self, now: float) -> BreakerState:
        if self._open_s == 0.0:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def is_trial_taken(self, now: float) -> bool:
        """Tell whether the one trial of half-open is under way."""
        return self._trial_serial is not None and now < self._trial_until

    def is_saturated(self, now: float) -> bool:
        return now < self._saturated_until

    def next_change_at(self, now: float) -> float:
        """When time alone changes an answer above; inf when it does not."""
        ends = (self._open_until, self._trial_until, self._saturated_until)
        return min((end for end in ends if end > now), default=inf)

    def on_routed(self, serial: int, now: float) -> None:
        """Note a request that goes out; in half-open it becomes the trial."""
        if self.state(now) != "half_open":
            return
        if self.is_trial_taken(now):
            raise InvariantError(
                f"request {serial} was routed past the trial of a half-open breaker"
            )
        self._trial_serial = serial
        self._trial_until = now + TRIAL_LEASE_S

    def on_answered(self) -> None:
        """Close: the instance answered, be it with a 4xx, so it works and has room."""
        self._close()
        self._num_saturated = 0
        self._saturated_until = -inf

    def on_saturated(self, retry_after_s: float | None, now: float) -> None:
        """Back off, and only that: a full queue is no fault.

        Refusals of requests that were under way before the pause began do not lengthen it.
        """
        self._close()
        if self.is_saturated(now) and retry_after_s is None:
            return
        self._num_saturated += 1
        doubled_s = SATURATED_DEFAULT_S * 2.0 ** min(self._num_saturated - 1, 10)
        pause_s = doubled_s if retry_after_s is None else retry_after_s
        self._saturated_until = now + min(max(pause_s, SATURATED_MIN_S), SATURATED_MAX_S)

    def on_fault(self, serial: int, now: float) -> None:
        """Count a request the instance broke. In half-open only the trial's outcome counts."""
        state = self.state(now)
        if state == "open" or (state == "half_open" and serial != self._trial_serial):
            return
        self._num_faults += 1
        if state == "half_open" or self._num_faults >= FAULTS_TO_OPEN:
            self._open_s = min(max(OPEN_INITIAL_S, 2 * self._open_s), OPEN_MAX_S)
            self._open_until = now + self._open_s
            self._end_trial()

    def on_cancelled(self, serial: int) -> None:
        """Nobody knows how it would have ended: a trial's place is free again."""
        if serial == self._trial_serial:
            self._end_trial()

    def _close(self) -> None:
        self._num_faults = 0
        self._open_s = 0.0
        self._open_until = -inf
        self._end_trial()

    def _end_trial(self) -> None:
        self._trial_serial = None
        self._trial_until = -inf
