"""What one instance's /metrics change in routing: bias, admission, preemption penalty.

Control law. Let `local` be our own load estimate (own plus remote in flight) and `observed` the
server's. Each new snapshot moves `bias` by the weight alpha towards observed - local, and routing
uses local + bias: in-flight changes between two scrapes count at once, drift is corrected slowly.

Staleness rule. A signal older than the TTL is not used: the bias counts as 0 and occupancy does
not block (open loop). The latch keeps its state meanwhile; only a fresh value moves it.
"""

from math import inf
from typing import TYPE_CHECKING

from libra.scheduling.hysteresis import Latch

if TYPE_CHECKING:
    from libra.config.rollout import SchedulingConfig
    from libra.scheduling.load import LoadSnapshot


class Feedback:
    """The closed-loop state of one incarnation of one instance."""

    def __init__(self, config: "SchedulingConfig") -> None:
        self._config = config
        self._bias = 0.0
        self._bias_at = -inf
        self._occupancy_at = -inf
        self._occupancy = Latch(
            enter=config.metrics_admission_enter, exit_below=config.metrics_admission_exit
        )
        self._penalty_until = -inf
        self.snapshot: LoadSnapshot | None = None
        self._last_preemptions: float | None = None
        self._compared_with: LoadSnapshot | None = None
        self.num_preemptions_seen = 0.0

    def on_process_started(self) -> None:
        """Note that the process is younger than our watch, so its counters began at 0."""
        self._last_preemptions = 0.0

    def on_reloaded(self) -> None:
        """Forget preemptions: vLLM preempts what runs when it pauses for new weights."""
        self._penalty_until = -inf
        self._last_preemptions = None
        self._compared_with = None

    def has_counter_fallen(self, snapshot: "LoadSnapshot") -> bool:
        """Tell whether a cumulative counter fell: then it belongs to another process."""
        return _fell(self._last_preemptions, snapshot.num_preemptions)

    def is_new(self, snapshot: "LoadSnapshot") -> bool:
        """Tell a new snapshot from one that was counted already or is older than the last."""
        return self.snapshot is None or snapshot.sampled_at > self.snapshot.sampled_at

    def on_snapshot(
        self, snapshot: "LoadSnapshot", *, local: float, observed: float | None, now: float
    ) -> None:
        """Count one new snapshot; `local` and `observed` are in units of the load metric."""
        if observed is not None:
            alpha = self._config.metrics_bias_alpha
            self._bias = alpha * (observed - local) + (1 - alpha) * self._bias_at_time(now)
            self._bias_at = snapshot.sampled_at
        if snapshot.kv_use_fraction is not None:
            self._occupancy.on_value(snapshot.kv_use_fraction)
            self._occupancy_at = snapshot.sampled_at
        if self._shows_preemption(snapshot):
            self._penalty_until = now + self._config.metrics_preemption_penalty_ttl_s
        self._compared_with = self.snapshot = snapshot

    def bias(self, now: float) -> float:
        return self._bias_at_time(now)

    def is_blocked(self, now: float) -> bool:
        """Tell whether a fresh occupancy holds the latch set."""
        return self._occupancy.is_set and self._is_fresh(self._occupancy_at, now)

    def is_penalized(self, now: float) -> bool:
        """Tell whether the window after a preemption lasts."""
        return now < self._penalty_until

    def is_fresh(self, now: float) -> bool:
        """Tell whether the last snapshot, of whatever signals, is within the TTL."""
        return self.snapshot is not None and self._is_fresh(self.snapshot.sampled_at, now)

    def ages_s(self, now: float) -> dict[str, float]:
        """Age by signal; a signal never seen is absent."""
        seen = {"bias": self._bias_at, "occupancy": self._occupancy_at}
        return {name: now - at for name, at in seen.items() if at > -inf}

    def next_change_at(self, now: float) -> float:
        """When time alone will change an answer above; inf when it will not."""
        ttl = self._config.metrics_staleness_ttl_s
        ends = [self._penalty_until, self._bias_at + ttl, self._occupancy_at + ttl]
        if self.snapshot is not None:
            ends.append(self.snapshot.sampled_at + ttl)
        return min((end for end in ends if end > now), default=inf)

    def _bias_at_time(self, now: float) -> float:
        return self._bias if self._is_fresh(self._bias_at, now) else 0.0

    def _is_fresh(self, at: float, now: float) -> bool:
        return now < at + self._config.metrics_staleness_ttl_s

    def _shows_preemption(self, snapshot: "LoadSnapshot") -> bool:
        """Look for a counter that rose, or running requests pushed back to waiting.

        vLLM counts a preemption only when the request runs again, which is seconds late.
        """
        rose = self._counter_rise(snapshot.num_preemptions) > 0
        last = self._compared_with
        return rose or (last is not None and _was_pushed_back(last, snapshot))

    def _counter_rise(self, value: float | None) -> float:
        if value is None:
            return 0.0
        last, self._last_preemptions = self._last_preemptions, value
        if last is None:  # history from before we watched
            return 0.0
        rise = value if value < last else value - last
        self.num_preemptions_seen += rise
        return rise


def _was_pushed_back(last: "LoadSnapshot", snapshot: "LoadSnapshot") -> bool:
    return _fell(last.num_running, snapshot.num_running) and _fell(
        snapshot.num_waiting_for_capacity, last.num_waiting_for_capacity
    )


def _fell(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after < before
