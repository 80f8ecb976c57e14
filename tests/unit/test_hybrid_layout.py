"""Which rank is the head of which lane, what is left of a mini-batch, and replicas in the core."""

import pytest

from libra.config.training import TrainingConfig
from libra.errors import ConfigError
from libra.ids import NodeRank, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement, Plan, TrainPlacement, with_hybrids_in_core
from libra.trainer.hybrid_shares import Shares
from libra.trainer.layout import coordinates, lane_of, parallel_sizes
from libra.wire.hybrid import MemberShare
from libra.wire.rank import MiniBatch

FIRST, SECOND = ReplicaId("hybrid-0"), ReplicaId("hybrid-1")


def sizes_of(world_size, *, tp=1, pp=1, cp=1, ep=1):
    config = TrainingConfig(train_tp_size=tp, train_pp_size=pp, train_cp_size=cp, train_ep_size=ep)
    return parallel_sizes(config, world_size=world_size)


@pytest.mark.parametrize(
    ("layout", "data"),
    [({}, 1), ({"tp": 2}, 1), ({"tp": 2, "pp": 2}, 1), ({"cp": 2, "pp": 2}, 1), ({"ep": 2}, 2)],
)
def test_every_lane_has_one_head_with_the_coordinates_of_its_member(layout, data):
    grid = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
    core, replica = sizes_of(4 * grid, **layout), sizes_of(data * grid, **layout)
    found = {}
    for rank in range(4 * grid):
        at = coordinates(core, rank=rank, local_rank=rank)
        lane = lane_of(core, at, replica_size=data * grid)
        if lane is not None:
            assert lane not in found
            found[lane] = at
    assert sorted(found) == list(range(data * grid))
    for lane, head in found.items():
        member = coordinates(replica, rank=lane, local_rank=lane)
        for name in ("tensor", "pipeline", "context", "expert", "data"):
            assert getattr(member, name) == getattr(head, name), name


@pytest.mark.parametrize(
    ("layout", "replica_size"), [({"tp": 2}, 3), ({"tp": 2}, 0), ({}, 5), ({"ep": 2}, 1)]
)
def test_what_is_no_whole_replica_of_the_core_is_refused(layout, replica_size):
    sizes = sizes_of(4, **layout)
    at = coordinates(sizes, rank=0, local_rank=0)
    with pytest.raises(ConfigError, match=f"replicas of {replica_size} ranks do not fit"):
        lane_of(sizes, at, replica_size=replica_size)


MEMBERS = (MemberShare(FIRST, (5, 30), (1, 3)), MemberShare(SECOND, (5, 10), (1, 2)))


@pytest.mark.parametrize(
    ("aggregation", "dropped", "tokens", "scale"),
    [
        ("token-mean", (), 100, 1.0),
        ("token-mean", (FIRST,), 70, 100 / 70),
        ("token-mean", (FIRST, SECOND), 60, 100 / 60),
        ("seq-mean-token-mean", (FIRST,), 70, 8 / 5),
        ("seq-mean-token-sum-norm", (FIRST, SECOND), 60, 8 / 3),
    ],
)
def test_the_mean_is_over_what_contributed(aggregation, dropped, tokens, scale):
    shares = Shares(aggregation, MiniBatch((), 100, 8), MEMBERS, 1)
    assert shares.without(dropped) == (tokens, pytest.approx(scale))


def test_nothing_is_scaled_when_nothing_is_left():
    shares = Shares("token-mean", MiniBatch((), 10, 2), MEMBERS, 0)
    assert shares.without((FIRST, SECOND)) == (0, 1.0)


def plan(*hybrids, nodes=()):
    slots = tuple(map(SlotId, (4, 5)))
    train = TrainPlacement(tp=2, pp=1, cp=1, ep=1, dp=1, slots=slots, nodes=nodes)
    return Plan(strategy="grp", train=train, instances=(), hybrids=hybrids)


def test_replicas_in_the_core_are_more_data_parallel_ranks_on_the_same_devices():
    hybrids = [HybridPlacement(replica_id=FIRST, slots=(SlotId(0), SlotId(1)))]
    found = with_hybrids_in_core(plan(*hybrids))
    assert (found.train.dp, found.train.slots, found.hybrids) == (2, (4, 5, 0, 1), ())
    assert found.train.nodes == ()
    assert with_hybrids_in_core(plan()) == plan()


def test_replicas_of_another_node_keep_their_node_in_the_core():
    away = HybridPlacement(replica_id=FIRST, slots=(SlotId(0), SlotId(1)), node=NodeRank(1))
    assert with_hybrids_in_core(plan(away)).train.nodes == (0, 0, 1, 1)
