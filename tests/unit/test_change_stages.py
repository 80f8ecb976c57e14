"""What children are said to do during a change, and for how long."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from libra.ids import InstanceId, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, TrainPlacement
from libra.pools.change_order import Rules
from libra.pools.ground import Ground, Hybrid, Server, Stage
from libra.pools.hybrid import HybridPool
from libra.pools.pool import RolloutPool
from libra.pools.reconfiguration import Order, Reconfiguration
from libra_supervisor.loop.change_stages import stages_now
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.stage_clock import StageClock

TRAIN = TrainPlacement(tp=1, pp=1, cp=1, ep=1, dp=1, slots=(SlotId(2),))
SPLIT = TrainPlacement(tp=2, pp=1, cp=1, ep=1, dp=1, slots=(SlotId(2), SlotId(3)))
OLD, NEW = (
    InstancePlacement(instance_id=InstanceId(name), tp=1, slots=(SlotId(slot),))
    for name, slot in (("vllm-0", 0), ("vllm-1", 1))
)
REPLICA = HybridPlacement(replica_id=ReplicaId("hybrid-2"), slots=(SlotId(4),))


@dataclass
class FakeState:
    """What stages are read from."""

    pool: RolloutPool
    hybrids: object = None
    attempt: int = 1
    cycle: object = field(default_factory=lambda: SimpleNamespace(phase=Phase.COLLECTING))
    plans: object = field(default_factory=lambda: SimpleNamespace(stages=StageClock(attempt=1)))


def change_on(**ground) -> Reconfiguration:
    old = Plan(strategy="configured", train=TRAIN, instances=(OLD,))
    order = Order(decision_id=1, reason="test", old=old, wanted=old)
    standing = Ground(**{"train": TRAIN, "servers": (), **ground})
    return Reconfiguration(order, standing, Rules(min_rollout_gpus=1), timeout_s=1.0, now=0.0)


def test_an_instance_starts_until_it_answers_and_then_loads_until_it_serves():
    state = FakeState(RolloutPool([(NEW.instance_id, 1)], now=0.0))
    change = change_on(servers=(Server(OLD, Stage.STARTING), Server(NEW, Stage.STARTING)))
    # One of both plans is not waited for.
    assert stages_now(state, change) == {"vllm-1": "start"}
    state.pool.on_answering(NEW.instance_id, now=1.0)
    assert stages_now(state, change) == {"vllm-1": "load"}
    for stage, word in (
        (Stage.WARMING, "warm"),
        (Stage.DRAINING, "drain"),
        (Stage.FALLING_ASLEEP, "sleep"),
        (Stage.STOPPING, "stop"),
    ):
        assert stages_now(state, change_on(servers=(Server(NEW, stage),))) == {"vllm-1": word}
    assert stages_now(state, change_on(servers=(Server(NEW, Stage.SERVING),))) == {}
    asleep = change_on(servers=(Server(NEW, Stage.ASLEEP),))
    assert stages_now(state, asleep) == {}
    assert state.pool.on_asleep(NEW.instance_id, now=2.0)
    state.pool.on_wake_wanted(NEW.instance_id, now=3.0)
    assert stages_now(state, change_on(servers=(Server(NEW, Stage.STARTING),))) == {
        "vllm-1": "wake"
    }


def test_a_replica_starts_waits_for_a_snapshot_loads_it_and_catches_up():
    pool, name = HybridPool(join_timeout_s=9.0), REPLICA.replica_id
    state = FakeState(RolloutPool([], now=0.0), SimpleNamespace(pool=pool))
    change = change_on(hybrids=(Hybrid(REPLICA),))
    pool.on_attach(name)
    seen = [stages_now(state, change)]
    for happens in (
        lambda: pool.on_ready(name, now=1.0),
        lambda: pool.on_boundary(step=3, is_saving=False),
        lambda: pool.on_saved(3),
        lambda: pool.on_joined(name, 3, now=2.0),
        lambda: pool.on_detach(name),
    ):
        happens()
        seen.append(stages_now(state, change))
    words = ["start", "snapshot", "snapshot", "load", "catch_up", "leave"]
    assert [it[name] for it in seen] == words
    assert stages_now(state, change_on(hybrids=(Hybrid(REPLICA, is_member=True),))) == {}
    warming = change_on(hybrids=(Hybrid(REPLICA, waits=Stage.WARMING),))
    assert stages_now(state, warming) == {name: "warm"}
    assert stages_now(state, change_on(hybrids=(Hybrid(REPLICA, waits=Stage.WARM),))) == {}


def test_the_trainer_finishes_its_step_is_held_saves_stops_and_starts():
    state = FakeState(RolloutPool([], now=0.0))
    assert stages_now(state, change_on()) == {}
    assert stages_now(state, change_on(is_hold_wanted=True)) == {"trainer": "finish_step"}
    held = change_on(is_hold_wanted=True, is_held=True)
    assert stages_now(state, held) == {"trainer": "hold"}
    restarts = change_on(is_hold_wanted=True, is_held=True, reshaping=SPLIT)
    state.cycle.phase = Phase.SAVING
    assert stages_now(state, restarts) == {"trainer": "save"}
    state.cycle.phase = Phase.RESHAPING
    assert stages_now(state, restarts) == {"trainer": "stop"}
    state.attempt = 2
    assert stages_now(state, restarts) == {"trainer": "start"}


def test_seconds_are_added_up_by_what_a_child_did_until_the_next_look():
    clock = StageClock()
    clock.look({"a": "start"}, now=10.0)
    clock.look({"a": "load", "b": "stop"}, now=12.0)
    clock.look({"a": "load"}, now=12.5)
    clock.look({"a": "start"}, now=13.0)
    clock.look({}, now=20.0)
    assert clock.seconds == {"a": {"start": 9.0, "load": 1.0}, "b": {"stop": 0.5}}
