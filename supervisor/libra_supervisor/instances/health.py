"""Whether one server process does its work, from what it answers and whether it makes progress.

vLLM's /health tells of a dead engine and not of a hung one, so progress decides: the token
counters must move while requests run. The law:

* loading until /health has answered once; how long that may take is the process's start deadline.
* An idle server, a paused one and one that is reloading owe no progress. All owe an answer to
  /health: the API process answers it while the engine loads.
* suspect after one "unhealthy" answer; after `silence_s` without an answer and without progress;
  after `stall_s` without progress while requests run. A time-out under load is not evidence
  against a server whose counters move.
* A silent or stalled suspect is probed: passing makes it ready, failing makes it dead.
* dead after two "unhealthy" answers in a row (vLLM answers so when its engine is gone, for good).

Pure; times in seconds on one clock.
"""

from typing import Literal, TypeAlias

import msgspec

HealthAnswer: TypeAlias = Literal["healthy", "unhealthy", "no_answer"]
HealthState: TypeAlias = Literal["loading", "ready", "suspect", "dead"]

UNHEALTHY_TO_DIE = 2


class Health(msgspec.Struct, frozen=True):
    state: HealthState
    reason: str = ""
    """A sentence; empty when loading or ready."""

    needs_probe: bool = False
    """Send one short completion and tell `on_probe` how it went."""


class HealthMonitor:
    """The health of one incarnation; a new process gets a new monitor."""

    def __init__(self, *, stall_s: float, silence_s: float, now: float) -> None:
        self._stall_s = stall_s
        self._silence_s = silence_s
        self._has_answered = False
        self._num_unhealthy = 0
        self._answered_at = now
        self._progressed_at = now
        self._moved_at = now
        self._num_tokens: float | None = None
        self._is_excused = False
        self._is_probed = False
        self._death = ""

    def on_health(self, answer: HealthAnswer, *, now: float) -> None:
        if answer == "healthy":
            if not self._has_answered:
                # Loading may take longer than any limit that holds from here on.
                self._progressed_at = now
            self._has_answered = True
            self._num_unhealthy = 0
            self._answered_at = now
        elif answer == "unhealthy":
            self._num_unhealthy += 1
            if self._num_unhealthy >= UNHEALTHY_TO_DIE:
                self._death = "it calls itself unhealthy: its engine is gone"

    def on_progress(
        self,
        *,
        num_tokens: float | None,
        num_running: float | None,
        num_in_flight: int,
        now: float,
    ) -> None:
        """Take one look at the counters; None where nothing is known of them.

        `num_in_flight` are our own requests there: the gauge of a server that hangs may have
        frozen at 0 before they arrived.
        """
        if num_tokens is not None and num_tokens != self._num_tokens:
            self._num_tokens = num_tokens
            self._moved_at = self._progressed_at = now
        is_idle = not num_running and num_in_flight == 0
        if is_idle or self._is_excused:
            self._progressed_at = now

    def on_excused(self, *, is_excused: bool, now: float) -> None:
        """Note that a pause or a reload began or ended; meanwhile no progress is owed."""
        self._is_excused = is_excused
        self._progressed_at = now

    def on_probe_sent(self) -> None:
        self._is_probed = True

    def on_probe(self, *, has_passed: bool, now: float) -> None:
        self._is_probed = False
        if has_passed:
            self._answered_at = self._progressed_at = now
        elif self._doubt(now):
            self._death = f"{self._doubt(now)}, and it failed a probe"

    def health(self, *, now: float) -> Health:
        if self._death:
            return Health("dead", self._death)
        if not self._has_answered:
            return Health("loading")
        if self._num_unhealthy:
            return Health("suspect", "it calls itself unhealthy")
        doubt = self._doubt(now)
        return Health("suspect", doubt, not self._is_probed) if doubt else Health("ready")

    def _doubt(self, now: float) -> str:
        silent_s = now - max(self._answered_at, self._moved_at)
        if silent_s >= self._silence_s:
            return f"it has been silent for {silent_s:.0f} s"
        if self._is_excused:
            return ""
        stalled_s = now - self._progressed_at
        if stalled_s >= self._stall_s:
            return f"it has made no progress for {stalled_s:.0f} s while requests run"
        return ""
