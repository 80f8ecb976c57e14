"""The only server sleeps while a replica has its slot, and comes back in time as it is."""

from random import Random

import pytest

from lending_world import ALONE, SERVER, lending, lent, until, until_ahead
from libra.pools.member import MemberState
from libra_supervisor import events

PLANNER = {
    "runtime_lent_servers": "sleep",
    "runtime_rollout_reconfigure_strategy": "prewarm",
}


def borrowed(world, rng):
    until_ahead(world, rng, 8)
    world.post(events.ReconfigurationWanted(1, lent(), "test"))
    return changed(world, rng, 1)


def changed(world, rng, count):
    until(world, rng, lambda: len(world.reconfigurations) >= count)
    return world.reconfigurations[count - 1].record


def ends_well(world, rng):
    until(world, rng, lambda: world.ended is not None)
    assert world.ended.exit_code == 0, world.ended
    assert [step for _, step, _ in world.trained] == list(range(1, 41))


@pytest.mark.parametrize("seed", range(5))
def test_it_comes_back_by_itself_by_waking_up_and_loading_the_newest_version(seed):
    world, rng = lending(planner=PLANNER), Random(seed)
    there = borrowed(world, rng)
    assert there.transitions == (
        "warm up hybrid-1",
        "wait until hybrid-1 needs a device",
        "drain vllm-0",
        "put vllm-0 to sleep",
        "attach hybrid-1",
    )
    assert (there.outcome, there.asleep) == ("done", (SERVER,))
    pool = world.control.pool
    assert pool.is_lent_out
    assert not pool.has_answering
    back = changed(world, rng, 2)
    assert (back.outcome, back.cause, back.started) == ("done", "starved", (SERVER,)), back
    assert world.num_births_of[SERVER] == 1
    assert world.control.plans.asleep == ()
    ends_well(world, rng)


@pytest.mark.parametrize("happens", ["it is dead", "it will not"])
def test_when_it_does_not_wake_up_another_process_comes(happens):
    world, rng = lending(planner={"runtime_lent_servers": "sleep"}), Random(3)
    borrowed(world, rng)
    if happens == "it is dead":
        world.kill_process(SERVER)
        until(world, rng, lambda: SERVER not in world.control.pool)
    else:
        world.sleepless = [SERVER]
    back = changed(world, rng, 2)
    assert (back.outcome, back.cause) == ("done", "starved"), back
    assert sum(world.num_births_of.values()) == 2
    ends_well(world, rng)


def test_by_order_it_comes_back_as_well():
    world, rng = lending(planner=PLANNER), Random(4)
    borrowed(world, rng)
    world.post(events.ReconfigurationWanted(2, ALONE, "test"))
    assert world.control.pool[SERVER].state is MemberState.ASLEEP
    back = changed(world, rng, 2)
    assert (back.outcome, back.cause, back.started) == ("done", "decision", (SERVER,)), back
    ends_well(world, rng)
