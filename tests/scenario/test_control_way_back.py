"""Ways back that fail too: each wait has an end, and what is left serves."""

from random import Random

import msgspec
import pytest

from control_parts import plan_of
from control_runs import run_until
from elastic_world import TIMEOUT_S, a_step_is_trained, elastic, plan, records, want
from hybrid_world import HybridWorld
from lending_world import CONFIG, OPTIONS, until_ahead
from lending_world import until as until_there
from libra.config.planning import PlannerConfig
from libra.ids import InstanceId, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement
from libra.pools.change_policy import policy_of
from libra_supervisor import events
from libra_supervisor.loop.plan_desk import PlanDesk

TWO, LENT = plan([2], [0, 1]), plan([2], [0], [1])
KEPT = InstanceId("vllm-0")


def without_lanes(*, total_steps=12):
    """A run whose replica is one more rank of the core and has a server's slot."""
    world, rng = elastic(decouple_communication_domains=False, total_steps=total_steps), Random(5)
    run_until(world, rng, a_step_is_trained)
    want(world, LENT)
    run_until(world, rng, lambda w: len(w.reconfigurations) == 1)
    [there] = records(world)
    assert (there.outcome, there.plan.train.dp, there.plan.hybrids) == ("done", 2, ())
    return world, rng


def went_back(world, rng, *, most_s):
    """How the way back ended, which takes no longer than that."""
    want(world, TWO, 2)
    began = world.now
    while len(world.reconfigurations) < 2:
        world.step(rng)
        assert world.ended is None, world.ended
        world.now += 0.5
        world.post(events.Ticked())
        assert world.now - began < most_s, world.control.plans.change.current
    return records(world)[1]


def goes_on(world, rng, *, total_steps=12):
    del world.is_held
    world.run(rng)
    assert world.ended.exit_code == 0, world.ended
    assert [step for _, step, _ in world.trained] == list(range(1, total_steps + 1))


def test_without_lanes_servers_that_do_not_come_back_leave_their_slots_to_the_core():
    world, rng = without_lanes(total_steps=60)
    world.is_held = lambda event: isinstance(event, events.ChildReady)
    back = went_back(world, rng, most_s=3 * TIMEOUT_S)
    assert (back.outcome, back.plan.train.dp) == ("rolled_back", 2)
    assert back.reason == "wait until vllm-2 serves: not over within 50 s"
    assert [it.instance_id for it in back.plan.instances] == [KEPT]
    assert KEPT in world.routes
    goes_on(world, rng, total_steps=60)


def test_without_lanes_a_core_that_comes_up_in_neither_layout_leaves_what_serves():
    world, rng = without_lanes()
    world.is_held = lambda event: isinstance(event, events.GangReady)
    back = went_back(world, rng, most_s=4 * TIMEOUT_S)
    assert back.outcome == "failed"
    smaller, _, larger = back.reason.partition("; on the way back: ")
    assert smaller.endswith("DP 1 on slots 2: not over within 50 s")
    assert larger.endswith("DP 2 on slots 2, 1: not over within 50 s")
    assert (back.plan.train.dp, [it.instance_id for it in back.plan.instances]) == (2, [KEPT])
    assert KEPT in world.routes
    goes_on(world, rng)


def both_lent():
    """A run whose two servers' slots train; nothing serves."""
    planner = msgspec.convert(OPTIONS, PlannerConfig)
    servers = plan_of([KEPT, InstanceId("vllm-1")])
    desk = PlanDesk(servers, policy_of(planner, num_slots=3), config=CONFIG)
    world = HybridWorld(
        replica_size=1, plans=desk, total_steps=40, offpolicyness=30.0, max_concurrent=40
    )
    desk.hybrids = world.hybrids
    world.boot()
    rng = Random(3)
    until_ahead(world, rng, 8)
    replicas = tuple(
        HybridPlacement(replica_id=ReplicaId(f"any-{slot}"), slots=(SlotId(slot),))
        for slot in (0, 1)
    )
    want(world, msgspec.structs.replace(servers, instances=(), hybrids=replicas))
    until_there(world, rng, lambda: bool(world.reconfigurations))
    [there] = records(world)
    assert (there.outcome, there.plan.instances, len(there.plan.hybrids)) == ("done", (), 2)
    return world, rng


def test_of_the_servers_that_were_lent_those_come_back_whose_slots_are_free():
    world, rng = both_lent()
    [stuck] = [it for it in world.control.plans.plan.hybrids if it.slots == (1,)]
    # It does not end: what it has is nobody's any more.
    del world.replicas[stuck.replica_id]
    world.post(events.ReplicaDown(stuck.replica_id, "does not end", is_clean=False))
    until_there(world, rng, lambda: len(world.reconfigurations) >= 3)
    back = records(world)[-1]
    assert (back.cause, back.outcome) == ("starved", "done"), back
    assert [it.slots for it in back.plan.instances] == [(0,)]
    until_there(world, rng, lambda: world.ended is not None)
    assert world.ended.exit_code == 0, world.ended
    assert [step for _, step, _ in world.trained] == list(range(1, 41))


@pytest.mark.parametrize(
    ("core", "lost", "train", "servers"),
    [
        ((2,), (), (2,), (0, 1)),
        ((2,), (1,), (2,), (0,)),
        # The core has a server's slot: it keeps that while others are enough.
        ((2, 0), (), (2, 0), (1,)),
        ((2, 0), (1,), (2,), (0,)),
        # Nothing can come back: what the run ends with names the slot.
        ((2,), (0, 1), (2,), (0, 1)),
    ],
)
def test_what_comes_back_from_a_loan_is_what_can(core, lost, train, servers):
    policy = policy_of(msgspec.convert(OPTIONS, PlannerConfig), num_slots=3)
    desk = PlanDesk(TWO, policy, config=CONFIG)
    desk.put_in_force(plan(core, ()))
    desk.lost = frozenset((0, slot) for slot in lost)
    back = desk.given_back()
    assert back.train.slots == train
    assert tuple(slot for it in back.instances for slot in it.slots) == servers
