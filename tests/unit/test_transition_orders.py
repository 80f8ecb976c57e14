"""What is ordered for a transition."""

from types import SimpleNamespace

from libra.ids import InstanceId, SlotId
from libra.planner.plan import InstancePlacement, TrainPlacement
from libra.pools.ground import Ground, Server, Stage
from libra.pools.member import MemberState
from libra.pools.pool import RolloutPool
from libra.pools.transition import Warm
from libra_supervisor.loop import commands
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.transition_orders import orders_for


def instance(number, *slots):
    return InstancePlacement(
        instance_id=InstanceId(f"vllm-{number}"), tp=len(slots), slots=tuple(map(SlotId, slots))
    )


def test_a_server_that_warms_up_is_no_reserve_for_the_one_whose_devices_it_gets():
    stays, goes, comes = instance(0, 0), instance(1, 1), instance(2, 1, 3)
    pool = RolloutPool([(it.instance_id, it.tp) for it in (stays, goes)], now=0.0)
    ground = Ground(
        train=TrainPlacement(tp=1, pp=1, cp=1, ep=1, dp=1, slots=(SlotId(2),)),
        servers=(Server(stays, Stage.SERVING), Server(goes, Stage.SERVING)),
    )
    plans = SimpleNamespace(change=SimpleNamespace(ground=ground), hybrids=None)
    state = SimpleNamespace(pool=pool, plans=plans)
    ordered = orders_for(state, Warm((comes,)), Moment(now=1.0, wall_ns=1))
    assert ordered == (commands.AddInstance(comes, has_devices=False),)
    heir = pool[comes.instance_id]
    assert (heir.state, heir.waits_for) == (MemberState.WARMING, {"vllm-1"})
    assert pool.num_possible_gpus == 2
    pool.on_gave_up(goes.instance_id, "dies", now=2.0)
    assert pool.num_possible_gpus == 3
