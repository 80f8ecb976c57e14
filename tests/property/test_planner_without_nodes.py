"""Plans on what is left when machines are gone."""

from itertools import groupby

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.ids import InstanceId, NodeRank, ReplicaId, SlotId
from libra.planner.calibration import book_of
from libra.planner.matching import slots_of
from libra.planner.placement import place, spread_over_nodes
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, TrainPlacement
from libra.planner.search import plan as searched
from libra.planner.train_layout import TrainLayout
from libra.planner.without_nodes import (
    Gone,
    Lack,
    Terms,
    fastest,
    plan_without,
    smaller_dp,
)
from planner_cases import A100_80G, QWEN3_14B, grp_config


def home_of(*, tp=1, pp=1, dp=4, instances=(1, 1), per_node=2) -> Plan:
    layout = TrainLayout(tp=tp, pp=pp, cp=1, ep=1, dp=dp, micro_batch_size=1)
    num_gpus = layout.num_gpus + sum(instances)
    placed = place(layout, instances, num_gpus=num_gpus, gpus_per_node=per_node)
    assert placed is not None
    return placed


def terms_of(home, *, min_rollout_gpus=1, divides=8) -> Terms:
    def why_not(plan):
        return "" if divides % plan.train.dp == 0 else f"{divides} / {plan.train.dp}"

    return Terms(
        min_rollout_gpus=min_rollout_gpus,
        layouts=lambda train: smaller_dp(train, micro_batch_size=1),
        why_not=why_not,
    )


def nodes(*ranks):
    return Gone(nodes=frozenset(map(NodeRank, ranks)))


@st.composite
def cases(draw):
    tp, pp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    dp = draw(st.sampled_from([1, 2, 4, 8]))
    instances = draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5))
    per_node = draw(st.sampled_from([2, 4]))
    layout = TrainLayout(tp=tp, pp=pp, cp=1, ep=1, dp=dp, micro_batch_size=1)
    num_gpus = -(-(layout.num_gpus + sum(instances)) // per_node) * per_node
    home = place(layout, instances, num_gpus=num_gpus, gpus_per_node=per_node)
    return home, draw(st.sets(st.integers(1, 12), max_size=6)), draw(st.integers(0, 3))


@given(cases())
def test_what_is_left_keeps_its_place_and_nobody_is_given_what_is_gone(case):
    home, away, least = case
    if home is None:
        return
    gone = nodes(*away)
    found = plan_without(home, gone, terms_of(home, min_rollout_gpus=least))
    if isinstance(found, Lack):
        assert found.reason
        return
    used = slots_of(found)
    assert len(used) == len(set(used))
    assert set(used) <= set(slots_of(home)), "a slot that is none of the run's"
    assert not gone.has(used)
    assert set(found.instances) <= set(home.instances)
    here = [it for it in home.instances if it.node not in away]
    if len(found.instances) < len(here):
        # Some gave way, to a core that had nowhere else to go, and enough are left.
        assert found.num_rollout_gpus >= least
        own = {(found.train.node_of_rank(k), s) for k, s in enumerate(found.train.slots)}
        assert not own <= {(home.train.node_of_rank(k), s) for k, s in enumerate(home.train.slots)}
    train = found.train
    assert (train.tp, train.pp) == (home.train.tp, home.train.pp)
    assert train.dp <= home.train.dp
    assert len(train.slots) == train.world_size
    for first in range(0, train.world_size, train.tp):
        assert len({train.node_of_rank(first + k) for k in range(train.tp)}) == 1


@given(cases())
def test_with_every_node_there_the_plan_is_the_one_of_the_run(case):
    home, _, least = case
    if home is not None:
        assert plan_without(home, Gone(), terms_of(home, min_rollout_gpus=least)) == home


def test_data_parallelism_shrinks_to_what_the_batch_divides_over():
    home = home_of(dp=6, per_node=2)
    found = plan_without(home, nodes(3), terms_of(home, divides=6))
    assert isinstance(found, Plan)
    assert found.train.dp == 3
    # In as few nodes as it can be.
    assert [len(list(group)) for _, group in groupby(found.train.nodes)] == [2, 1]


def test_a_core_without_a_slot_of_its_own_takes_those_of_the_last_servers():
    home = home_of(dp=2, instances=(1, 1, 1, 1), per_node=2)
    assert home.train.node == 2
    found = plan_without(home, nodes(2), terms_of(home, min_rollout_gpus=2))
    assert isinstance(found, Plan)
    assert [it.instance_id for it in found.instances] == ["vllm-0", "vllm-1", "vllm-2"]
    assert (found.train.node, found.train.slots, found.train.dp) == (1, (1,), 1)
    # As many as have to be left may be.
    assert plan_without(home, nodes(2), terms_of(home, min_rollout_gpus=3)) == found
    none = plan_without(home, nodes(2), terms_of(home, min_rollout_gpus=4))
    assert none == Lack("no layout of the trainer fits on 0 GPUs")


def test_why_nothing_fits_is_said_of_what_was_tried():
    home = home_of(tp=2, dp=2, instances=(1, 1), per_node=2)
    terms = terms_of(home)
    short = plan_without(home, Gone(slots=frozenset({(NodeRank(1), SlotId(0))})), terms)
    assert isinstance(short, Plan)
    assert short.train.node == 2
    slots = frozenset({(NodeRank(1), SlotId(0)), (NodeRank(2), SlotId(0))})
    lack = plan_without(home, Gone(slots=slots), terms)
    assert lack == Lack(
        "TP2 PP1 DP1 micro-batch 1 finds no nodes with 2 free GPUs for each of its groups"
    )
    refused = msgspec.structs.replace(terms, why_not=lambda _: "never")
    lack = plan_without(home, nodes(2), refused)
    assert lack == Lack("TP2 PP1 DP1 micro-batch 1: never")


def test_a_group_lies_on_several_nodes_where_that_is_allowed():
    home = home_of(tp=2, dp=2, instances=(1, 1), per_node=2)
    slots = frozenset({(NodeRank(1), SlotId(0)), (NodeRank(2), SlotId(0))})
    terms = msgspec.structs.replace(terms_of(home), crosses_nodes=True)
    found = plan_without(home, Gone(slots=slots), terms)
    assert isinstance(found, Plan)
    assert (found.train.nodes, found.train.slots) == ((1, 2), (1, 1))


def test_why_nothing_fits_is_said_of_the_try_that_leaves_every_server():
    home = home_of(tp=2, dp=2, instances=(1, 1, 1, 1), per_node=2)
    assert home.train.nodes == (2, 2, 3, 3)
    gone = Gone(
        nodes=frozenset({NodeRank(3)}), slots=frozenset({(NodeRank(n), SlotId(0)) for n in (1, 2)})
    )
    found = plan_without(home, gone, terms_of(home))
    assert found == Lack("no layout of the trainer fits on 1 GPUs")


def test_the_fullest_nodes_are_taken_and_ranks_follow_the_nodes():
    home = home_of(dp=6, per_node=2)
    assert home.train.nodes == (1, 1, 2, 2, 3, 3)

    def found(*slots, divides):
        gone = Gone(slots=frozenset((NodeRank(node), SlotId(slot)) for node, slot in slots))
        plan = plan_without(home, gone, terms_of(home, divides=divides))
        assert isinstance(plan, Plan)
        return [(plan.train.node_of_rank(rank), slot) for rank, slot in enumerate(plan.train.slots)]

    assert found((1, 0), (3, 0), divides=2) == [(2, 0), (2, 1)]
    assert found((3, 0), divides=2) == [(1, 0), (1, 1)]
    assert found((1, 0), divides=5) == [(1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]


def test_what_was_given_up_is_not_started_again():
    home = home_of()
    gone = Gone(instances=frozenset({InstanceId("vllm-0")}))
    found = plan_without(home, gone, terms_of(home))
    assert isinstance(found, Plan)
    assert [it.instance_id for it in found.instances] == ["vllm-1"]


@pytest.mark.parametrize("lost", [1, 3, 5])
def test_the_planner_chooses_where_the_layout_was_its_own(lost):
    config = grp_config(num_gpus=48, arch=QWEN3_14B, hardware=A100_80G)
    home = searched(config).plan
    book = book_of(A100_80G, QWEN3_14B)
    terms = Terms(
        min_rollout_gpus=1,
        layouts=lambda train: fastest(config, train, book),
        why_not=lambda _: "",
    )
    found = plan_without(home, nodes(lost), terms)
    assert isinstance(found, Plan)
    assert not nodes(lost).has(slots_of(found))
    core = {home.train.node_of_rank(k) for k in range(home.train.world_size)}
    if lost not in core:
        assert found.train == home.train
        return
    # Less data parallelism holds more of the optimizer on each rank: it may need other degrees.
    assert 0 < found.train.world_size < home.train.world_size
    assert found.train.micro_batch_size is not None
    small = msgspec.structs.replace(home.train, slots=home.train.slots[:1])
    assert not list(fastest(config, small, book)(1))


def test_the_planner_s_layouts_keep_the_experts_and_the_fewest_gpus_of_training():
    config = grp_config(num_gpus=48, arch=QWEN3_14B, hardware=A100_80G)
    train, book = searched(config).plan.train, book_of(A100_80G, QWEN3_14B)
    found = {it.num_gpus for it in fastest(config, train, book)(24)}
    assert min(found) < 16 <= max(found) <= 24
    planner = msgspec.structs.replace(config.global_resource_planner, min_train_gpus=16)
    least = msgspec.structs.replace(config, global_resource_planner=planner)
    assert {it.num_gpus for it in fastest(least, train, book)(24)} == {
        it for it in found if it >= 16
    }
    assert not list(fastest(least, train, book)(15))
    # No layout of a model without experts spreads them over two ranks.
    assert not list(fastest(config, msgspec.structs.replace(train, ep=2), book)(24))


def test_servers_of_others_stay_whatever_is_lost_and_have_no_slots_to_give():
    theirs = tuple(
        InstancePlacement(instance_id=InstanceId(f"vllm-{n}"), tp=1, slots=()) for n in range(2)
    )
    ranks = TrainPlacement(tp=1, pp=1, cp=1, ep=1, dp=4, slots=tuple(map(SlotId, range(4))))
    given = Plan(strategy="configured", train=ranks, instances=theirs)
    home = spread_over_nodes(given, gpus_per_node=2)
    assert home is not None
    assert (home.instances, home.train.nodes) == (theirs, (0, 0, 1, 1))
    found = plan_without(home, nodes(1), terms_of(home))
    assert isinstance(found, Plan)
    assert (found.instances, found.train.dp) == (theirs, 2)
    alone = msgspec.structs.replace(
        home, train=msgspec.structs.replace(home.train, tp=2, dp=1, slots=(SlotId(0), SlotId(1)),
                                            node=NodeRank(1), nodes=())
    )  # fmt: skip
    for least in (0, 1):
        terms = terms_of(alone, min_rollout_gpus=least)
        assert isinstance(plan_without(alone, nodes(1), terms), Lack)


def test_a_core_that_lost_a_node_takes_the_slots_of_its_replicas_before_a_server_s():
    home = home_of(dp=2, instances=(1,), per_node=2)
    replica = HybridPlacement(replica_id=ReplicaId("hybrid-1"), slots=(SlotId(1),))
    moved = TrainPlacement(
        tp=1, pp=1, cp=1, ep=1, dp=2, slots=tuple(map(SlotId, (0, 1))), node=NodeRank(1)
    )
    home = msgspec.structs.replace(home, train=moved, hybrids=(replica,))
    found = plan_without(home, nodes(1), terms_of(home, min_rollout_gpus=0))
    assert isinstance(found, Plan)
    assert (found.train.slots, found.train.node) == ((1,), 0)
    assert found.instances == home.instances
    assert found.hybrids == ()
