"""When a failed child is started again: backoff, intensity window, no-progress budget. Pure.

A failure asks two budgets. The intensity window allows `max_in_window` restarts within `window_s`
(a fast loop ends there). The no-progress budget allows `max_without_progress` restarts in a row
between which the child did nothing useful, or not for `stable_s` yet (a slow loop, one death per
twenty minutes, ends there). The delay grows with the restarts still inside the window and is capped
and jittered, so that a fleet that fell together does not come back together.
"""

from collections import deque
from random import Random
from typing import TypeAlias

import msgspec

from libra.config.supervision import SupervisionConfig


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds; `jitter_fraction` 0.2 spreads a delay over 80 to 120 %."""

    backoff_initial_s: float = 1.0
    backoff_max_s: float = 60.0
    backoff_factor: float = 2.0
    jitter_fraction: float = 0.2
    max_in_window: int = 5
    window_s: float = 600.0
    max_without_progress: int = 3
    stable_s: float = 1800.0


class RestartAfter(msgspec.Struct, frozen=True):
    delay_s: float
    num_recent_restarts: int


class GiveUp(msgspec.Struct, frozen=True):
    reason: str
    first_cause: str
    num_failures: int


RestartDecision: TypeAlias = RestartAfter | GiveUp


def policy_from(config: SupervisionConfig) -> RestartPolicy:
    return RestartPolicy(
        backoff_initial_s=config.restart_backoff_initial_s,
        backoff_max_s=config.restart_backoff_max_s,
        backoff_factor=config.restart_backoff_factor,
        jitter_fraction=config.restart_jitter_fraction,
        max_in_window=config.restart_max_in_window,
        window_s=config.restart_window_s,
        max_without_progress=config.restart_max_without_progress,
        stable_s=config.restart_stable_s,
    )


class RestartBudget:
    """The failures of one child (or one gang) so far, and what they allow."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._restarted_at: deque[float] = deque()
        self._failed_at: float | None = None
        self._num_without_progress = 0
        self._num_failures = 0
        self._first_cause = ""

    @property
    def allows_none(self) -> bool:
        """Whether the first end that nobody asked for is the last, whatever caused it."""
        return not self._policy.max_in_window

    @property
    def num_failures(self) -> int:
        """Failures since the start or since the last time the window was empty."""
        return self._num_failures

    def on_progress(self, *, now: float) -> None:
        """Note that the child did something useful: served a request, trained a new step.

        It clears the row of failures once the last of them is `stable_s` ago.
        """
        if self._failed_at is None or now - self._failed_at >= self._policy.stable_s:
            self._num_without_progress = 0

    def on_failure(self, cause: str, *, now: float, rng: Random) -> RestartDecision:
        """Decide after an exit that nobody asked for. `cause` is a sentence for the operator."""
        self._forget_before(now - self._policy.window_s)
        if self._num_failures == 0:
            self._first_cause = cause
        self._num_failures += 1
        self._failed_at = now
        if (spent := self._spent()) is not None:
            return GiveUp(spent, self._first_cause, self._num_failures)
        delay_s = self._delay_s(rng)
        self._restarted_at.append(now)
        self._num_without_progress += 1
        return RestartAfter(delay_s, len(self._restarted_at))

    def _forget_before(self, horizon: float) -> None:
        while self._restarted_at and self._restarted_at[0] <= horizon:
            self._restarted_at.popleft()
        # With an empty window and progress since the last restart, a new failure is a new story.
        if not self._restarted_at and self._num_without_progress == 0:
            self._num_failures = 0

    def _spent(self) -> str | None:
        policy = self._policy
        if len(self._restarted_at) >= policy.max_in_window:
            return f"{policy.max_in_window} restarts within {policy.window_s:g} s"
        if self._num_without_progress >= policy.max_without_progress:
            return f"{policy.max_without_progress} restarts in a row without progress"
        return None

    def _delay_s(self, rng: Random) -> float:
        policy = self._policy
        # The exponent is bounded so that a long window cannot overflow a float.
        exponent = min(len(self._restarted_at), 64)
        delay_s = min(
            policy.backoff_max_s, policy.backoff_initial_s * policy.backoff_factor**exponent
        )
        return delay_s * (1 + rng.uniform(-policy.jitter_fraction, policy.jitter_fraction))
