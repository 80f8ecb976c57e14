"""The recompute probe before training: who waits for it, and what follows from it."""

from random import Random

import pytest

from control_world import RandomWorld
from libra.wire.rank import RecomputeProbed
from libra_supervisor import events

TOO_MUCH = "recompute_logprobs does not fit"


def probed(rank: int, error: str = "") -> RecomputeProbed:
    return RecomputeProbed(rank=rank, before_bytes=100, peak_bytes=150 + rank, error=error)


def started() -> RandomWorld:
    world = RandomWorld(num_probes=2)
    world.boot()
    return world


def say(world: RandomWorld, *answers: RecomputeProbed) -> None:
    for answer in answers:
        world.post(events.RankSaid(world.attempt, answer))


def test_training_waits_until_every_rank_has_probed_and_the_plan_was_kept():
    world = started()
    world.run(Random(1))
    say(world, probed(0))
    assert world.judged == []
    say(world, probed(1))
    assert [p.rank for p in world.judged[0].probes] == [0, 1]
    world.run(Random(1))
    assert world.trained == []
    world.post(events.ProbeJudged(world.attempt, "kept", "it fits"))
    world.run(Random(1))
    assert world.ended.exit_code == 0
    assert len(world.trained) == 4


def test_one_rank_without_memory_is_enough_to_judge_since_the_others_may_wait_for_it():
    world = started()
    say(world, probed(1, TOO_MUCH))
    assert [p.error for p in world.judged[0].probes] == [TOO_MUCH]
    say(world, probed(0, TOO_MUCH))
    assert len(world.judged) == 1


def test_a_plan_that_does_not_fit_is_replaced_and_nothing_more_is_asked_for():
    world = started()
    say(world, probed(0, TOO_MUCH))
    world.post(events.ProbeJudged(world.attempt, "replaced", "going on with TP2"))
    assert world.replaced.reason == "going on with TP2"
    assert world.control.is_ending
    assert world.ended is None


def test_without_another_plan_the_run_ends_with_the_exit_code_of_no_plan():
    world = started()
    say(world, probed(0, TOO_MUCH))
    world.post(events.ProbeJudged(world.attempt, "impossible", "no layout is feasible"))
    assert (world.ended.exit_code, world.ended.reason) == (3, "no layout is feasible")


@pytest.mark.parametrize("attempt_judged", [1, 2])
def test_a_gang_that_is_lost_before_it_trained_probes_again(attempt_judged):
    world = started()
    say(world, probed(0))
    world.lose_gang()
    say(world, probed(1))
    assert world.judged == [], "one rank of either attempt is no whole probe"
    say(world, probed(0))
    world.post(events.ProbeJudged(attempt_judged, "kept", "it fits"))
    world.run(Random(2))
    # A verdict on the attempt that was lost says nothing.
    assert (world.ended is not None) == (attempt_judged == 2)


def test_a_gang_that_goes_on_from_a_checkpoint_does_not_probe_again():
    world = started()
    say(world, probed(0), probed(1))
    world.post(events.ProbeJudged(world.attempt, "kept", "it fits"))
    rng = Random(3)
    while not world.checkpoints:
        assert world.step(rng)
    world.lose_gang()
    world.run(rng)
    assert world.ended.exit_code == 0
    assert len(world.judged) == 1
