"""Groups over nodes that come, go silent and are lost at any moment, their words late.

The model is the inputs: what each node was told and said. What the loop hears goes into the real
accounts, which bear no sample that begins or ends twice.
"""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libra.rollouts.accounts import BufferLimits
from libra.rollouts.buffer import CancelGroup, RolloutBuffer
from libra.rollouts.trajectory import SampleFailed
from libra_supervisor.events import SampleFinished, SampleGaveUp, SampleProgressed, SampleStarted
from libra_supervisor.rollouts.spread import Again, Drop, Make, Spread
from trajectories import prompt, trajectory

N_SAMPLES, NUM_NODES = 2, 3


@dataclass
class Node:
    """A node by what has reached it: its words are under way until the leader takes them."""

    orders: deque = field(default_factory=deque)
    words: deque = field(default_factory=deque)
    jobs: dict = field(default_factory=dict)
    takes_part: bool = False

    def obey_all(self):
        while self.orders:
            match self.orders.popleft():
                case Make(_, job, group, samples):
                    self.jobs[job] = (group, dict.fromkeys(samples, False))
                case Drop(_, job, _):
                    self.jobs.pop(job, None)

    def open_samples(self):
        return [(job, index) for job, (_, samples) in self.jobs.items() for index in samples]


class SpreadMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.spread = Spread(0)
        self.nodes = {rank: Node() for rank in range(NUM_NODES)}
        self.nodes[0].takes_part = True
        limits = BufferLimits(
            n_samples=N_SAMPLES, batch_size=4, max_concurrent=1000, max_head_offpolicyness=1000,
            max_group_attempts=100,
        )  # fmt: skip
        self.buffer = RolloutBuffer(limits)
        self.num_groups = self.now = 0
        self.finished = {}

    # What the loop does

    @rule()
    def admit(self):
        group = self.buffer.admit(prompt(self.num_groups))
        self.num_groups += 1
        self.do(self.spread.start(group))

    @precondition(lambda self: self.buffer.missing())
    @rule(data=st.data())
    def ask_again(self, data):
        missing = data.draw(st.sampled_from(self.buffer.missing()))
        for command in self.spread.ask_again(missing.group_id, missing.samples):
            assert isinstance(command, Again)
            assert set(command.samples) <= set(missing.samples)

    @rule()
    def start_again_what_failed(self):
        while (group := self.buffer.admit_pending()) is not None:
            self.do(self.spread.start(group))

    # What nodes do

    @rule(data=st.data(), fails=st.booleans())
    def make(self, data, fails):
        _, node = self.any_node(data)
        node.obey_all()
        if not node.open_samples():
            return
        job, index = data.draw(st.sampled_from(node.open_samples()))
        group, samples = node.jobs[job]
        if not samples[index]:
            samples[index] = True
            node.words.append(("begun", job, index))
            return
        del samples[index]
        if fails:
            node.words.append(("failed", job, index))
        else:
            node.words.append(("finished", job, trajectory(group, index)))

    @rule(data=st.data())
    def listen(self, data):
        rank, node = self.any_node(data)
        if node.words:
            self.take(rank, node.words.popleft())

    # What the network and the machines do

    @rule(rank=st.integers(1, NUM_NODES - 1))
    def join(self, rank):
        self.nodes[rank].takes_part = True
        self.spread.on_able(rank)

    @rule(rank=st.integers(1, NUM_NODES - 1), is_silent=st.booleans())
    def be_silent(self, rank, is_silent):
        (self.spread.on_silent if is_silent else self.spread.on_heard)(rank)

    @rule(rank=st.integers(1, NUM_NODES - 1), words_come_later=st.booleans())
    def lose(self, rank, words_come_later):
        """Its jobs are gone; words of them may still be under way to a leader that waits."""
        node = self.nodes[rank]
        node.takes_part = False
        node.jobs.clear()
        node.orders.clear()
        if not words_come_later:
            node.words.clear()
        self.do(*self.spread.on_gone(rank))

    # The end

    def teardown(self):
        """Whoever is left makes all there is: every group comes to its end."""
        for _ in range(20):
            for rank, node in self.nodes.items():
                node.obey_all()
                while node.words:
                    self.take(rank, node.words.popleft())
                for job, index in node.open_samples():
                    group, samples = node.jobs[job]
                    if not samples.pop(index):
                        node.words.append(("begun", job, index))
                    node.words.append(("finished", job, trajectory(group, index)))
        assert self.buffer.missing() == ()
        assert [self.spread.num_unfinished(rank) for rank in self.nodes] == [0] * NUM_NODES

    @invariant()
    def every_trajectory_is_somewhere(self):
        counts = self.buffer.counts
        assert counts.submitted == (
            counts.enqueued + counts.running + counts.accepted + counts.consumed + counts.dropped
        )

    @invariant()
    def what_is_missing_is_being_made_by_one_node_that_takes_part(self):
        for missing in self.buffer.missing():
            node = self.spread.node_of(missing.group_id)
            assert self.nodes[node].takes_part
            number = self.spread.number_of(missing.group_id)
            assert all(self.spread.is_open(node, number, it) for it in missing.samples)
        num_missing = sum(len(missing.samples) for missing in self.buffer.missing())
        assert num_missing == sum(self.spread.num_unfinished(rank) for rank in self.nodes)

    # Parts

    def any_node(self, data):
        rank = data.draw(st.integers(0, NUM_NODES - 1))
        return rank, self.nodes[rank]

    def do(self, *commands):
        for command in commands:
            if isinstance(command, Make):
                assert self.nodes[command.node].takes_part
            self.nodes[command.node].orders.append(command)

    def take(self, rank, word):  # noqa: C901 - a table
        self.now += 1
        match word:
            case ("begun", job, index):
                told = self.spread.on_begun(rank, job, index)
            case ("failed", job, index):
                told = self.spread.on_failed(rank, job, index, SampleFailed("engine", "broken"))
            case ("finished", job, made):
                told = self.spread.on_finished(rank, job, made)
        match told:
            case SampleStarted(group_id, index):
                self.buffer.on_started(group_id, index, now=self.now)
            case SampleProgressed(group_id, index):
                self.buffer.on_progress(group_id, index, now=self.now)
            case SampleFinished(made):
                assert made.trajectory_id not in self.finished
                self.finished[made.trajectory_id] = rank
                self.buffer.on_finished(made)
            case SampleGaveUp(group_id, index, failure):
                for done in self.buffer.on_failed(group_id, index, failure.kind, "broken"):
                    assert isinstance(done, CancelGroup)
                    self.do(*self.spread.cancel(done.group_id))


SpreadMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestSpread = SpreadMachine.TestCase
