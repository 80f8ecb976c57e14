import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config_files import config_from
from libra.planner.applied import planned_config
from libra.planner.placement import place, spread_over_nodes
from libra.planner.plan import configured_plan
from libra.planner.search import plan
from libra.planner.train_layout import TrainLayout
from planner_cases import grp_config


def layout(tp, dp, pp=1):
    return TrainLayout(tp=tp, ep=1, pp=pp, cp=1, dp=dp, micro_batch_size=1)


def slots_of(placed):
    train = placed.train
    used = [(train.node_of_rank(rank), slot) for rank, slot in enumerate(train.slots)]
    return used + [(i.node, slot) for i in placed.instances for slot in i.slots]


@settings(deadline=None)
@given(
    train_tp=st.sampled_from([1, 2, 4, 8]),
    num_nodes=st.integers(2, 5),
    data=st.data(),
)
def test_powers_of_two_always_find_room_without_crossing_a_node(train_tp, num_nodes, data):
    num_gpus = 8 * num_nodes
    dp = data.draw(st.integers(1, (num_gpus - 8) // train_tp))
    left = num_gpus - train_tp * dp
    tps = []
    while left:
        tps.append(data.draw(st.sampled_from([tp for tp in (1, 2, 4, 8) if tp <= left])))
        left -= tps[-1]
    placed = place(layout(train_tp, dp), tps, num_gpus=num_gpus, gpus_per_node=8)
    assert placed is not None
    assert len(set(slots_of(placed))) == num_gpus
    for first in range(0, train_tp * dp, train_tp):
        nodes = {placed.train.node_of_rank(first + k) for k in range(train_tp)}
        assert len(nodes) == 1


def test_instances_that_cannot_lie_inside_nodes_have_no_placement():
    assert place(layout(8, 1), [6, 6], num_gpus=16 + 4, gpus_per_node=8) is None


def test_a_training_group_larger_than_a_node_takes_whole_neighbours():
    placed = place(layout(16, 1), [4, 4], num_gpus=24, gpus_per_node=8)
    assert placed.train.nodes == (1,) * 8 + (2,) * 8
    assert {instance.node for instance in placed.instances} == {0}


def test_one_node_needs_no_node_per_rank():
    placed = place(layout(2, 2), [4], num_gpus=8, gpus_per_node=8)
    assert placed.train.nodes == ()
    assert placed.train.slots == (4, 5, 6, 7)
    assert placed.instances[0].slots == (0, 1, 2, 3)


def test_training_that_does_not_fit_has_no_placement():
    assert place(layout(8, 2), [1], num_gpus=12, gpus_per_node=8) is None
    assert place(layout(16, 2), [1], num_gpus=24, gpus_per_node=8) is None


@pytest.mark.parametrize("num_gpus", [8, 48])
def test_a_planned_configuration_pins_the_same_split(num_gpus):
    config = grp_config(
        num_gpus=num_gpus,
        batch_size=64,
        max_new_tokens=1024,
        planner={"allocation_granularity_gpus": 4},
        megatron={"megatron_recompute_granularity": "full"},
    )
    report = plan(config)
    pinned = planned_config(config, report.plan)
    again = configured_plan(pinned)
    assert again.train.world_size == report.plan.train.world_size
    assert (again.train.tp, again.train.pp) == (report.plan.train.tp, report.plan.train.pp)
    assert sorted(i.tp for i in again.instances) == sorted(i.tp for i in report.plan.instances)
    assert pinned.training.micro_batch_size == report.choice.train.micro_batch_size


def test_a_configured_split_is_spread_over_nodes_and_keeps_what_else_it_says():
    text = (
        "rollout_gpus: 4\ntrain_gpus: 4\ntrain_tp_size: 2\n"
        "heterogeneous_rollout: {instances: [{tp: 1, count: 2}, {tp: 2, count: 1}]}"
    )
    configured = configured_plan(config_from(text))
    placed = spread_over_nodes(configured, gpus_per_node=4)
    assert placed is not None
    assert placed.strategy == "configured"
    assert placed.train.micro_batch_size is None
    assert {placed.train.node_of_rank(rank) for rank in range(4)} == {1}
    assert [(it.tp, it.node, it.slots) for it in placed.instances] == [
        (2, 0, (0, 1)), (1, 0, (2,)), (1, 0, (3,))
    ]  # fmt: skip
    three = spread_over_nodes(configured, gpus_per_node=3)
    assert three is not None
    assert three.train.nodes == (1, 1, 2, 2)
    assert spread_over_nodes(configured, gpus_per_node=1) is None
