"""Any history of writes, restarts and reads: the sum is that of the ranks seen to change lately."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fleets import FIRST
from libra.ids import InstanceId
from libra.scheduling.load import OwnLoad, RemoteLoad
from libra.scheduling.shared_view import FORMAT, RankLoad, SharedView

TTL = 30.0
RANKS = st.sampled_from(["1", "2", "3"])


class SharedViewMachine(RuleBasedStateMachine):
    """`disk` is what lies there, `seen` what a read showed last and since when it is so."""

    @initialize()
    def begin(self):
        self.view = SharedView(own_rank="0", own_writer="w0", ttl_s=TTL)
        self.now, self.num_writers = 0.0, 3
        self.disk, self.writer_of = {}, {r: f"w{r}" for r in "123"}
        self.sequence_of = dict.fromkeys("123", 0)
        self.seen = {}

    @rule(rank=RANKS, loads=st.dictionaries(st.integers(0, 3), st.integers(0, 9)),
          clock_ns=st.integers(-(10**15), 10**15))  # fmt: skip
    def write(self, rank, loads, clock_ns):
        self.sequence_of[rank] += 1
        self.disk[rank] = RankLoad(
            format=FORMAT,
            rank=rank,
            writer=self.writer_of[rank],
            sequence=self.sequence_of[rank],
            written_at_ns=clock_ns,
            load=tuple(OwnLoad(InstanceId(f"i{k}"), FIRST, n, 10 * n) for k, n in loads.items()),
        )

    @rule(rank=RANKS)
    def restart(self, rank):
        self.num_writers += 1
        self.writer_of[rank] = f"w{self.num_writers}"
        self.sequence_of[rank] = 0

    @rule(rank=RANKS)
    def leave(self, rank):
        self.disk.pop(rank, None)

    @rule(elapsed=st.sampled_from([0.0, 0.1, 10.0, 29.0, 30.0, 31.0]))
    def wait(self, elapsed):
        self.now += elapsed

    @rule(unreadable=st.sets(RANKS))
    def read(self, unreadable):
        readable = {r: c for r, c in self.disk.items() if r not in unreadable}
        own = RankLoad(
            format=FORMAT, rank="0", writer="w0", sequence=1, written_at_ns=0,
            load=(OwnLoad(InstanceId("i0"), FIRST, 1000, 1000),),
        )  # fmt: skip
        self.view.on_read(readable | {"0": own}, now=self.now, wall_ns=0)
        for rank, (_, since) in tuple(self.seen.items()):
            if self.now >= since + TTL and rank not in readable:
                del self.seen[rank]  # forgotten: should it show up again it counts as new
        for rank, content in readable.items():
            known, _ = self.seen.get(rank, (None, None))
            if known is None or self.is_change(known, content):
                self.seen[rank] = (content, self.now)

    def is_change(self, known, content):
        return (known.writer, known.sequence) != (content.writer, content.sequence)

    def living(self):
        return {r: c for r, (c, since) in self.seen.items() if self.now < since + TTL}

    @invariant()
    def the_sum_is_that_of_the_living(self):
        if not hasattr(self, "seen"):
            return
        total = {}
        for content in self.living().values():
            for entry in content.load:
                key = (entry.instance_id, entry.incarnation)
                total[key] = total.get(key, 0) + entry.num_requests
        expected = {key: RemoteLoad(n, 10 * n) for key, n in total.items()}
        assert self.view.remote_load(self.now) == expected
        assert self.view.live_ranks(self.now) == tuple(sorted(self.living()))

    @invariant()
    def honest_restarts_are_no_conflict(self):
        if hasattr(self, "view"):
            assert self.view.take_conflicts() == frozenset()


SharedViewMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestSharedView = SharedViewMachine.TestCase
