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
    def answer(self, k):
        i = self.one(k)
        if self.process[i] is not None:
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

    @invariant()
    def gpus_are_counted_once(self):
        if not hasattr(self, "pool"):
            return
        total = len(self.ids) * (len(self.ids) + 1) // 2
        assert self.pool.num_gpus_in(*MemberState) == total
        lost = sum(k + 1 for k, i in enumerate(self.ids) if self.gone[i])
        assert self.pool.num_possible_gpus == total - lost


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
