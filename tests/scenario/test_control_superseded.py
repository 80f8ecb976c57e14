"""Answers that come after a newer version has taken the place of what was asked for."""

from random import Random

import msgspec
import pytest

from control_runs import run_until
from control_world import RandomWorld
from libra.ids import InstanceId
from libra_supervisor import events

A = InstanceId("vllm-0")
WHY = "a batch with a newer version has taken the place of that one"


def is_of_a(event):
    return isinstance(event, events.ReloadAnswered) and event.instance_id == A


def overtaken(*, is_over):
    """A run in which a late server still loads when all are asked for the next version.

    `is_over`: and they have it. With it comes the late server's answer to the first request.
    """
    rng, world = Random(31), RandomWorld(total_steps=8)
    world.boot()
    run_until(world, rng, lambda w: w.control.publication.committed == 1)
    world.kill_process(A)
    run_until(world, rng, lambda w: any(map(is_of_a, w.pending)))
    late = next(filter(is_of_a, world.pending))
    world.pending.remove(late)
    asked_for = late.ack.policy_version
    assert world.control.publication.waiting_for == (A,)
    run_until(world, rng, lambda w: any(map(is_of_a, w.pending)))
    newer = next(filter(is_of_a, world.pending)).ack.policy_version
    assert newer > asked_for
    if is_over:
        run_until(world, rng, lambda w: w.control.publication.committed == newer)
        assert world.control.publication.is_idle
    return world, rng, late


def refusals(world):
    return [
        (said.is_warning, said.fields["why"]) for said in world.said if said.event == "ack_refused"
    ]


@pytest.mark.parametrize("is_over", [False, True])
def test_the_answer_to_a_request_that_a_newer_version_overtook_is_no_reason_to_warn(is_over):
    world, rng, late = overtaken(is_over=is_over)
    world.post(late)
    assert refusals(world) == [(False, WHY)]
    assert world.control.publication.counts.num_refused_acks == 1
    # It answers once. Whatever else comes under that name is nobody's.
    world.post(late)
    assert [is_warning for is_warning, _ in refusals(world)] == [False, True]
    world.run(rng)
    assert world.ended.exit_code == 0


def test_nor_is_the_word_that_it_was_overtaken():
    world, _, late = overtaken(is_over=False)
    gone = msgspec.structs.replace(late, ack=None, error="it is being replaced")
    for is_warning in (False, True):
        world.post(gone)
        said = world.said[-1]
        assert (said.event, said.is_warning) == ("reload_undelivered", is_warning)


def test_an_answer_under_another_name_than_that_of_the_request_is_warned_of():
    world, _, late = overtaken(is_over=False)
    world.post(msgspec.structs.replace(late, ack=msgspec.structs.replace(late.ack, nonce="other")))
    assert refusals(world) == [(True, "it belongs to another run or an earlier try")]
