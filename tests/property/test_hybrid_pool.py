"""Hybrid replicas come, catch up, contribute, leave, stall and die at every moment.

The model is a core that trains and replicas that do what they are told, in order, when they can.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libra.errors import InvariantError
from libra.ids import ReplicaId
from libra.pools.hybrid import (
    Follow,
    GiveDevices,
    HybridPool,
    HybridState,
    Join,
    Joined,
    Left,
    Lost,
    StartReplica,
    StopReplica,
    TakeSnapshot,
)

TIMEOUT_S = 100.0
ON_THE_WAY = (HybridState.JOINING, HybridState.CATCHING_UP)


class Replica:
    """What a replica's processes would do."""

    def __init__(self, *, has_devices):
        self.has_devices = has_devices
        self.orders = []
        self.at = None
        self.is_told_to_stop = False
        self.news = []


class Pools(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = HybridPool(join_timeout_s=TIMEOUT_S)
        self.now = 0.0
        self.step = 0
        self.training = None
        self.frozen = None
        self.replicas = {}
        self.saving = None
        self.saved = set()
        self.memberships = {}
        self.count = 0

    def obey(self, commands):  # noqa: C901 - a table
        for command in commands:
            match command:
                case StartReplica(replica_id, has_devices):
                    self.replicas[replica_id] = Replica(has_devices=has_devices)
                case GiveDevices(replica_id):
                    assert not self.replicas[replica_id].has_devices
                    assert not self.replicas[replica_id].is_told_to_stop
                    self.replicas[replica_id].has_devices = True
                case StopReplica(replica_id):
                    assert not self.replicas[replica_id].is_told_to_stop
                    self.replicas[replica_id].is_told_to_stop = True
                case TakeSnapshot(step):
                    assert self.training is None, "the core is in the middle of a step"
                    assert step == self.step
                    assert self.saving is None
                    self.saving = step
                case Join(replica_id, step):
                    assert step in self.saved
                    self.replicas[replica_id].orders.append(("join", step))
                case Follow(replica_id, step, mini_batches, epoch):
                    assert (mini_batches, epoch) == self.memberships[step][:2]
                    self.replicas[replica_id].orders.append(("follow", step))
                case Joined(replica_id) | Lost(replica_id) | Left(replica_id):
                    self.replicas[replica_id].news.append(type(command))

    def living(self, *states):
        return sorted(self.pool.ids_in(*states or tuple(HybridState)))

    @rule()
    def attach(self):
        replica_id = ReplicaId(f"hybrid-{self.count}")
        self.count += 1
        self.obey(self.pool.on_attach(replica_id))
        assert replica_id in self.replicas
        with pytest.raises(InvariantError, match="has been there"):
            self.pool.on_attach(replica_id)

    @rule()
    def warm(self):
        replica_id = ReplicaId(f"hybrid-{self.count}")
        self.count += 1
        self.obey(self.pool.on_warm(replica_id))
        assert not self.replicas[replica_id].has_devices

    @precondition(lambda self: any(not it.has_devices for it in self.replicas.values()))
    @rule(data=st.data())
    def give_devices(self, data):
        waiting = sorted(name for name, it in self.replicas.items() if not it.has_devices)
        replica_id = data.draw(st.sampled_from(waiting))
        is_leaving = self.replicas[replica_id].is_told_to_stop
        self.obey(self.pool.on_attach(replica_id))
        gone = self.pool[replica_id].state in (HybridState.LEAVING, HybridState.GONE)
        assert self.replicas[replica_id].has_devices is not (is_leaving or gone)

    @precondition(lambda self: any(it.has_devices for it in self.replicas.values()))
    @rule(data=st.data())
    def ready(self, data):
        with_devices = sorted(name for name, it in self.replicas.items() if it.has_devices)
        replica_id = data.draw(st.sampled_from(with_devices))
        self.pool.on_ready(replica_id, now=self.now)

    @rule(is_saving=st.booleans())
    def boundary(self, is_saving):
        before = self.saving
        self.obey(self.pool.on_boundary(step=self.step, is_saving=is_saving))
        assert not is_saving or self.saving == before

    @precondition(lambda self: self.saving is not None)
    @rule()
    def save(self):
        step, self.saving = self.saving, None
        self.saved.add(step)
        self.obey(self.pool.on_saved(step))

    @precondition(lambda self: self.saving is not None)
    @rule()
    def find_no_room(self):
        """Whoever waits for that snapshot is given up, and nobody else."""
        step, self.saving = self.saving, None
        waiting = {r for r in self.living(HybridState.JOINING) if self.pool[r].snapshot == step}
        others = set(self.living(*ON_THE_WAY, HybridState.MEMBER)) - waiting
        self.obey(self.pool.on_not_saved(step, "no room"))
        assert all(self.replicas[replica_id].is_told_to_stop for replica_id in waiting)
        assert set(self.living(*ON_THE_WAY, HybridState.MEMBER)) == others

    @precondition(lambda self: self.training is None)
    @rule(num=st.integers(0, 2))
    def begin_step(self, num):
        """It begins at once, whatever any replica does."""
        number = self.step + 1
        caught_up = [
            it.replica_id
            for it in self.pool.hybrids
            if it.state is HybridState.CATCHING_UP
            and self.replicas[it.replica_id].at in (number - 2, number - 1)
            and it.taken >= number - 2
        ]
        before = self.pool.ids_in(HybridState.MEMBER)
        mini_batches = tuple(range(num))
        self.training = number
        begun, commands = self.pool.on_step_begins(number, mini_batches)
        kept = {r: self.pool[r] for r in self.living(*ON_THE_WAY)}
        if begun is None:
            assert not commands
            assert not self.living(HybridState.MEMBER)
            assert all(it.snapshot is None for it in kept.values())
            self.frozen = None
            return
        self.memberships[number] = (begun.mini_batches, begun.epoch)
        self.frozen = (begun, begun.members, begun.joiners)
        self.obey(commands)
        assert set(begun.members) == set(before) | set(caught_up)
        assert set(begun.joiners) == {r for r, it in kept.items() if it.snapshot is not None}
        for replica_id in begun.members:
            self.replicas[replica_id].orders.append(("train", number))

    @precondition(lambda self: self.training is not None)
    @rule(data=st.data())
    def end_step(self, data):
        number, self.training = self.training, None
        self.step = number
        taking = [] if self.frozen is None else [*self.frozen[1], *self.frozen[2]]
        dropped = {}
        if taking:
            chosen = data.draw(st.lists(st.sampled_from(taking), unique=True, max_size=2))
            dropped = dict.fromkeys(chosen, "bad")
        self.obey(self.pool.on_trained(dropped))
        for replica_id in dropped:
            assert self.pool[replica_id].state in (HybridState.LEAVING, HybridState.GONE)

    @precondition(lambda self: any(it.orders for it in self.replicas.values()))
    @rule(data=st.data())
    def work(self, data):
        """A replica does the next thing that it was told, if the core has come so far."""
        busy = sorted(r for r, it in self.replicas.items() if it.orders)
        replica_id = data.draw(st.sampled_from(busy))
        replica = self.replicas[replica_id]
        kind, step = replica.orders[0]
        if kind == "join":
            assert replica.at is None
            replica.at = step
            replica.orders.pop(0)
            self.obey(self.pool.on_joined(replica_id, step, now=self.now))
            return
        assert step == replica.at + 1, "a step was left out or came twice"
        if step > self.step:
            return
        replica.at = step
        replica.orders.pop(0)
        self.pool.on_taken(replica_id, step)

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def detach(self, data):
        replica_id = data.draw(st.sampled_from(sorted(self.replicas)))
        state = self.pool[replica_id].state
        self.obey(self.pool.on_detach(replica_id))
        again = self.pool.on_detach(replica_id)
        assert again == ()
        is_promised = state is HybridState.MEMBER and self.training is not None
        if state is not HybridState.GONE:
            wanted = HybridState.MEMBER if is_promised else HybridState.LEAVING
            assert self.pool[replica_id].state is wanted

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def crash(self, data):
        replica_id = data.draw(st.sampled_from(sorted(self.replicas)))
        self.obey(self.pool.on_down(replica_id, "killed"))
        assert self.pool[replica_id].state is HybridState.GONE
        self.replicas[replica_id].orders.clear()

    @rule()
    def lose_core(self):
        self.obey(self.pool.on_core_lost())
        self.training = self.saving = self.frozen = None
        for replica in self.replicas.values():
            replica.orders.clear()
        assert not self.living(*ON_THE_WAY, HybridState.MEMBER)

    @rule(seconds=st.sampled_from([1.0, TIMEOUT_S]))
    def wait(self, seconds):
        self.now += seconds
        self.obey(self.pool.on_tick(now=self.now))
        for hybrid in self.pool.hybrids:
            is_coming = hybrid.is_ready and hybrid.state in ON_THE_WAY
            assert not is_coming or self.now - hybrid.since < TIMEOUT_S

    @invariant()
    def a_begun_step_keeps_its_membership(self):
        if self.frozen is not None:
            begun, members, joiners = self.frozen
            assert (begun.members, begun.joiners) == (members, joiners)

    @invariant()
    def who_is_on_its_way_out_or_gone_was_stopped_or_ended_itself(self):
        for hybrid in self.pool.hybrids:
            replica = self.replicas[hybrid.replica_id]
            if replica.is_told_to_stop:
                assert hybrid.state in (HybridState.LEAVING, HybridState.GONE)
            elif hybrid.state is HybridState.LEAVING:
                raise AssertionError(f"{hybrid} was never told")

    @invariant()
    def every_end_is_told_once(self):
        for hybrid in self.pool.hybrids:
            ends = [it for it in self.replicas[hybrid.replica_id].news if it is not Joined]
            # Not before its devices are free.
            assert len(ends) == (hybrid.state is HybridState.GONE)
            if ends:
                assert (ends[0] is Left) == (hybrid.reason == "asked to leave")

    @invariant()
    def a_replica_keeps_what_was_begun_while_it_loads_its_snapshot_and_nothing_else(self):
        newest = self.training or self.step
        for hybrid in self.pool.hybrids:
            is_loading = hybrid.state is HybridState.JOINING and hybrid.snapshot is not None
            wanted = range(hybrid.snapshot + 1, newest + 1) if is_loading else ()
            assert [begun.step for begun in hybrid.missed] == list(wanted)

    @invariant()
    def a_member_has_been_given_every_step(self):
        for replica_id in self.pool.ids_in(HybridState.MEMBER):
            replica = self.replicas[replica_id]
            told = [step for _, step in replica.orders]
            newest = self.training or self.step
            assert [*range(replica.at + 1, newest + 1)] == told


Pools.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestPools = Pools.TestCase


def pool_with_member():
    pool = HybridPool(join_timeout_s=TIMEOUT_S)
    name = ReplicaId("hybrid-0")
    pool.on_attach(name)
    pool.on_ready(name, now=0.0)
    assert pool.on_boundary(step=4, is_saving=True) == ()
    assert pool.on_boundary(step=4, is_saving=False) == (TakeSnapshot(4),)
    assert pool.on_saved(4) == (Join(name, 4),)
    pool.on_joined(name, 4, now=1.0)
    return pool, name


def test_a_replica_contributes_from_the_first_step_after_its_snapshot():
    pool, name = pool_with_member()
    begun, news = pool.on_step_begins(5, (0,))
    assert begun.members == (name,)
    assert news == (Joined(name),)


def test_the_epoch_changes_with_the_membership_and_only_then():
    pool, name = pool_with_member()
    epochs = []
    for step in (5, 6, 7):
        begun, _ = pool.on_step_begins(step, (0,))
        epochs.append(begun.epoch)
        pool.on_taken(name, step)
        dropped = {name: "its norm"} if step == 6 else {}
        pool.on_trained(dropped)
        if step == 6:
            break
    pool.on_attach(ReplicaId("hybrid-1"))
    pool.on_ready(ReplicaId("hybrid-1"), now=0.0)
    pool.on_boundary(step=6, is_saving=False)
    begun, _ = pool.on_step_begins(7, (0,))
    assert (epochs, begun.epoch, begun.members) == ([1, 1], 2, ())


def test_another_member_in_the_place_of_one_is_another_epoch():
    pool, name = pool_with_member()
    other = ReplicaId("hybrid-1")
    pool.on_attach(other)
    pool.on_ready(other, now=1.0)
    pool.on_step_begins(5, (0,))
    pool.on_trained({})
    pool.on_boundary(step=5, is_saving=False)
    pool.on_saved(5)
    before, _ = pool.on_step_begins(6, (0,))
    pool.on_joined(other, 5, now=2.0)
    pool.on_trained({})
    pool.on_detach(name)
    after, _ = pool.on_step_begins(7, (0,))
    assert (before.members, after.members) == ((name,), (other,))
    assert after.epoch == before.epoch + 1


def test_processes_that_still_come_up_have_a_limit_of_their_own():
    pool = HybridPool(join_timeout_s=TIMEOUT_S)
    pool.on_attach(ReplicaId("hybrid-0"))
    assert pool.on_tick(now=10 * TIMEOUT_S) == ()
    pool.on_ready(ReplicaId("hybrid-0"), now=10 * TIMEOUT_S)
    assert pool.on_tick(now=11 * TIMEOUT_S - 1) == ()
    (stop,) = pool.on_tick(now=11 * TIMEOUT_S)
    assert stop.reason == "joining for 100 s"


def test_a_core_lost_while_it_takes_a_snapshot_is_asked_for_another_when_it_is_back():
    pool = HybridPool(join_timeout_s=TIMEOUT_S)
    for step, name in ((4, ReplicaId("hybrid-0")), (2, ReplicaId("hybrid-1"))):
        pool.on_attach(name)
        pool.on_ready(name, now=0.0)
        assert pool.on_boundary(step=step, is_saving=False) == (TakeSnapshot(step),)
        assert pool.on_core_lost() == (StopReplica(name, "the core was lost"),)
        pool.on_down(name, "it was told to leave")


def test_a_step_that_a_joiner_missed_is_followed_once_it_is_there():
    pool = HybridPool(join_timeout_s=TIMEOUT_S)
    name = ReplicaId("hybrid-0")
    pool.on_attach(name)
    pool.on_ready(name, now=0.0)
    pool.on_boundary(step=1, is_saving=False)
    for step in (2, 3):
        begun, commands = pool.on_step_begins(step, (0, 1))
        assert (begun.members, begun.joiners, commands) == ((), (name,), ())
        pool.on_trained({})
    assert pool.on_saved(1) == (Join(name, 1),)
    follows = pool.on_joined(name, 1, now=1.0)
    assert follows == (Follow(name, 2, (0, 1), 0), Follow(name, 3, (0, 1), 0))
    assert pool[name].missed == ()
    assert pool.on_step_begins(4, (0,))[0].members == ()
    # It was told of that one at once.
    assert (pool[name].told, pool[name].missed) == (4, ())
    pool.on_trained({})
    pool.on_taken(name, 2)
    pool.on_taken(name, 3)
    assert pool.on_step_begins(5, (0,))[0].members == (name,)


def test_a_member_asked_to_leave_in_a_step_ends_that_step():
    pool, name = pool_with_member()
    pool.on_step_begins(5, (0,))
    assert pool.on_detach(name) == ()
    (stop,) = pool.on_trained({})
    assert isinstance(stop, StopReplica)
    assert pool.on_down(name, "exit 0") == (Left(name),)
    assert pool.on_step_begins(6, (0,)) == (None, ())
