from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from libra.ids import Incarnation, InstanceId, PolicyVersion
from libra.pools.member import MemberState
from libra.pools.pool import RolloutPool

SERVING, GONE = MemberState.SERVING, MemberState.GONE


class PoolMachine(RuleBasedStateMachine):
    """The model: per instance, what the inputs alone say its process and weights are."""

    @initialize(n=st.integers(1, 4))
    def begin(self, n):
        self.now = 0.0
        self.ids = [InstanceId(f"i{k}") for k in range(n)]
        self.pool = RolloutPool([(i, k + 1) for k, i in enumerate(self.ids)], now=0.0)
        self.process = dict.fromkeys(self.ids)  # incarnation that runs, None when none does
        self.answers = dict.fromkeys(self.ids, False)
        self.version = dict.fromkeys(self.ids)
        self.broken = dict.fromkeys(self.ids, False)
        self.gone = dict.fromkeys(self.ids, False)
        self.drained = dict.fromkeys(self.ids, False)
        self.leaving = dict.fromkeys(self.ids, False)
        self.goes = dict.fromkeys(self.ids, False)  # leaves the plan, whatever process comes
        self.warming = dict.fromkeys(self.ids, False)
        self.committed = PolicyVersion(0)
        self.births = 0

    def one(self, k):
        self.now += 1.0
        return self.ids[k % len(self.ids)]

    @rule(k=st.integers(0, 9))
    def start(self, k):
        i = self.one(k)
        if self.process[i] is None and not self.gone[i]:
            self.births += 1
            self.process[i] = Incarnation(f"p{self.births}")
            self.leaving[i] = False
            self.pool.on_started(i, self.process[i], now=self.now)

    @rule(k=st.integers(0, 9))
    def leave(self, k):
        i = self.one(k)
        self.goes[i] = True
        self.pool.on_leave_wanted(i, now=self.now)

    @rule(k=st.integers(0, 9))
    def stay(self, k):
        i = self.one(k)
        if not self.gone[i]:
            self.goes[i] = self.leaving[i] = False
            self.pool.on_stay_wanted(i, committed=self.committed, now=self.now)

    @rule(k=st.integers(0, 9), is_warming=st.booleans())
    def leave_and_come_again(self, k, is_warming):
        i = self.one(k)
        if self.gone[i] or self.process[i] is None:
            self.pool.remove(i)
            assert i not in self.pool
            self.pool.add(
                i,
                self.ids.index(i) + 1,
                now=self.now,
                is_warming=is_warming,
                waits_for=frozenset(self.ids[: self.ids.index(i)]),
            )
            for facts in (self.gone, self.drained, self.leaving, self.goes, self.broken):
                facts[i] = False
            self.process[i], self.answers[i], self.version[i] = None, False, None
            self.warming[i] = is_warming

    @rule(k=st.integers(0, 9))
    def give_devices(self, k):
        i = self.one(k)
        self.warming[i] = False
        self.pool.on_given_devices(i, now=self.now)

    @rule(k=st.integers(0, 9))
    def answer(self, k):
        i = self.one(k)
        if self.process[i] is not None and not self.warming[i]:
            self.answers[i] = True
            self.pool.on_answering(i, now=self.now)

    @rule(k=st.integers(0, 9))
    def come_up(self, k):
        """All the way at once: chance alone seldom gets there."""
        self.start(k)
        self.answer(k)
        self.confirm(k, behind=0, is_late=False)

    @rule(k=st.integers(0, 9), behind=st.integers(0, 1), is_late=st.booleans())
    def confirm(self, k, behind, is_late):
        i = self.one(k)
        version = PolicyVersion(max(0, self.committed - behind))
        incarnation = Incarnation("an old one") if is_late else self.process[i]
        if self.broken[i]:
            return
        if self.answers[i] and not is_late:
            self.version[i] = version
        self.pool.on_version_confirmed(
            i, incarnation, version, committed=self.committed, now=self.now
        )

    @rule()
    def commit(self):
        self.committed = PolicyVersion(self.committed + 1)
        for i in self.ids:
            if self.pool[i].state in (SERVING, MemberState.DRAINING, MemberState.STALE):
                self.pool.on_reload_begun(i, now=self.now)
                self.version[i] = None

    @rule(k=st.integers(0, 9))
    def fail_reload(self, k):
        i = self.one(k)
        if self.answers[i]:
            self.broken[i] = True
        self.pool.on_reload_failed(i, "bad", now=self.now)

    @rule(k=st.integers(0, 9))
    def hang(self, k):
        i = self.one(k)
        if self.answers[i]:
            self.broken[i] = True
        self.pool.on_suspected(i, "hangs", now=self.now)

    @rule(k=st.integers(0, 9), for_good=st.booleans())
    def die(self, k, for_good):
        i = self.one(k)
        if self.process[i] is None:
            return
        self.warming[i] = False
        self.process[i], self.answers[i], self.version[i] = None, False, None
        self.broken[i] = self.leaving[i] = False
        self.pool.on_exited(i, "died", now=self.now)
        if for_good:
            self.gone[i] = True
            self.pool.on_gave_up(i, "died too often", now=self.now)

    @rule(k=st.integers(0, 9), drain=st.booleans())
    def drain(self, k, drain):
        i = self.one(k)
        self.drained[i] = drain
        if drain:
            self.pool.on_drain_requested(i, now=self.now)
        else:
            self.pool.on_undrain_requested(i, now=self.now)

    @rule(k=st.integers(0, 9))
    def replace(self, k):
        i = self.one(k)
        if self.gone[i]:
            return
        self.leaving[i] = True
        self.pool.on_replace_requested(i, now=self.now)

    @invariant()
    def only_a_live_confirmed_instance_serves(self):
        if not hasattr(self, "pool"):
            return
        for i in self.pool.ids_in(SERVING):
            assert self.answers[i]
            assert self.version[i] == self.committed
            assert not self.broken[i]
            assert not self.drained[i]
            assert not self.leaving[i]
            assert not self.goes[i]
            assert not self.warming[i]

    @invariant()
    def gpus_are_counted_once(self):
        if not hasattr(self, "pool"):
            return
        total = len(self.ids) * (len(self.ids) + 1) // 2
        assert self.pool.num_gpus_in(*MemberState) == total
        has_devices = [not (self.gone[i] or self.warming[i]) for i in self.ids]
        # One that is warming waits for all before it.
        lost = sum(
            k + 1
            for k, i in enumerate(self.ids)
            if self.gone[i] or (self.warming[i] and any(has_devices[:k]))
        )
        assert self.pool.num_possible_gpus == total - lost


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
