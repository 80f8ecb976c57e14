"""What a supervisor that comes after makes of what was kept of the plan."""

import msgspec
import pytest

from libra.config.model import ModelConfig
from libra.config.planning import PlannerConfig
from libra.config.run import RunConfig
from libra.ids import NodeRank, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement, Plan
from libra.pools.change_policy import policy_of
from libra.pools.reconfiguration import Order
from libra_supervisor.loop.plan_desk import PlanDesk
from libra_supervisor.loop.plan_memory import PlanMemory
from libra_supervisor.loop.presence import Presence
from node_world import HOME

REPLICA = HybridPlacement(replica_id=ReplicaId("hybrid-9"), slots=(SlotId(3),), node=NodeRank(2))
WITH_REPLICA = msgspec.structs.replace(HOME, hybrids=(REPLICA,))
SMALLER = msgspec.structs.replace(HOME, instances=HOME.instances[:2])


def order(old: Plan, wanted: Plan, cause="decision") -> Order:
    return Order(decision_id=3, reason="r", old=old, wanted=wanted, cause=cause)


def kept(**changes) -> PlanMemory:
    return PlanMemory(**{"plan": SMALLER, "next_number": 10, **changes})


def test_a_run_that_never_lost_a_node_goes_on_with_what_it_had():
    memory = kept(order=order(HOME, SMALLER))
    assert memory.whole() == memory


def test_a_run_that_went_on_without_a_node_begins_with_every_node_there():
    assert kept(home=HOME).whole() == kept(plan=HOME, home=HOME)
    grows = order(SMALLER, HOME, "node_back")
    assert kept(home=HOME, order=grows).whole() == kept(plan=HOME, home=HOME)
    # What was decided meanwhile is not taken up again: its machines may be other ones.
    decided = order(SMALLER, SMALLER)
    assert kept(home=HOME, order=decided).whole() == kept(plan=HOME, home=HOME)


def test_a_decision_that_was_interrupted_once_all_nodes_were_back_is_made():
    memory = kept(plan=HOME, home=HOME, order=order(HOME, SMALLER))
    assert memory.whole() == memory
    with_replica = kept(plan=WITH_REPLICA, home=HOME)
    assert with_replica.whole() == with_replica


def test_a_supervisor_that_comes_after_starts_without_the_replicas_of_the_one_before():
    plan = kept(plan=WITH_REPLICA).to_start_with(min_rollout_gpus=1)
    assert plan == msgspec.structs.replace(WITH_REPLICA, hybrids=())


def desk(memory: PlanMemory) -> PlanDesk:
    policy = policy_of(PlannerConfig(), num_slots=4, num_slots_elsewhere=(4, 4))
    config = RunConfig(model=ModelConfig(model_path="m"))
    nodes = Presence((NodeRank(1), NodeRank(2)))
    return PlanDesk(HOME, policy, config=config, memory=memory, presence=nodes)


def test_lost_slots_of_every_node_stay_lost():
    lost = {(NodeRank(0), SlotId(3)), (NodeRank(2), SlotId(2))}
    memory = kept(plan=HOME, lost_slots=(SlotId(3),), lost_elsewhere=((NodeRank(2), SlotId(2)),))
    one = desk(memory)
    assert one.lost == lost
    one.lost |= {(NodeRank(1), SlotId(3))}
    written = one.memory_if_changed()
    assert written is not None
    assert written.lost_slots == (3,)
    assert written.lost_elsewhere == ((1, 3), (2, 2))
    again = msgspec.json.decode(msgspec.json.encode(written), type=PlanMemory)
    assert desk(again).lost == one.lost


def test_slots_of_nodes_that_are_away_or_not_counted_on_are_not_to_be_used():
    one = desk(kept(plan=HOME))
    assert {node for node, _ in one.unusable} == {1, 2}
    one.presence.absent = frozenset({NodeRank(1)})
    one.presence.uncounted = frozenset({NodeRank(1), NodeRank(2)})
    assert one.presence.missed_by(HOME) == "node 1 is away, node 2 is not counted on yet"
    one.presence.absent = one.presence.uncounted = frozenset()
    assert not one.unusable
    assert not one.presence.missed_by(HOME)


@pytest.mark.parametrize(
    ("absent", "uncounted", "may_come"), [(1, 2, True), (1, 1, False), (3, 2, False)]
)
def test_only_a_node_that_the_run_has_not_gone_on_without_is_waited_for(
    absent, uncounted, may_come
):
    nodes = Presence()
    nodes.absent, nodes.uncounted = frozenset({NodeRank(absent)}), frozenset({NodeRank(uncounted)})
    assert nodes.may_come(HOME) == may_come
    assert nodes.is_away(HOME) == (absent == 1)


def test_servers_that_were_lent_come_back_where_their_node_is_there():
    one = desk(kept(plan=HOME))
    train = msgspec.structs.replace(HOME.train, dp=1, slots=HOME.train.slots[3:], nodes=())
    train = msgspec.structs.replace(train, node=NodeRank(2))
    one.lent_from = HOME
    one.plan = msgspec.structs.replace(HOME, train=train, instances=())
    one.presence.absent = frozenset({NodeRank(1)})
    back = one.given_back()
    assert back is not None
    assert [it.instance_id for it in back.instances] == ["vllm-10", "vllm-11"]
    assert {it.node for it in back.instances} == {0}
    one.presence.absent = frozenset({NodeRank(1), NodeRank(2)})
    assert one.given_back() is None
