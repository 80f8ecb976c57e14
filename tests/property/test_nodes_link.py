"""Leaders, followers and a network that delays, cuts and forgets; every clock at its own rate.

The model is made of the inputs: which messages were put, which were carried out, and under whom,
which servers run on which machine, which versions were committed and by whom. Time is true time;
each machine sees only its own clock. Another leader begins when the one before is dead or stands
still; one that stood still looks for a later term before it does anything else.
"""

from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from libra.errors import PeerError
from libra_supervisor.nodes.lease import Standing
from libra_supervisor.nodes.member_record import NodeState
from link_parties import Follower, Leader, Wire

rates = st.floats(0.96, 1.04)


@pytest.mark.case("R-B84")
class LinkMachine(RuleBasedStateMachine):
    @initialize(
        num_nodes=st.integers(2, 4),
        seed=st.lists(rates, min_size=8, max_size=8),
        looks=st.booleans(),
    )
    def begin(self, num_nodes, seed, looks):
        self.looks = looks
        """False: a leader that stood still does not see that it was replaced; followers do."""

        self.true, self.num_nodes = 0.0, num_nodes
        self.rates, self.num_made = seed, 0
        self.num_wires = self.num_bodies = self.num_attempts = self.num_servers = 0
        self.written_down: dict[int, int] = {}
        """In the run directory: the server of each node that was started last."""

        self.commits: list[int] = []
        """Terms of the leaders that committed a version, in true order."""

        self.term = 1
        self.highest_obeyed: dict[int, int] = {}
        self.leader_of_session: dict[str, Leader] = {}
        self.leaders = [Leader(self, 1)]
        self.followers = {node: Follower(self, node) for node in range(1, num_nodes)}
        self.retired: list[Follower] = []
        self.wires: list[Wire] = []
        self.has_begun = True

    def rate(self):
        self.num_made += 1
        return self.rates[self.num_made % len(self.rates)]

    def next_server(self):
        self.num_servers += 1
        return self.num_servers

    def on_committed(self, leader):
        if not self.looks:
            return
        assert not self.rules_after(leader), "a version was committed by a leader that is over"
        assert leader.term >= max(self.commits, default=0), "an older leader committed after it"
        self.commits.append(leader.term)

    def rules_after(self, leader):
        """Whether a later leader counts on it that this one is over."""
        later = [it for it in self.leaders if it.term > leader.term]
        return any(it.members.reigns(now=it.now) for it in later)

    def on_obeyed(self, follower, session):
        term = int(session[1:].partition("-")[0])
        leader = next(it for it in self.leaders if it.term == term)
        if self.looks:
            assert not self.rules_after(leader), "two leaders are obeyed"
        assert leader.members.state_of(follower.node) is not NodeState.LOST, "obeyed when lost"
        if follower is not self.followers[follower.node]:
            return
        assert term >= self.highest_obeyed.get(follower.node, 0), "an older leader was obeyed"
        self.highest_obeyed[follower.node] = term

    def pick(self, number):
        return self.followers[1 + number % (self.num_nodes - 1)]

    # The network

    @rule(number=st.integers(0, 5), to=st.integers(0, 3))
    def dial(self, number, to):
        follower = self.pick(number)
        reachable = [leader for leader in self.leaders if not leader.is_dead]
        if not reachable:
            return
        self.connect(follower, reachable[to % len(reachable)])

    def connect(self, follower, leader):
        follower.hang_up()
        follower.settle()
        self.num_wires += 1
        wire = Wire(leader, follower, self.num_wires)
        leader.wires[wire.number] = follower.wire = wire
        wire.up.append(follower.side.hello(()))
        self.wires.append(wire)

    @rule(number=st.integers(0, 5), to=st.integers(0, 1))
    def join(self, number, to):
        """The usual: a follower dials, is heard, and gets its lease."""
        self.dial(number, -1 - to)
        self.exchange(number)

    @rule(number=st.integers(0, 5))
    def exchange(self, number):
        follower = self.pick(number)
        wire = follower.wire
        if wire is None:
            return
        self.flush(wire)
        if follower.side.session_id and follower.wire is wire:
            wire.up.append(follower.side.beat(now=follower.now))
        self.flush(wire)
        if wire.leader_open and wire.leader.runs and wire.number in wire.leader.wires:
            with suppress(PeerError):
                wire.down.append(wire.leader.members.beat(wire.number))
        self.flush(wire)

    def flush(self, wire):
        while self.can_move(wire):
            self.move(wire)

    @rule(number=st.integers(0, 40), count=st.integers(1, 4))
    def deliver(self, number, count):
        for _ in range(count):
            busy = [wire for wire in self.wires if self.can_move(wire)]
            if not busy:
                return
            self.move(busy[number % len(busy)])

    def can_move(self, wire):
        up = wire.up and wire.leader_open and wire.leader.runs
        down = wire.down and wire.follower_open and wire.follower.wire is wire
        return bool(up or down)

    def move(self, wire):
        if wire.up and wire.leader_open and wire.leader.runs:
            wire.leader.on_message(wire, wire.up.popleft())
        elif wire.down and wire.follower_open and wire.follower.wire is wire:
            wire.follower.settle()
            if wire.follower.wire is wire:
                wire.follower.on_message(wire.down.popleft())
                wire.follower.work()

    @rule(number=st.integers(0, 40), is_leader_told=st.booleans())
    def cut(self, number, is_leader_told):
        if not self.wires:
            return
        wire = self.wires[number % len(self.wires)]
        wire.up.clear()
        wire.down.clear()
        if is_leader_told and wire.leader_open and wire.leader.runs:
            wire.leader.drop(wire)
        if wire.follower.wire is wire:
            wire.follower.hang_up()

    # Machines

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 4.0, 9.0, 12.0, 40.0]))
    def pass_time(self, seconds):
        # In steps: every machine that runs looks at its clock as time passes.
        for _ in range(10):
            self.step(seconds / 10)

    def step(self, seconds):
        self.true += seconds
        for follower in self.living():
            follower.settle()
        for leader in self.leaders:
            if leader.runs:
                leader.note(leader.members.on_time(now=leader.now))
        self.a_lost_node_has_let_go()
        self.no_two_attempts_run_at_once()

    @rule(number=st.integers(0, 5))
    def beat(self, number):
        follower = self.pick(number)
        if follower.side.session_id and follower.wire is not None:
            follower.wire.up.append(follower.side.beat(now=follower.now))

    @rule(number=st.integers(0, 40))
    def answer(self, number):
        busy = [wire for wire in self.wires if wire.leader_open and wire.leader.runs]
        if not busy:
            return
        wire = busy[number % len(busy)]
        try:
            wire.down.append(wire.leader.members.beat(wire.number))
        except PeerError:
            wire.leader.drop(wire)

    @rule(number=st.integers(0, 5), which=st.integers(0, 2))
    def command(self, number, which):
        self.num_bodies += 1
        running = [leader for leader in self.leaders if leader.runs]
        if running:
            leader = running[which % len(running)]
            leader.put(self.pick(number).node, b"do %d" % self.num_bodies)

    @rule(number=st.integers(0, 5))
    def report(self, number):
        self.num_bodies += 1
        self.pick(number).say(b"did %d" % self.num_bodies)

    @rule(number=st.integers(0, 5), is_other_machine=st.booleans())
    def restart_follower(self, number, is_other_machine):
        old = self.pick(number)
        # On another machine somebody else claims the rank while the old process still runs.
        if not is_other_machine:
            old.hang_up()
            old.attempt = None
            # The next process of the machine ends what is left of this one.
            old.servers.clear()
            old.is_dead = True
        machine = old.machine + is_other_machine
        new = Follower(self, old.node, pid=old.pid + 1, term=old.side.term, machine=machine)
        self.followers[old.node] = new
        self.retired.append(old)

    @rule(stays=st.booleans())
    def replace_leader(self, stays):
        old = self.leaders[-1]
        old.is_dead, old.is_paused = not stays, stays
        self.term += 1
        self.leaders.append(Leader(self, self.term))

    @rule(which=st.integers(0, 3))
    def wake_leader(self, which):
        leader = self.leaders[which % len(self.leaders)]
        leader.is_paused = False
        if self.looks and leader.has_successor:
            leader.is_dead = True

    # Servers: one on each follower's machine, which waits for a leader that is started again

    @rule(number=st.integers(0, 5))
    def serve(self, number):
        for leader in self.leaders:
            if leader.runs and not leader.has_successor:
                leader.serve(self.pick(number).node)

    @rule(number=st.integers(0, 5))
    def train(self, number):
        """A rank has done what makes a version."""
        follower = self.pick(number)
        follower.settle()
        if follower.attempt is not None:
            follower.say(b"trained %d" % follower.attempt)

    @rule(number=st.integers(0, 5), count=st.integers(0, 6))
    def serve_through_a_crash(self, number, count):
        """A server runs, its leader dies, the next one takes it over; the link may break."""
        self.join(number, 0)
        self.serve(number)
        self.exchange(number)
        self.replace_leader(stays=False)
        self.dial(number, -1)
        self.deliver(0, count)
        self.dial(number, -1)
        self.exchange(number)
        self.serve(number)
        self.exchange(number)

    @rule(number=st.integers(0, 5))
    def obey_through_a_pause(self, number):
        """A leader that stood still finds signs of life of before and answers them."""
        self.join(number, 0)
        self.replace_leader(stays=True)
        for _ in range(44):
            self.step(0.25)
        self.beat(number)
        self.wake_leader(len(self.leaders) - 2)
        self.command(number, len(self.leaders) - 2)
        self.exchange(number)
        for _ in range(8):
            self.step(0.25)

    @rule(number=st.integers(0, 5))
    def train_through_a_pause(self, number):
        """What makes a version is under way while its leader stands still and another begins."""
        for each in range(self.num_nodes - 1):
            self.join(each, 0)
        self.start_gang(-1)
        for each in range(self.num_nodes - 1):
            self.exchange(each)
        self.train(number)
        self.replace_leader(stays=True)
        for _ in range(60):
            self.step(0.25)
        self.wake_leader(len(self.leaders) - 2)
        self.deliver(0, 4)

    # Gangs: ranks on every member; another attempt only after all of the one before are gone

    @rule(number=st.integers(0, 5), is_leader_told=st.booleans())
    def isolate(self, number, is_leader_told):
        """A member works and is cut off until its leader has given it up, looked at closely."""
        self.join(number, 0)
        self.start_gang(-1)
        self.exchange(number)
        self.cut(len(self.wires) - 1, is_leader_told)
        for _ in range(60):
            self.step(0.25)

    @rule(number=st.integers(0, 5), count=st.integers(1, 6))
    def interrupt(self, number, count):
        """A connection ends while messages are under way in both directions, and another begins."""
        self.join(number, 0)
        for _ in range(3):
            self.command(number, -1)
            self.report(number)
        self.deliver(0, count)
        self.cut(len(self.wires) - 1, False)
        self.join(number, 0)

    @rule(number=st.integers(0, 5))
    def take_over(self, number):
        """A gang runs under a leader that is replaced; the next one starts another."""
        for each in range(self.num_nodes - 1):
            self.join(each, 0)
        self.start_gang(-1)
        for each in range(self.num_nodes - 1):
            self.exchange(each)
        self.replace_leader(stays=False)
        self.join(number, 0)
        self.start_gang(-1)
        self.exchange(number)

    @rule(which=st.integers(0, 2))
    def start_gang(self, which):
        running = [leader for leader in self.leaders if leader.runs]
        if not running:
            return
        leader = running[which % len(running)]
        members = leader.members
        nodes = range(1, self.num_nodes)
        is_clear = members.reigns(now=leader.now) and all(
            members.state_of(node) is NodeState.MEMBER or members.has_let_go(node, now=leader.now)
            for node in nodes
        )
        if not is_clear or leader.attempt_of:
            return
        self.num_attempts += 1
        for node in nodes:
            if members.state_of(node) is NodeState.MEMBER and leader.put(
                node, b"start %d" % self.num_attempts
            ):
                leader.attempt_of[node] = self.num_attempts

    @rule(number=st.integers(0, 5))
    def end_gang(self, number):
        for leader in self.leaders:
            for node in tuple(leader.attempt_of) if leader.runs else ():
                leader.put(node, b"end %d" % leader.attempt_of[node])

    # What always holds

    @invariant()
    def a_lost_node_has_let_go(self):
        for follower in self.living():
            if follower.side.standing(now=follower.now) is not Standing.HELD:
                continue
            session = follower.side.session_id
            leader = next(it for it in self.leaders if session.startswith(f"s{it.term}-"))
            record = leader.members[follower.node]
            assert record.state is not NodeState.LOST
            assert record.session_id in (session, "")

    @invariant()
    def no_two_leaders_are_obeyed(self):
        for follower in self.living():
            if not self.looks:
                return
            session = follower.side.session_id
            if session and follower.side.standing(now=follower.now) is Standing.HELD:
                leader = next(it for it in self.leaders if session.startswith(f"s{it.term}-"))
                assert not self.rules_after(leader)

    @invariant()
    def no_two_servers_are_on_a_slot(self):
        on: dict[tuple[int, int], list[int]] = {}
        for follower in self.living():
            on.setdefault((follower.node, follower.machine), []).extend(follower.servers)
        assert all(len(servers) <= 1 for servers in on.values()), on

    @invariant()
    def no_two_attempts_run_at_once(self):
        running = {it.attempt for it in self.living()} - {None}
        assert len(running) <= 1, running

    @invariant()
    def everything_is_done_once_and_in_order(self):
        for follower in self.everybody():
            for session, done in follower.done.items():
                put = next(
                    it.put_in.get(session, [])
                    for it in self.leaders
                    if session.startswith(f"s{it.term}-")
                )
                assert done == put[: len(done)]
        for leader in getattr(self, "leaders", ()):
            for session, told in leader.told.items():
                said = [it.said[session] for it in self.everybody() if session in it.said]
                assert len(said) == 1
                assert told == said[0][: len(told)]

    def everybody(self):
        return [*self.followers.values(), *self.retired] if hasattr(self, "has_begun") else []

    def living(self):
        return [it for it in self.everybody() if not it.is_dead]

    def teardown(self):
        """A network that heals brings everything that waits in a session to its end."""
        if not hasattr(self, "has_begun"):
            return
        self.replace_if_dead()
        leader = self.leaders[-1]
        for old in self.retired:
            old.hang_up()
            old.is_dead = True
        for _ in range(16):
            self.heal(leader)
            self.pass_time(2.0)
        for follower in self.followers.values():
            session = follower.side.session_id
            assert leader.members.state_of(follower.node) is NodeState.MEMBER
            assert leader.members[follower.node].session_id == session
            assert follower.done.get(session, []) == leader.put_in.get(session, [])
            known = leader.server_of.get(follower.node)
            if known is not None:
                assert follower.servers in ([known], []), (
                    "another server than the leader takes it for"
                )
            assert leader.told.get(session, []) == follower.said.get(session, [])

    def heal(self, leader):
        for follower in self.followers.values():
            wire = follower.wire
            if wire is None or wire.leader is not leader or not wire.leader_open:
                self.connect(follower, leader)
        self.drain()
        for follower in self.followers.values():
            if follower.side.session_id and follower.wire is not None:
                follower.wire.up.append(follower.side.beat(now=follower.now))
        self.drain()
        for wire in tuple(leader.wires.values()):
            try:
                wire.down.append(leader.members.beat(wire.number))
            except PeerError:
                leader.drop(wire)
        self.drain()

    def replace_if_dead(self):
        leader = self.leaders[-1]
        leader.is_paused = False
        if leader.is_dead:
            self.term += 1
            self.leaders.append(Leader(self, self.term))

    def drain(self):
        for _ in range(10_000):
            busy = [wire for wire in self.wires if self.can_move(wire)]
            if not busy:
                return
            self.move(busy[0])
        raise AssertionError("messages without end")


LinkMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestLink = LinkMachine.TestCase
