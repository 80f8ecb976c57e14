"""Batches of reloads: whose ACK counts, who is tried again, and who is replaced."""

from random import Random

import msgspec
import pytest

from control_runs import A, B, is_reload_answer, is_verdict, run_until, run_until_stuck, started
from control_world import RandomWorld
from libra.pools.member import MemberState
from libra_supervisor import events
from libra_supervisor.loop.cycle import Phase


def test_a_batch_of_reloads_that_is_open_when_the_run_ends_has_its_line():
    rng = Random(6)
    world = started(total_steps=9)
    run_until(world, rng, lambda w: w.control.publication.waiting_for and w.control.cycle.step)
    version = world.control.cycle.step
    assert version not in [it.record.policy_version for it in world.reloads]
    world.post(events.StopRequested("SIGINT", now=True))
    assert world.ended is not None
    assert (world.reloads[-1].record.policy_version, world.reloads[-1].record.outcome) == (
        version, "cancelled: the run ended",
    )  # fmt: skip
    assert world.control.publication.is_idle


@pytest.mark.case("T-B63")
def test_a_version_that_no_engine_lived_to_prove_is_tried_again_with_their_replacements():
    rng = Random(10)
    world = started(total_steps=5, num_instances=1)
    run_until(world, rng, lambda w: w.control.cycle.step == 2)
    run_until(world, rng, lambda w: w.control.publication.waiting_for == (A,))
    world.kill_process(A)
    assert world.ended is None
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert [step for _, step, _ in world.trained] == [1, 2, 3, 4, 5]
    outcomes = [w.record.outcome.split(":")[0] for w in world.reloads]
    assert outcomes.count("failed") == 1


def test_a_version_that_fails_everywhere_three_times_ends_the_run():
    rng = Random(11)
    world = started(total_steps=5, num_instances=1)
    run_until(world, rng, lambda w: w.control.cycle.phase is Phase.COLLECTING)
    for _ in range(3):
        run_until(world, rng, lambda w: w.control.publication.waiting_for == (A,))
        run_until(world, rng, lambda w: any(r.instance_id == A for r in reload_answers(w)))
        world.kill_process(A)
    assert world.ended is not None
    assert world.ended.exit_code == 4
    assert "3 batches in a row" in world.ended.reason


def reload_answers(world: RandomWorld) -> list[events.ReloadAnswered]:
    return [e for e in world.pending if isinstance(e, events.ReloadAnswered)]


@pytest.mark.case("R-B89")
def test_an_engine_whose_load_failed_is_loaded_once_more_from_the_good_version_and_lives():
    rng = Random(19)
    world = started(total_steps=5)
    run_until(world, rng, lambda w: w.publishing == 2)
    world.loads_to_fail.append(A)
    run_until(world, rng, lambda w: w.control.publication.committed == 2)
    assert A not in world.routes
    assert world.control.pool[A].state is not MemberState.SERVING
    (record,) = (w.record for w in world.reloads if w.record.policy_version == 2)
    assert "loading failed" in record.quarantined[A]
    assert record.accepted == (B,)
    assert [ack.error for ack in record.acks if ack.instance_id == A] == ["loading failed"]
    world.run(rng)
    rescue = next(w.record for w in world.reloads if w.record.is_catch_up)
    assert (rescue.policy_version, rescue.accepted, rescue.outcome) == (2, (A,), "committed")
    assert world.num_births_of[A] == 1
    assert set(world.routes) == {A, B}


@pytest.mark.case("R-B89")
def test_an_engine_that_fails_the_good_version_too_is_replaced():
    rng = Random(20)
    world = started(total_steps=5)
    run_until(world, rng, lambda w: w.publishing == 2)
    world.loads_to_fail += [A, A]
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert world.num_births_of[A] == 2
    assert set(world.routes) == {A, B}
    assert world.control.publication.counts.num_quarantined == 2


def test_without_a_good_version_an_engine_whose_load_failed_is_replaced_at_once():
    rng = Random(21)
    world = started(total_steps=3, num_instances=1)
    run_until(world, rng, lambda w: w.publishing == 1)
    world.loads_to_fail.append(A)
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert world.num_births_of[A] == 2


def test_a_failed_engine_does_not_outlive_its_gang_unreplaced():
    rng = Random(22)
    world = started(total_steps=3)
    run_until(world, rng, lambda w: w.publishing == 1)
    world.loads_to_fail.append(A)
    world.is_held = is_verdict
    run_until_stuck(world, rng)
    world.lose_gang()
    assert world.num_births_of[A] == 2
    assert world.reloads[-1].record.outcome == "cancelled: the gang was lost"
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert set(world.routes) == {A, B}


def test_a_duplicate_ack_is_refused_logged_and_recorded_with_the_batch():
    rng = Random(24)
    world = started(total_steps=2)
    run_until(world, rng, lambda w: w.publishing == 1)
    run_until(world, rng, lambda w: any(is_reload_answer(e) for e in w.pending))
    answer = next(e for e in world.pending if is_reload_answer(e))
    world.pending.remove(answer)
    world.post(answer)
    world.post(answer)
    assert world.said[-1].event == "ack_refused"
    world.run(rng)
    (record,) = (w.record for w in world.reloads if w.record.policy_version == 1)
    assert [(r.ack, r.reason) for r in record.refused_acks] == [
        (answer.ack, "the instance has answered already")
    ]
    assert world.control.publication.counts.num_refused_acks == 1


def test_an_ack_that_comes_after_its_batch_is_recorded_by_itself():
    rng = Random(26)
    world = started(total_steps=2)
    run_until(world, rng, lambda w: any(is_reload_answer(e) for e in w.pending))
    answer = next(e for e in world.pending if is_reload_answer(e))
    run_until(world, rng, lambda w: w.control.publication.committed == 0)
    assert world.control.publication.is_idle
    num_reloads = len(world.reloads)
    world.post(answer)
    (stray,) = (written.record for written in world.stray_acks)
    assert (stray.outcome, stray.nonce, stray.policy_version) == ("no batch", answer.nonce, 0)
    assert [(r.ack, r.reason) for r in stray.refused_acks] == [
        (answer.ack, "no reload batch is open")
    ]
    assert stray.wall_time_ns == int(world.now * 1e9)
    assert len(world.reloads) == num_reloads
    assert world.control.publication.counts.num_refused_acks == 1


def test_an_ack_of_another_server_than_the_one_that_was_asked_proves_nothing():
    rng = Random(27)
    world = started(total_steps=2)
    run_until(world, rng, lambda w: w.publishing == 1)
    run_until(world, rng, lambda w: len([e for e in w.pending if is_reload_answer(e)]) == 2)
    of_a, of_b = sorted(
        (e for e in world.pending if is_reload_answer(e)), key=lambda e: e.instance_id
    )
    world.pending.remove(of_a)
    world.post(msgspec.structs.replace(of_a, ack=of_b.ack))
    assert world.control.publication.waiting_for == (B,), "nobody waits for what cannot come"
    assert A not in world.routes
    world.run(rng)
    record = next(w.record for w in world.reloads if w.record.policy_version == 1)
    assert record.accepted == (B,)
    assert [(r.ack, r.reason) for r in record.refused_acks] == [
        (of_b.ack, f"{A} was asked and answered as {B}")
    ]
    assert record.quarantined == {A: f"{A} was asked and answered as {B}"}
    assert world.num_births_of[A] == 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"run_id": "run-2"}, "another run or an earlier try"),
        ({"nonce": "earlier"}, "another run or an earlier try"),
        ({"incarnation": "vllm-0-99"}, "it comes from the incarnation vllm-0-99"),
        ({"method": "restart"}, "it reports restart/parallel"),
        ({"strategy": "serial"}, "it reports inplace/serial"),
    ],
)
def test_a_server_whose_answer_is_refused_is_not_waited_for_until_the_timeout(wrong, why):
    rng = Random(28)
    world = started(total_steps=2)
    run_until(world, rng, lambda w: w.publishing == 1)
    run_until(world, rng, lambda w: len([e for e in w.pending if is_reload_answer(e)]) == 2)
    answer = next(e for e in world.pending if is_reload_answer(e) and e.instance_id == A)
    world.pending.remove(answer)
    ack = msgspec.structs.replace(answer.ack, **wrong)
    world.post(msgspec.structs.replace(answer, ack=ack))
    assert world.control.publication.waiting_for == (B,)
    world.run(rng)
    record = next(w.record for w in world.reloads if w.record.policy_version == 1)
    assert record.accepted == (B,)
    assert [r.ack for r in record.refused_acks] == [ack]
    assert why in record.quarantined[A]
    assert world.ended.exit_code == 0


def test_with_serial_reloads_the_others_serve_until_it_is_their_turn():
    rng = Random(28)
    world = started(total_steps=2, reload_strategy="serial")
    run_until(world, rng, lambda w: w.publishing == 1)
    world.is_held = is_reload_answer
    run_until_stuck(world, rng)
    (first,) = (e for e in world.pending if is_reload_answer(e))
    assert (first.instance_id, world.routes) == (A, {B: 0})
    world.pending.remove(first)
    world.post(first)
    (second,) = (e for e in world.pending if is_reload_answer(e))
    assert (second.instance_id, world.routes) == (B, {})
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended.exit_code == 0
    assert set(world.routes.values()) == {2}


@pytest.mark.case("R-B89")
def test_a_process_that_was_to_be_rescued_and_died_is_not_asked_under_its_successors_name():
    rng = Random(33)
    world = started(total_steps=5)
    run_until(world, rng, lambda w: w.publishing == 2)
    world.loads_to_fail.append(A)
    world.is_held = lambda event: is_reload_answer(event) and event.instance_id == B
    run_until_stuck(world, rng)
    assert world.control.pool[A].state is MemberState.QUARANTINED
    world.is_held = lambda event: isinstance(event, events.InstanceAnswered)
    world.kill_process(A)
    run_until(world, rng, lambda w: w.control.publication.committed == 2)
    asked = [event for event in world.pending if is_reload_answer(event)]
    assert not any(event.instance_id == A for event in asked)
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended.exit_code == 0
    assert world.num_births_of[A] == 2
