"""Where the ranks of a replica find their heads in a run over several nodes."""

import pytest

from libra.errors import InvariantError
from libra.ids import NodeRank, ReplicaId, RunId, SlotId
from libra.planner.plan import HybridPlacement, TrainPlacement
from libra.rollouts.batch import BatchShape
from libra.wire.hybrid import JoinCore, LaneAddress, LaneOpened, OpenLanes
from libra_supervisor.loop import commands
from libra_supervisor.loop.hybrid_desk import HybridDesk, HybridTerms

NAME = ReplicaId("hybrid-0")
KEY = bytes(range(32))
HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
CORE = TrainPlacement(
    tp=1, pp=2, cp=1, ep=1, dp=2,
    slots=tuple(map(SlotId, (0, 1, 0, 1))), nodes=tuple(map(NodeRank, (1, 1, 2, 2))),
)  # fmt: skip


def desk(hosts=HOSTS) -> HybridDesk:
    return HybridDesk(
        HybridTerms(
            run_id=RunId("run"),
            key=KEY,
            directory="/run/hybrid",
            core=CORE,
            hosts=hosts,
            replica_size=2,
            replica_data=1,
            join_timeout_s=100.0,
            shape=BatchShape(dp_size=2, mini_batch_size=4),
        )
    )


def on(*nodes):
    return HybridPlacement(
        replica_id=NAME,
        slots=tuple(SlotId(5 + k) for k in range(len(nodes))),
        node=NodeRank(nodes[0]),
        nodes=tuple(map(NodeRank, nodes)) if len(set(nodes)) > 1 else (),
    )


def opened(rank, lane, *, has_tcp=True):
    tcp = LaneAddress(host=HOSTS[CORE.node_of_rank(rank)], port=4000 + lane) if has_tcp else None
    return LaneOpened(rank=rank, lane=lane, unix=LaneAddress(unix=f"lane-{lane}"), tcp=tcp)


def joined(one: HybridDesk, placement, **options) -> JoinCore:
    """What the replica is told once its snapshot is there, through lanes of ranks 0 and 2."""
    one.on_core_begins(1)
    one.on_core_ready()
    one.attach(placement)
    one.on_replica_ready(NAME, now=0.0)
    told = one.on_boundary(3, is_saving=False).commands
    [opening] = [it.command for it in told if isinstance(it, commands.TellRanks)]
    assert opening == OpenLanes(RunId("run"), KEY, 2, ("10.0.0.2", "10.0.0.2", *["10.0.0.3"] * 2))
    for lane, rank in enumerate((0, 2)):
        one.on_lane_opened(opened(rank, lane, **options))
    [join] = one.on_snapshot_saved(3).commands
    assert isinstance(join, commands.TellReplica)
    assert isinstance(join.command, JoinCore)
    assert join.command.key == KEY
    return join.command


@pytest.mark.parametrize(
    ("nodes", "kinds"),
    [((1, 1), ("unix", "tcp")), ((2, 2), ("tcp", "unix")), ((0, 0), ("tcp", "tcp")),
     ((1, 2), ("unix", "unix")), ((0, 2), ("tcp", "unix"))],
)  # fmt: skip
def test_a_rank_shares_memory_with_a_head_on_its_node_and_dials_any_other(nodes, kinds):
    lanes = joined(desk(), on(*nodes)).lanes
    assert tuple("unix" if it.unix else "tcp" for it in lanes) == kinds
    for lane, (address, host) in enumerate(zip(lanes, ("10.0.0.2", "10.0.0.3"), strict=True)):
        assert address.unix or (address.host, address.port) == (host, 4000 + lane)


def test_lanes_of_another_core_are_where_that_one_lies():
    one = desk()
    one.on_core_reshaped(
        TrainPlacement(tp=1, pp=2, cp=1, ep=1, dp=1, slots=(SlotId(3), SlotId(2)), node=NodeRank(0))
    )
    one.on_core_begins(2)
    one.on_core_ready()
    one.attach(on(0, 0))
    one.on_replica_ready(NAME, now=0.0)
    told = one.on_boundary(3, is_saving=False).commands
    [opening] = [it.command for it in told if isinstance(it, commands.TellRanks)]
    assert opening.hosts == ("10.0.0.1", "10.0.0.1")


def test_a_head_that_listens_on_its_node_alone_has_no_member_elsewhere():
    with pytest.raises(InvariantError, match="lane 0 is not open for node 0"):
        joined(desk(), on(0, 0), has_tcp=False)


def test_a_run_on_one_node_opens_nothing_on_the_network():
    one = desk(hosts=())
    one.on_core_begins(1)
    one.on_core_ready()
    one.attach(on(1, 1))
    one.on_replica_ready(NAME, now=0.0)
    told = one.on_boundary(0, is_saving=False).commands
    [opening] = [it.command for it in told if isinstance(it, commands.TellRanks)]
    assert opening.hosts == ()


def test_a_snapshot_that_cannot_be_written_ends_who_waits_for_it_and_is_removed():
    one = desk()
    one.on_core_begins(1)
    one.on_core_ready()
    one.attach(on(0, 0))
    one.on_replica_ready(NAME, now=0.0)
    one.on_boundary(3, is_saving=False)
    done = one.on_snapshot_saved(3, "no room")
    stopped = [it.replica_id for it in done.commands if isinstance(it, commands.StopReplica)]
    assert stopped == [NAME]
    assert commands.DropSnapshot(one.terms.snapshot_of(3)) in done.commands
    [lost] = one.on_replica_down(NAME, "it was told to leave").news
    assert (lost.replica_id, lost.why) == (NAME, "no room")
