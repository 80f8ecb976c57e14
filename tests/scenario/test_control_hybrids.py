"""Control with hybrid replicas, in a world where everything comes in any order and fails."""

from random import Random

import msgspec
import pytest

from control_parts import plan_of
from hybrid_world import HybridWorld
from libra.config.model import ModelConfig
from libra.config.planning import PlannerConfig
from libra.config.run import RunConfig
from libra.config.training import TrainingConfig
from libra.errors import InvariantError
from libra.ids import InstanceId, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement
from libra.pools.change_policy import policy_of
from libra.pools.hybrid import HybridState
from libra.wire.hybrid import LaneAddress, LaneOpened
from libra.wire.rank import StepTrained
from libra_supervisor import events
from libra_supervisor.loop import commands
from libra_supervisor.loop.hybrid_desk import Done
from libra_supervisor.loop.plan_desk import PlanDesk


def run_on(world, rng, condition, *, most=4000):
    for _ in range(most):
        if condition():
            return
        obey_one(world, rng)
        assert world.step(rng) or world.ended is None
    raise AssertionError("it never came to that")


def obey_one(world, rng):
    names = sorted(world.replicas)
    if names:
        world.obey(rng.choice(names))


def state_of(world, name):
    return world.hybrids.pool[name].state


def booted(**options):
    world = HybridWorld(**options)
    world.boot()
    return world


@pytest.mark.parametrize("seed", range(10))
def test_a_replica_joins_contributes_and_leaves(seed):
    world, rng = booted(total_steps=40), Random(seed)
    name = world.attach()
    run_on(world, rng, lambda: any(name in it for it in world.members_of.values()))
    first = min(step for step, members in world.members_of.items() if name in members)
    run_on(world, rng, lambda: world.gang_version is not None and world.gang_version >= first + 3)
    world.detach(name)
    run_on(world, rng, lambda: ("hybrid_left", name) in world.news)
    run_on(world, rng, lambda: world.ended is not None)
    assert world.ended.exit_code == 0
    steps = [step for step, members in sorted(world.members_of.items()) if name in members]
    assert steps == list(range(first, first + len(steps)))
    assert world.news == [("hybrid_joined", name), ("hybrid_stops", name), ("hybrid_left", name)]
    assert not world.snapshots


@pytest.mark.parametrize("seed", range(5))
def test_a_replica_that_was_warm_joins_once_it_has_its_devices(seed):
    world, rng = booted(total_steps=40), Random(seed)
    name = world.warm()
    for _ in range(300):
        obey_one(world, rng)
        world.step(rng)
    hybrid = world.hybrids.pool[name]
    assert (hybrid.state, hybrid.is_ready, hybrid.snapshot) == (HybridState.JOINING, False, None)
    assert world.hybrids.present == (), "it holds no device yet"
    world.give_devices(name)
    assert [it.replica_id for it in world.hybrids.present] == [name]
    run_on(world, rng, lambda: any(name in it for it in world.members_of.values()))


def test_a_replica_that_was_lost_while_it_was_warm_gets_no_devices():
    world, rng = booted(total_steps=40), Random(3)
    name = world.warm()
    placement = world.replicas[name].placement
    world.lose_gang()
    assert state_of(world, name) is HybridState.LEAVING
    assert world.hybrids.attach(placement) == ()
    run_on(world, rng, lambda: ("hybrid_lost", name) in world.news)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_to_replicas_the_core_takes_every_step(seed):
    world, rng = booted(total_steps=30, save_interval=3), Random(seed)
    for _ in range(6000):
        if world.ended is not None:
            break
        disturb(world, rng)
        obey_one(world, rng)
        world.step(rng)
    assert world.ended is not None, "a replica holds the core up"
    assert world.ended.exit_code == 0
    attempts = {attempt for attempt, _, _ in world.trained}
    for attempt in attempts:
        steps = [step for its, step, _ in world.trained if its == attempt]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert world.trained[-1][1] == 30
    ends = [name for said, name in world.news if said in ("hybrid_lost", "hybrid_left")]
    assert len(ends) == len(set(ends))


def disturb(world, rng):  # noqa: C901 - a table
    """One of the many things that can go wrong, now and then."""
    living = sorted(world.replicas)
    chance = rng.random()
    if chance < 0.01 and len(living) < 3:
        world.attach() if chance < 0.005 else world.warm()
    elif living and chance < 0.0115:
        name = rng.choice(living)
        if not world.hybrids.pool[name].has_devices:
            world.give_devices(name)
    elif living and chance < 0.013:
        world.kill(rng.choice(living))
    elif living and chance < 0.016:
        world.detach(rng.choice(living))
    elif living and chance < 0.02:
        name = rng.choice(living)
        if state_of(world, name) in (HybridState.MEMBER, HybridState.CATCHING_UP):
            world.drops = {name: "its norm"}
    elif chance < 0.0205:
        world.lose_gang()


def test_a_lost_core_takes_its_replicas_with_it_and_new_ones_join_the_next():
    world, rng = booted(total_steps=60), Random(3)
    name = world.attach()
    run_on(world, rng, lambda: any(name in it for it in world.members_of.values()))
    world.lose_gang()
    run_on(world, rng, lambda: ("hybrid_lost", name) in world.news)
    other = world.attach()
    run_on(world, rng, lambda: any(other in it for it in world.members_of.values()))
    assert world.lanes_attempt == world.attempt == 2


def test_the_loss_of_a_replica_of_the_plan_is_said_once():
    world, rng = booted(), Random(3)
    name = world.attach()
    plans = world.control.plans
    placement = world.replicas[name].placement
    plans.plan = msgspec.structs.replace(plans.plan, hybrids=(placement,))
    world.kill(name)
    run_on(world, rng, lambda: not plans.plan.hybrids)
    assert world.news == [("hybrid_lost", name)]
    assert world.plan_in_force.hybrids == ()


def test_no_snapshot_is_asked_for_before_the_core_is_where_the_run_goes_on():
    world, rng = booted(), Random(5)
    name = world.attach()
    for kind in (events.ReplicaReady, events.GangReady):
        (event,) = [it for it in world.pending if isinstance(it, kind)]
        world.pending.remove(event)
        world.post(event)
        assert not world.writing
    run_on(world, rng, lambda: any(name in it for it in world.members_of.values()))


def test_a_replica_of_another_size_is_a_bug():
    world = booted()
    world.attach()
    placement = world.replicas["hybrid-0"].placement
    with pytest.raises(Exception, match="has 1 slots, a replica has 2 ranks"):
        world.hybrids.attach(type(placement)(replica_id="x", slots=placement.slots[:1]))


def test_replicas_are_as_large_as_the_core_that_is_there():
    options = {
        "runtime_dynamic_reconfiguration_enabled": True,
        "runtime_reconfigure_training": True,
    }
    policy = policy_of(msgspec.convert(options, PlannerConfig), num_slots=6)
    config = RunConfig(
        model=ModelConfig(model_path="m"),
        training=TrainingConfig(batch_size=4, micro_batch_size=1),
    )
    before = plan_of([InstanceId("vllm-0"), InstanceId("vllm-1")])
    world, rng = booted(plans=PlanDesk(before, policy, config=config), total_steps=30), Random(3)
    run_on(world, rng, lambda: world.trained)
    four = tuple(map(SlotId, (2, 3, 4, 5)))
    core = msgspec.structs.replace(before.train, tp=4, slots=four)
    wanted = msgspec.structs.replace(before, train=core)
    world.post(events.ReconfigurationWanted(1, wanted, "test"))
    run_on(world, rng, lambda: world.reconfigurations)
    assert world.reconfigurations[0].record.outcome == "done"
    replica = HybridPlacement(replica_id=ReplicaId("hybrid-9"), slots=four)
    assert world.hybrids.attach(replica) == (commands.StartReplica(replica),)
    with pytest.raises(InvariantError, match="a replica has 4 ranks"):
        world.attach()


def test_in_mode_none_servers_that_answered_before_the_trainer_are_routed_to():
    world, rng = booted(total_steps=3, sync_interval=0, offpolicyness=float("inf")), Random(1)
    world.control.policy = type(world.control.policy)(min_rollout_gpus=1, publishes=False)
    run_on(world, rng, lambda: world.ended is not None)
    assert world.ended.exit_code == 0
    assert not world.published


def test_only_a_replica_that_is_asked_to_leave_may_finish_what_it_does():
    world = HybridWorld()
    desk = world.hybrids
    asked, hung = world.attach(), world.attach()
    assert commands.StopReplica(asked, in_a_hurry=False) in desk.detach(asked)
    trained = StepTrained(0, 1, None, dropped={hung: "its gradients did not come"})
    assert commands.StopReplica(hung, in_a_hurry=True) in desk.on_trained(trained).commands


@pytest.mark.case("R-B48")
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("is_asked", [False, True])
def test_what_a_replica_that_does_not_end_holds_on_to_is_said(is_warm, is_asked):
    desk = HybridWorld().hybrids
    placement = HybridPlacement(replica_id=ReplicaId("hybrid-0"), slots=(SlotId(3), SlotId(4)))
    (desk.warm if is_warm else desk.attach)(placement)
    if is_asked:
        desk.detach(placement.replica_id)
    [news] = desk.on_replica_down(placement.replica_id, "pid 7", is_clean=False).news
    # One without devices is in nobody's way.
    lost = frozenset() if is_warm else frozenset({(0, 3), (0, 4)})
    if is_asked:
        assert news == events.HybridLeft(placement.replica_id, lost)
    else:
        assert news.lost == lost
        assert "pid 7" in news.why


def test_a_replica_that_left_while_the_lanes_were_opened_is_not_told_to_join():
    world = HybridWorld()
    desk = world.hybrids
    desk.on_core_begins(1)
    name = world.attach()
    desk.on_core_ready()
    desk.on_replica_ready(name, now=0.0)
    desk.on_boundary(0, is_saving=False)
    desk.on_snapshot_saved(0)
    assert commands.StopReplica(name) in desk.detach(name)
    told = [desk.on_lane_opened(LaneOpened(k, k, LaneAddress(), None)).commands for k in (0, 1)]
    assert told == [(), ()]


def test_a_replica_that_waited_for_the_lanes_of_a_lost_core_is_not_sent_to_the_next():
    world = HybridWorld()
    desk = world.hybrids
    desk.on_core_begins(1)
    name = world.attach()
    assert desk.on_boundary(0, is_saving=False) == Done(), "nobody is there to take a snapshot"
    desk.on_core_ready()
    desk.on_replica_ready(name, now=0.0)
    opening, snapshot = desk.on_boundary(0, is_saving=False).commands
    assert isinstance(opening, commands.TellRanks)
    assert isinstance(snapshot, commands.TakeSnapshot)
    assert desk.on_snapshot_saved(0).commands == ()
    assert commands.StopReplica(name, in_a_hurry=True) in desk.on_core_begins(2).commands
    told = [desk.on_lane_opened(LaneOpened(k, k, LaneAddress(), None)).commands for k in (0, 1)]
    assert told == [(), ()]
