"""Servers, a lossy network and a control plane that may restart, driving ReloadBatch.

The model is made of the inputs: which server process really holds which version. The batch is
right when it never commits a process that does not hold the version.
"""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libra.weights.judge import judge_acks
from libra.weights.reload import (
    CommitVersion,
    FailBatch,
    JudgeBatch,
    Member,
    Quarantine,
    ReloadBatch,
    SendReload,
)
from reload_messages import reload_ack, reload_request

ACK_TIMEOUT_S = 3.0
FAILURES = [
    {},
    {"error": "load failed"},
    {"manifest_hash": "of another version"},
    {"verified": ("manifest",)},
]


class Server:
    def __init__(self, name, node):
        self.name, self.node = name, node
        self.start_count, self.version, self.is_member = 1, 0, True

    @property
    def incarnation(self):
        return f"{self.name}#{self.start_count}"


@pytest.mark.case("R-B24")
class ReloadMachine(RuleBasedStateMachine):
    @initialize(
        nodes=st.lists(st.integers(0, 2), min_size=1, max_size=6),
        method=st.sampled_from(["inplace", "restart"]),
        strategy=st.sampled_from(["parallel", "serial"]),
        min_gpus=st.integers(1, 6),
    )
    def begin(self, nodes, method, strategy, min_gpus):
        self.servers = [Server(f"i{k}", node) for k, node in enumerate(nodes)]
        self.method, self.strategy, self.min_gpus = method, strategy, min_gpus
        self.now, self.version, self.num_tries = 0.0, 0, 0
        self.on_the_wire, self.acks = [], []
        self.open_batch(advance=True)

    def open_batch(self, *, advance):
        self.version += advance
        self.num_tries += 1
        self.request = reload_request(
            policy_version=self.version,
            nonce=f"try-{self.num_tries}",
            manifest_hash=f"hash-{self.version}",
            force=not advance,
        )
        members = [Member(s.name, s.incarnation, s.node, 1) for s in self.servers if s.is_member]
        self.asked, self.proved, self.gone = {}, {}, set()
        self.to_judge, self.conclusions, self.quarantined = None, [], set()
        self.num_members = len(members)
        self.batch = ReloadBatch(
            self.request,
            members,
            method=self.method,
            strategy=self.strategy,
            ack_timeout_s=ACK_TIMEOUT_S,
            min_rollout_gpus=self.min_gpus,
        )
        self.take(self.batch.start(now=self.now))

    def take(self, commands):
        for command in commands:
            match command:
                case SendReload(member, request):
                    assert member.instance_id not in self.asked, "asked twice"
                    self.asked[member.instance_id] = self.now + ACK_TIMEOUT_S
                    self.on_the_wire.append((member, request))
                case Quarantine(instance, reason):
                    assert reason
                    assert instance not in self.quarantined
                    self.quarantined.add(instance)
                    self.proved.pop(instance, None)
                case JudgeBatch(request, acks):
                    assert self.to_judge is None, "judged twice"
                    assert request == self.request
                    assert {a.instance_id for a in acks} == set(self.proved)
                    self.to_judge = acks
                case CommitVersion() | FailBatch():
                    self.conclude(command)

    def conclude(self, command):
        self.conclusions.append(command)
        assert len(self.conclusions) == 1
        assert command.policy_version == self.version
        if isinstance(command, CommitVersion):
            assert command.incarnation_of == self.proved
            for server in self.servers:
                if command.incarnation_of.get(server.name) == server.incarnation:
                    assert server.version == self.version, "wrong weights would be served"

    def server(self, k):
        return self.servers[k % len(self.servers)]

    @precondition(lambda self: self.on_the_wire)
    @rule(k=st.integers(0, 99), failure=st.sampled_from(FAILURES), is_lost=st.booleans())
    def a_server_is_reached(self, k, failure, is_lost):
        member, request = self.on_the_wire.pop(k % len(self.on_the_wire))
        server = next(s for s in self.servers if s.name == member.instance_id)
        if is_lost or server.incarnation != member.incarnation:
            return
        if self.method == "restart":
            server.start_count += 1
            self.take(self.batch.on_lost(server.name, member.incarnation, now=self.now))
        # A failed load leaves weights that nobody knows.
        server.version = None if failure else request.policy_version
        ack = reload_ack(request, server.name, method=self.method, strategy=self.strategy)
        self.acks.append(msgspec.structs.replace(ack, incarnation=server.incarnation, **failure))

    @precondition(lambda self: self.on_the_wire)
    @rule(k=st.integers(0, 99))
    def a_request_is_known_not_to_get_through(self, k):
        member, request = self.on_the_wire.pop(k % len(self.on_the_wire))
        if request.nonce != self.request.nonce:
            return
        name = member.instance_id
        is_waited_for = name in self.batch.in_flight
        self.take(self.batch.on_undelivered(name, "reset", now=self.now))
        assert name not in self.batch.in_flight
        assert not is_waited_for or name in self.quarantined

    @precondition(lambda self: self.acks)
    @rule(k=st.integers(0, 99), is_repeated=st.booleans())
    def an_ack_arrives(self, k, is_repeated):
        ack = self.acks[k % len(self.acks)]
        if not is_repeated:
            self.acks.remove(ack)
        is_expected = (
            ack.nonce == self.request.nonce
            and ack.instance_id in self.asked
            and ack.instance_id not in self.proved
            and ack.instance_id not in self.quarantined | self.gone
            and not self.conclusions
        )
        is_proof = is_expected and (ack.error, ack.manifest_hash, len(ack.verified)) == (
            None,
            self.request.manifest_hash,
            4,
        )
        if is_proof:
            self.proved[ack.instance_id] = ack.incarnation
        self.take(self.batch.on_ack(ack, now=self.now))

    @rule(k=st.integers(0, 99))
    def a_server_crashes(self, k):
        server = self.server(k)
        lost = server.incarnation
        server.start_count += 1
        server.version = 0
        self.take(self.batch.on_lost(server.name, lost, now=self.now))

    @rule(k=st.integers(0, 99))
    def a_server_leaves_by_plan(self, k):
        server = self.server(k)
        if server.is_member and not self.conclusions:
            server.is_member = False
            if server.name not in self.quarantined:
                self.gone.add(server.name)
            self.proved.pop(server.name, None)
            self.take(self.batch.on_left(server.name, now=self.now))

    @rule(k=st.integers(0, 99))
    def a_server_joins(self, k):
        self.server(k).is_member = True

    @rule(dt=st.floats(0, 2 * ACK_TIMEOUT_S))
    def time_passes(self, dt):
        self.now += dt
        self.take(self.batch.on_tick(now=self.now))

    @precondition(lambda self: self.to_judge is not None and not self.conclusions)
    @rule(refused=st.sets(st.integers(0, 5)))
    def rank_0_judges(self, refused):
        verdict = judge_acks(
            self.request,
            [a for a in self.to_judge if int(a.instance_id[1:]) not in refused],
            trainer_probe_logprobs=(-1.0, -1.0),
            probe_tolerance=1e-3,
        )
        self.take(self.batch.on_judged(verdict))
        assert self.conclusions

    @rule(advance=st.booleans())
    def the_control_plane_restarts_or_goes_on(self, advance):
        """Any prefix of a batch may be the last that a control plane lived to see."""
        self.open_batch(advance=advance)

    @invariant()
    def serial_asks_one_at_a_time_on_each_node(self):
        if self.strategy == "serial":
            nodes = [s.node for s in self.servers if s.name in self.batch.in_flight]
            assert len(nodes) == len(set(nodes))

    @invariant()
    def who_is_asked_is_under_a_deadline(self):
        assert (self.batch.next_deadline() is None) == (not self.batch.in_flight)
        for instance in self.batch.in_flight:
            assert self.asked[instance] >= self.batch.next_deadline()

    def teardown(self):
        if not hasattr(self, "batch"):
            return
        for _ in range(self.num_members + 1):
            self.now += ACK_TIMEOUT_S
            self.take(self.batch.on_tick(now=self.now))
        if self.to_judge is not None and not self.conclusions:
            self.rank_0_judges(refused=set())
        assert len(self.conclusions) == 1, "every batch ends"
        assert self.batch.is_settled


TestReload = ReloadMachine.TestCase
TestReload.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
