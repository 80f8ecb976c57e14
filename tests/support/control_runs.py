"""Runs of `control_world` that have begun, and how tests of `Control` take them to a moment."""

from random import Random

from control_world import RandomWorld
from libra.ids import InstanceId
from libra.wire.rank import AcksJudged, WeightsExported
from libra_supervisor import events
from transfer_world import TransferWorld

A = InstanceId("vllm-0")
B = InstanceId("vllm-1")


def started(*, method="inplace", **knobs) -> RandomWorld:
    if method == "transfer":
        world = TransferWorld(**knobs)
    else:
        world = RandomWorld(reload_method=method, **knobs)
    world.boot()
    return world


def run_until(world: RandomWorld, rng: Random, condition) -> None:
    for _ in range(5000):
        if condition(world):
            return
        assert world.step(rng), "nothing is left to happen"
    raise AssertionError("it never came to that")


def is_reload_answer(event: object) -> bool:
    return isinstance(event, events.ReloadAnswered)


def is_export(event: object) -> bool:
    return isinstance(event, events.RankSaid) and isinstance(event.event, WeightsExported)


def is_verdict(event: object) -> bool:
    return isinstance(event, events.RankSaid) and isinstance(event.event, AcksJudged)


def run_until_stuck(world: RandomWorld, rng: Random) -> None:
    while world.step(rng):
        pass
