"""Any order of events leaves every trajectory accounted exactly once."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libra.ids import PolicyVersion
from libra.rollouts.accounts import BufferLimits
from libra.rollouts.buffer import BufferState, RolloutBuffer
from trajectories import prompt, trajectory

N_SAMPLES, BATCH, BOUND, CONCURRENT = 2, 4, 1, 10


class Accounts(RuleBasedStateMachine):
    """The model keeps where each sample is, from the inputs alone."""

    def __init__(self):
        super().__init__()
        self.limits = BufferLimits(
            n_samples=N_SAMPLES,
            batch_size=BATCH,
            max_concurrent=CONCURRENT,
            max_head_offpolicyness=BOUND,
            max_group_attempts=2,
            lease_s=5.0,
        )
        self.buffer = RolloutBuffer(self.limits)
        self.version = 0
        self.now = 0.0
        self.next_row = 0
        self.open = {}
        self.finished_versions = {}
        self.submitted = 0
        self.consumed = 0
        self.gone = []

    @rule()
    def admit_what_fits(self):
        for _ in range(self.buffer.num_admissible(serving_version=PolicyVersion(self.version))):
            group = self.buffer.admit_pending()
            if group is None:
                group = self.buffer.admit(prompt(self.next_row))
                self.next_row += 1
            if group is None:
                continue
            self.open[group] = ["enqueued"] * N_SAMPLES
            self.submitted += N_SAMPLES

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def start_a_sample(self, data):
        group, index = self.pick(data, "enqueued")
        if group is not None:
            self.buffer.on_started(group.group_id, index, now=self.now)
            self.open[group][index] = self.now

    @precondition(lambda self: self.open)
    @rule(data=st.data(), age=st.integers(0, 3))
    def finish_a_sample(self, data, age):
        group, index = self.pick(data, "running")
        if group is not None:
            self.finish(group, index, age)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ages=st.lists(st.integers(0, 3), min_size=2, max_size=2))
    def finish_whole_groups(self, data, ages):
        """Without it few runs would come as far as a batch."""
        some = data.draw(st.lists(st.sampled_from(list(self.open)), min_size=1, unique=True))
        for group, age in zip(some, ages * len(some), strict=False):
            for index, state in enumerate(list(self.open[group])):
                if state == "enqueued":
                    self.buffer.on_started(group.group_id, index, now=self.now)
                    self.open[group][index] = self.now
                if state != "finished":
                    self.finish(group, index, age)

    def finish(self, group, index, age):
        version = max(0, self.version - age)
        self.buffer.on_finished(trajectory(group, index, version=version, reward=float(index)))
        self.open[group][index] = "finished"
        oldest = min(version, self.finished_versions.get(group, version))
        self.finished_versions[group] = oldest
        if all(s == "finished" for s in self.open[group]):
            del self.open[group]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), kind=st.sampled_from(["engine", "timeout", "reward", "cancelled"]))
    def fail_a_sample(self, data, kind):
        group, index = self.pick(data, "running", "enqueued")
        if group is not None:
            self.buffer.on_failed(group.group_id, index, kind, "")
            self.leave(group)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), kind=st.sampled_from(["engine", "timeout", "reward", "lease"]))
    def fail_a_sample_whose_sibling_has_finished(self, data, kind):
        """Left to single steps, that is as good as never drawn."""
        group = data.draw(st.sampled_from(list(self.open)))
        states = self.open[group]
        if "finished" not in states:
            if states[0] == "enqueued":
                self.buffer.on_started(group.group_id, 0, now=self.now)
            self.finish(group, 0, age=0)
        other = 1 - self.open[group].index("finished")
        self.buffer.on_failed(group.group_id, other, kind, "")
        self.leave(group)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def hear_late_news(self, data):
        group = data.draw(st.sampled_from(self.gone))
        before = self.buffer.counts
        self.buffer.on_finished(trajectory(group, 0))
        assert self.buffer.counts == before

    @rule(elapsed_s=st.sampled_from([0.0, 1.0, 2.0, 2.5, 5.0, 5.5, 6.0]))
    def let_time_pass(self, elapsed_s):
        self.now += elapsed_s
        self.buffer.on_tick(now=self.now)
        for group, states in list(self.open.items()):
            if any(isinstance(s, float) and self.now - s > 5.0 for s in states):
                self.leave(group)

    @rule()
    def train_a_step(self):
        batch = self.buffer.take_batch(version=PolicyVersion(self.version))
        # Whether or not a batch came out, what is too old is gone.
        oldest_allowed = self.version - BOUND
        ready = {g: v for g, v in self.finished_versions.items() if g not in self.open}
        for group, version in ready.items():
            if version < oldest_allowed:
                self.finished_versions.pop(group)
        if batch is None:
            return
        for group in batch:
            assert self.version - self.finished_versions.pop(group.admitted) <= BOUND
        self.consumed += BATCH
        self.version += 1

    @rule()
    def save_and_resume(self):
        raw = msgspec.msgpack.encode(self.buffer.state())
        state = msgspec.msgpack.decode(raw, type=BufferState)
        version = PolicyVersion(self.version)
        self.buffer = RolloutBuffer.restored(self.limits, state, version=version)
        self.submitted -= N_SAMPLES * len(self.open)
        for group in list(self.open):
            self.finished_versions.pop(group, None)
        self.open.clear()
        # A group that was in progress may be admitted again under the same id.
        self.gone.clear()

    def pick(self, data, *wanted):
        def matches(state):
            name = "running" if isinstance(state, float) else state
            return name in wanted

        options = [(g, i) for g, s in self.open.items() for i in range(N_SAMPLES) if matches(s[i])]
        return data.draw(st.sampled_from(options)) if options else (None, None)

    def leave(self, group):
        del self.open[group]
        self.finished_versions.pop(group, None)
        self.gone.append(group)

    @invariant()
    @pytest.mark.case("T-B55")
    def every_trajectory_is_somewhere_once(self):
        counts = self.buffer.counts
        assert counts.submitted == self.submitted
        assert counts.consumed == self.consumed
        assert (
            counts.enqueued + counts.running + counts.accepted + counts.consumed + counts.dropped
            == counts.submitted
        )
        assert min(msgspec.structs.astuple(counts)) >= 0

    @invariant()
    def running_is_what_runs(self):
        states = [s for group in self.open.values() for s in group]
        assert self.buffer.counts.running == sum(isinstance(s, float) for s in states)
        assert self.buffer.counts.enqueued == states.count("enqueued")

    @invariant()
    @pytest.mark.case("T-B47")
    def no_more_is_started_than_the_law_allows(self):
        counts = self.buffer.counts
        in_flight = counts.enqueued + counts.running
        assert in_flight <= CONCURRENT
        assert in_flight + counts.accepted <= (BOUND + 1) * BATCH


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAccounts.pytestmark = [pytest.mark.case("T-B55", "T-B47")]
