"""Any history of outcomes: the breaker opens only for faults and never stays shut for good."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from libra.scheduling.breaker import OPEN_MAX_S, SATURATED_MAX_S, TRIAL_LEASE_S, Breaker

PATIENCE_S = OPEN_MAX_S + TRIAL_LEASE_S + SATURATED_MAX_S


class BreakerMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.breaker, self.now, self.serial = Breaker(), 0.0, 0
        self.open, self.faults_in_a_row = [], 0

    def admits(self, now):
        state = self.breaker.state(now)
        is_taken = state == "half_open" and self.breaker.is_trial_taken(now)
        return state != "open" and not is_taken and not self.breaker.is_saturated(now)

    @rule(elapsed=st.sampled_from([0.0, 0.1, 1.0, 5.0, 40.0]))
    def wait(self, elapsed):
        self.now += elapsed

    @rule()
    def route(self):
        if self.admits(self.now):
            self.serial += 1
            self.breaker.on_routed(self.serial, self.now)
            self.open.append(self.serial)

    @rule(pick=st.integers(0, 99), how=st.sampled_from(["ok", "4xx", "429", "fault", "cancel"]))
    def end(self, pick, how):
        if not self.open:
            return
        serial = self.open.pop(pick % len(self.open))
        if how == "fault":
            self.faults_in_a_row += 1
            self.breaker.on_fault(serial, self.now)
        elif how == "cancel":
            self.breaker.on_cancelled(serial)
        else:
            self.faults_in_a_row = 0
            if how == "429":
                self.breaker.on_saturated(None, self.now)
            else:
                self.breaker.on_answered()
            assert self.breaker.state(self.now) == "closed"

    @invariant()
    def it_opens_only_after_faults_in_a_row(self):
        if hasattr(self, "breaker") and self.breaker.state(self.now) != "closed":
            assert self.faults_in_a_row >= 3

    @invariant()
    def with_patience_it_admits_again(self):
        if hasattr(self, "breaker"):
            assert self.admits(self.now + PATIENCE_S)

    @invariant()
    def the_next_change_is_announced(self):
        if not hasattr(self, "breaker"):
            return
        due = self.breaker.next_change_at(self.now)
        before = min(due, self.now + PATIENCE_S) - 1e-6
        if before > self.now:
            assert self.admits(before) == self.admits(self.now)


BreakerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestBreaker = BreakerMachine.TestCase
