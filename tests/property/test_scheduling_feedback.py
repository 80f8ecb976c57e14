"""Any history of snapshots: admission, bias and penalty follow from the inputs alone."""

from math import isclose

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fleets import fleet_of, request, snapshot
from libra.ids import InstanceId
from libra.scheduling.slow_start import DURATION_S

TTL, PENALTY, ALPHA = 10.0, 60.0, 0.3
ENTER, EXIT = 0.9, 0.75
I0 = InstanceId("i0")
SIGNAL = st.none() | st.integers(0, 50)
OCCUPANCY = st.none() | st.sampled_from([0.0, 0.5, 0.74, 0.75, 0.8, 0.9, 0.91, 1.0])


class FeedbackMachine(RuleBasedStateMachine):
    """One instance; `seen` is every snapshot with what was in flight when it came."""

    @initialize()
    def begin(self):
        self.scheduler = fleet_of(1, enable_metrics_feedback=True)
        self.now = DURATION_S + 1
        self.scheduler.on_tick(self.now)
        self.held, self.seen = [], []

    @rule(elapsed=st.sampled_from([0.0, 0.5, 3.0, 9.9, 10.0, 61.0]))
    def wait(self, elapsed):
        self.now += elapsed
        self.scheduler.on_tick(self.now)

    @rule()
    def route(self):
        decision = self.scheduler.route(request(), self.now)
        if hasattr(decision, "reservation"):
            self.held.append(decision.reservation)
        else:
            self.scheduler.abandon(decision.ticket, self.now)
        assert hasattr(decision, "reservation") != self.is_blocked()

    @rule()
    def release(self):
        if self.held:
            self.scheduler.cancel(self.held.pop(), self.now)

    @rule(
        age=st.sampled_from([0.0, 1.0, 9.0, 11.0]),
        running=SIGNAL,
        waiting=SIGNAL,
        use=OCCUPANCY,
        preempted=st.integers(0, 2),
        is_repeated=st.booleans(),
    )
    def scrape(self, age, running, waiting, use, preempted, is_repeated):
        counter = self.counter() + preempted
        at = self.now - age
        taken = snapshot(
            at, num_running=running, num_waiting=waiting, kv_use_fraction=use,
            num_preemptions=counter,
        )  # fmt: skip
        if not self.seen or at > self.seen[-1][1].sampled_at:
            self.seen.append((self.now, taken, len(self.held)))
        for _ in range(1 + is_repeated):
            self.scheduler.on_snapshot(I0, taken, self.now)

    # The model: each answer is worked out anew from all inputs.

    def counter(self):
        return self.seen[-1][1].num_preemptions if self.seen else 7

    def is_blocked(self):
        is_set, occupancy_at = False, None
        for _, taken, _ in self.seen:
            use = taken.kv_use_fraction
            if use is not None:
                occupancy_at = taken.sampled_at
                is_set = use > ENTER or (is_set and use >= EXIT)
        return is_set and self.now < occupancy_at + TTL

    def bias(self):
        bias, bias_at = 0.0, None
        for came_at, taken, local in self.seen:
            if taken.num_running is None or taken.num_waiting is None:
                continue
            before = bias if bias_at is not None and came_at < bias_at + TTL else 0.0
            observed = taken.num_running + taken.num_waiting
            bias = ALPHA * (observed - local) + (1 - ALPHA) * before
            bias_at = taken.sampled_at
        return bias if bias_at is not None and self.now < bias_at + TTL else 0.0

    def is_penalized(self):
        pairs = zip(self.seen, self.seen[1:], strict=False)
        rises = [b[0] for a, b in pairs if b[1].num_preemptions > a[1].num_preemptions]
        return any(self.now < at + PENALTY for at in rises)

    @invariant()
    def the_view_equals_the_model(self):
        if not hasattr(self, "seen"):
            return
        (view,) = self.scheduler.instances(self.now)
        assert view.removed_by == ("occupancy" if self.is_blocked() else None)
        assert isclose(view.bias, self.bias(), abs_tol=1e-9)
        assert isclose(view.load, len(self.held) + self.bias(), abs_tol=1e-9)
        assert view.is_penalized == self.is_penalized()


FeedbackMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestFeedback = FeedbackMachine.TestCase
