"""What the leader tells the other nodes of groups and servers, and when it gives up on one."""

import itertools
from pathlib import Path

import anyio
import msgspec
import pytest
import trio.testing

from libra import clock
from libra.errors import PeerError
from libra.rollouts.trajectory import SampleFailed
from libra.wire import node_rollouts as wire
from libra.wire.api import NodeStatus
from libra_supervisor.app.cluster_routing import ClusterRouting
from libra_supervisor.app.spread_rollouts import SpreadRollouts
from libra_supervisor.events import SampleFinished, SampleGaveUp, SampleStarted
from made_there import Idle, OwnRunner
from pickled import PICKLED, was_unpickled
from trajectories import admitted, trajectory

HERE, THERE = admitted(0, n_samples=16), admitted(1, n_samples=2)


NODE = NodeStatus(node=1, host="h", state="member", since_s=1.0, detail="")


def on_virtual_time():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Told:
    """A follower, by what it was told."""

    def __init__(self):
        self.said = []
        self.is_member = True

    def say(self, order):
        if not self.is_member:
            raise PeerError("it is away")
        self.said.append(order)

    def kinds(self):
        return [type(order) for order in self.said]


class Leader:
    def __init__(self, num_others=1):
        self.others = {rank: Told() for rank in range(1, num_others + 1)}
        self.own, self.posted = OwnRunner(), []
        self.rollouts = SpreadRollouts(
            self.others,
            term=3,
            traffic=Idle(),
            fingerprints=("f",),
            token_file=Path("/t"),
            kv_capacity_by_tp={1: 10},
            post=self.post,
        )
        self.rollouts.begin(self.own, OwnRunner(), note_served=lambda _name: None)

    async def post(self, event):
        self.posted.append(event)

    def able(self, rank):
        self.rollouts.on_word(rank, wire.CanMake(("f",)))

    async def heard(self):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.rollouts.run)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()


def test_a_node_that_cannot_be_told_gets_nothing_more_and_what_it_had_is_made_here():
    leader = Leader()
    (told,) = leader.others.values()
    leader.able(1)
    told.is_member = False
    for group in (HERE, THERE, admitted(2)):
        leader.rollouts.start(group)
    assert leader.rollouts.node_of(THERE.group_id) == 1
    assert set(leader.own.started) == {HERE.group_id, admitted(2).group_id}
    leader.rollouts.on_lost(1)
    assert leader.own.started[THERE.group_id] == (0, 1)


def test_a_node_that_was_silent_and_takes_part_again_gets_its_share():
    leader = Leader()
    leader.able(1)
    leader.rollouts.on_suspected(1)
    leader.rollouts.start(HERE)
    leader.rollouts.start(THERE)
    assert set(leader.own.started) == {HERE.group_id, THERE.group_id}
    leader.rollouts.on_lost(1)
    leader.rollouts.on_joined(1)
    leader.rollouts.start(admitted(2))
    assert leader.rollouts.node_of(admitted(2).group_id) == 0, "it is not ready yet"
    leader.able(1)
    leader.rollouts.start(admitted(3))
    assert leader.rollouts.node_of(admitted(3).group_id) == 1


def test_jobs_of_one_term_are_told_from_those_of_every_other():
    leader = Leader()
    leader.able(1)
    for group in (HERE, THERE):
        leader.rollouts.start(group)
    (order,) = [it for it in leader.others[1].said if isinstance(it, wire.MakeSamples)]
    assert 3 << 32 < order.job < 4 << 32
    assert (order.prompt_id, order.row, order.epoch, order.attempt) == ("row-1", 1, 0, 0)
    assert (order.n_samples, order.samples) == (2, (0, 1))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_what_is_no_trajectory_fails_its_sample_and_nothing_else():
    leader = Leader()
    leader.able(1)
    for group in (HERE, THERE):
        leader.rollouts.start(group)
    job = leader.others[1].said[-1].job
    leader.rollouts.on_word(1, wire.SampleBegun(job, 0))
    piece = wire.TrajectoryPiece(job=job, sample=0, data=b"no", is_last=True)
    leader.rollouts.on_word(1, piece)
    leader.rollouts.on_word(1, piece)
    await leader.heard()
    started, gave_up = leader.posted
    assert started == SampleStarted(THERE.group_id, 0)
    assert isinstance(gave_up, SampleGaveUp)
    assert "node 1 sent no trajectory" in gave_up.failure.message


NESTED = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"


def changed(**fields):
    return msgspec.msgpack.encode(msgspec.structs.replace(trajectory(THERE, 0), **fields))


@pytest.mark.case("R-B101")
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"no", "sent no trajectory"),
        (PICKLED, "sent no trajectory"),
        (NESTED, "nested too deeply"),
        (msgspec.msgpack.encode(trajectory(THERE, 1)), "/s1', not"),
        (changed(sample_index=1), "sample_index 1, not 0"),
        (changed(group_id=HERE.group_id), "group_id"),
        (changed(prompt_id="row-9"), "prompt_id 'row-9'"),
        (changed(version_spans=()), "version spans"),
        (changed(reward=None), "reward None"),
        (changed(reward=float("nan")), "reward nan"),
    ],
    ids=[
        "none", "pickled", "nested", "another's", "another index", "another group",
        "another prompt", "no version", "no reward", "no number",
    ],
)  # fmt: skip
async def test_what_is_no_trajectory_of_its_sample_fails_that_sample_alone(data, said):
    leader = Leader()
    leader.able(1)
    for group in (HERE, THERE):
        leader.rollouts.start(group)
    job = leader.others[1].said[-1].job
    leader.rollouts.on_word(1, wire.TrajectoryPiece(job=job, sample=0, data=data, is_last=True))
    other = msgspec.msgpack.encode(trajectory(THERE, 1))
    leader.rollouts.on_word(1, wire.TrajectoryPiece(job=job, sample=1, data=other, is_last=True))
    await leader.heard()
    gave_up, finished = leader.posted
    assert isinstance(gave_up, SampleGaveUp)
    assert (gave_up.group_id, gave_up.sample_index) == (THERE.group_id, 0)
    assert said in gave_up.failure.message
    assert not was_unpickled()
    assert finished == SampleFinished(trajectory(THERE, 1))
    assert leader.rollouts.node_of(THERE.group_id) is None


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_pieces_that_do_not_end_are_kept_up_to_the_limit_and_then_their_sample_fails(
    monkeypatch,
):
    monkeypatch.setattr("libra_supervisor.app.spread_rollouts.MAX_TRAJECTORY_BYTES", 10)
    leader = Leader()
    leader.able(1)
    for group in (HERE, THERE):
        leader.rollouts.start(group)
    job = leader.others[1].said[-1].job
    piece = wire.TrajectoryPiece(job=job, sample=0, data=b"12345", is_last=False)
    for _ in range(2):
        leader.rollouts.on_word(1, piece)
    assert leader.rollouts._pieces == {1: {(job, 0): b"1234512345"}}
    leader.rollouts.on_word(1, piece)
    await leader.heard()
    (gave_up,) = leader.posted
    assert (gave_up.group_id, gave_up.sample_index) == (THERE.group_id, 0)
    assert leader.rollouts._pieces == {1: {}}


def test_what_has_come_of_a_group_that_nobody_wants_any_more_is_not_kept():
    leader = Leader()
    leader.able(1)
    for group in (HERE, THERE, admitted(2)):
        leader.rollouts.start(group)
    jobs = [it.job for it in leader.others[1].said if isinstance(it, wire.MakeSamples)]
    for job in jobs:
        piece = wire.TrajectoryPiece(job=job, sample=0, data=b"1", is_last=False)
        leader.rollouts.on_word(1, piece)
    leader.rollouts.cancel(THERE.group_id)
    assert leader.rollouts._pieces == {1: {(jobs[1], 0): b"1"}}
    # What is still on its way is not kept either.
    leader.rollouts.on_word(1, msgspec.structs.replace(piece, job=jobs[0]))
    assert leader.rollouts._pieces == {1: {(jobs[1], 0): b"1"}}


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_way_to_fail_that_nobody_knows_is_the_node_s_mistake():
    leader = Leader()
    leader.able(1)
    for group in (HERE, THERE):
        leader.rollouts.start(group)
    job = leader.others[1].said[-1].job
    with pytest.raises(PeerError, match="'tired' is no way to fail"):
        leader.rollouts.on_word(1, wire.SampleGone(job, 0, "tired", "it has no mood"))
    leader.rollouts.on_word(1, wire.SampleGone(job, 0, "timeout", "an engine is silent"))
    await leader.heard()
    assert leader.posted == [
        SampleGaveUp(THERE.group_id, 0, SampleFailed("timeout", "an engine is silent"))
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_servers_are_told_at_once_to_who_takes_part_and_before_what_needs_them():
    leader = Leader(num_others=2)
    first, second = leader.others.values()
    leader.able(1)
    leader.rollouts.on_word(2, wire.CannotMake("its disk is full"))
    for told in (first, second):
        assert told.kinds() == [wire.TakePart]
        assert told.said[0].kv_capacity_by_tp == {1: 10}
    fleet = OneServer()
    routing = ClusterRouting(NoRouting(), fleet, leader.rollouts)
    routing.know("vllm-0", "a", None, is_planned=False)
    routing.serve("vllm-0", 4)
    leader.rollouts.start(HERE)
    leader.rollouts.start(THERE)
    await leader.heard()
    # Two changes of one turn are one message, and the job comes after it.
    assert first.kinds() == [wire.TakePart, wire.Servers, wire.MakeSamples]
    entry = first.said[1].changed[0]
    assert (entry.instance_id, entry.version, entry.is_ready) == ("vllm-0", 4, True)
    assert (first.said[1].wanted, entry.url, entry.tp) == (4, "http://vllm-0", 2)
    routing.withdraw("vllm-0", is_draining=False)
    await leader.heard()
    assert not first.said[-1].changed[0].is_ready
    routing.forget("vllm-0")
    await leader.heard()
    assert first.said[-1].gone == ("vllm-0",)
    assert second.kinds() == [wire.TakePart]
    assert routing.places_of([HERE.group_id, THERE.group_id]) == {
        f"{HERE.group_id}/s0": "vllm-0",
        THERE.group_id: "is made on node 1",
    }


def test_a_server_that_has_ended_since_it_answered_is_told_of_to_nobody():
    leader = Leader()
    fleet = OneServer()
    fleet.url = None
    routing = ClusterRouting(NoRouting(), fleet, leader.rollouts)
    routing.know("vllm-0", "a", None, is_planned=False)
    assert leader.rollouts.roster.take_changes() is None


class OneServer:
    url = "http://vllm-0"

    def tp_of(self, _instance_id):
        return 2

    def url_or_none(self, _instance_id):
        return self.url


class NoRouting:
    """The leader's own scheduler."""

    def know(self, *_what, is_planned): ...
    def serve(self, *_what): ...
    def withdraw(self, _instance_id, *, is_draining): ...
    def forget(self, _instance_id): ...

    def places_of(self, group_ids):
        return {f"{group_ids[0]}/s0": "vllm-0"}


MAKES_NONE = wire.CannotMake("its disk is full")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [on_virtual_time()], ids=["trio"])
@pytest.mark.parametrize(
    ("word", "reads_anew"), [(MAKES_NONE, False), (wire.CanMake(("other data",)), True)]
)
async def test_a_node_that_could_not_make_any_is_asked_again_later_and_later(word, reads_anew):
    leader = Leader()
    (told,) = leader.others.values()
    asked_at = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leader.rollouts.run)
        began_at = clock.now()
        for number in range(1, 9):
            while told.kinds().count(wire.TakePart) < number:
                await clock.sleep(0.5)
            asked_at.append(clock.now() - began_at)
            assert leader.rollouts.status((NODE,))[0].detail == ""
            leader.rollouts.on_word(1, word)
            assert "makes no trajectories: " in leader.rollouts.status((NODE,))[0].detail
        tasks.cancel_scope.cancel()
    pauses = [round(b - a) for a, b in itertools.pairwise(asked_at)]
    assert pauses == [10, 20, 40, 80, 160, 320, 600]
    orders = [it for it in told.said if isinstance(it, wire.TakePart)]
    assert [it.reads_anew for it in orders] == [False] + [reads_anew] * 7


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [on_virtual_time()], ids=["trio"])
async def test_a_node_that_has_made_one_is_asked_soon_when_it_fails_later():
    leader = Leader()
    (told,) = leader.others.values()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leader.rollouts.run)
        for _ in range(3):
            leader.rollouts.on_word(1, MAKES_NONE)
            await clock.sleep(100.0)
        leader.able(1)
        for group in (HERE, THERE):
            leader.rollouts.start(group)
        job = told.said[-1].job
        leader.rollouts.on_word(1, wire.SampleBegun(job, 0))
        data = msgspec.msgpack.encode(trajectory(THERE, 0))
        leader.rollouts.on_word(1, wire.TrajectoryPiece(job=job, sample=0, data=data, is_last=True))
        leader.rollouts.on_word(1, MAKES_NONE)
        before = told.kinds().count(wire.TakePart)
        await clock.sleep(11.0)
        assert told.kinds().count(wire.TakePart) == before + 1
        tasks.cancel_scope.cancel()
