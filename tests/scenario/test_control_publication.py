"""How a version gets from the trainer to the servers while training goes on."""

from random import Random

import msgspec
import pytest

from control_runs import (
    A,
    B,
    is_export,
    is_reload_answer,
    is_verdict,
    run_until,
    run_until_stuck,
    started,
)
from libra_supervisor import events
from libra_supervisor.loop.cycle import Phase


def test_an_engine_whose_probe_disagrees_a_lot_ends_the_run_with_exit_code_6():
    world = started(probe_error_of=lambda i: 0.5 if i == B else 0.0)
    world.run(Random(0))
    assert world.ended is not None
    assert world.ended.exit_code == 6
    assert "differ by 0.5" in world.ended.reason


def test_a_reload_on_demand_brings_the_committed_version_once_more_and_disturbs_no_step():
    rng = Random(9)
    world = started(total_steps=6)
    run_until(world, rng, lambda w: w.control.cycle.step == 2)
    world.is_held = lambda event: isinstance(event, events.SampleStarted)
    run_until(world, rng, lambda w: w.control.publication.committed == 2)
    num_reloads, committed = len(world.reloads), world.control.publication.committed
    world.post(events.ReloadRequested())
    run_until(world, rng, lambda w: len(w.reloads) > num_reloads)
    world.is_held = lambda event: False
    again = world.reloads[num_reloads].record
    assert again.is_catch_up
    assert again.policy_version == committed
    assert set(again.accepted) == {A, B}
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert [step for _, step, _ in world.trained] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("held", [is_reload_answer, is_verdict])
def test_the_trainer_trains_the_next_batch_while_engines_load_and_waits_before_it_publishes(held):
    rng = Random(12)
    world = started(total_steps=5, offpolicyness=1)
    run_until(world, rng, lambda w: w.publishing == 1)
    world.is_held = held
    run_until_stuck(world, rng)
    assert [step for _, step, _ in world.trained] == [1, 2]
    assert world.trained_while_publishing[-1] == 2
    assert world.published[-1] == (1, 1)
    assert world.control.cycle.phase is Phase.SETTLING
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert [version for _, version in world.published] == [0, 1, 2, 3, 4, 5]
    assert world.written[1].record.publish_wait_s > 0


def test_with_no_slack_the_trainer_cannot_go_ahead_of_the_engines():
    rng = Random(13)
    world = started(total_steps=3, offpolicyness=0)
    run_until(world, rng, lambda w: w.publishing == 1)
    world.is_held = is_reload_answer
    run_until_stuck(world, rng)
    assert [step for _, step, _ in world.trained] == [1]
    assert world.control.cycle.phase is Phase.COLLECTING
    world.is_held = lambda event: False
    world.run(rng)
    assert {lag for _, _, lag in world.trained} == {0}
    assert {w.record.publish_wait_s for w in world.written} == {0.0}


def test_weights_trained_past_a_version_that_disagrees_are_never_published():
    rng = Random(14)
    wrong = []
    world = started(total_steps=9, probe_error_of=lambda i: 7.0 if wrong else 0.0)
    run_until(world, rng, lambda w: w.publishing == 2)
    wrong.append(True)
    world.is_held = lambda event: isinstance(event, events.ExportChecked)
    run_until_stuck(world, rng)
    world.is_held = is_verdict
    run_until_stuck(world, rng)
    assert [step for _, step, _ in world.trained] == [1, 2, 3]
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 6
    assert world.published[-1] == (1, 2)


def test_a_broken_export_ends_the_run_though_the_trainer_went_on():
    rng = Random(15)
    world = started(total_steps=9)
    run_until(world, rng, lambda w: w.publishing == 1)
    world.is_held = lambda event: isinstance(event, events.ExportChecked)
    run_until_stuck(world, rng)
    (checked,) = (e for e in world.pending if isinstance(e, events.ExportChecked))
    world.pending.remove(checked)
    served = dict(world.routes)
    world.post(msgspec.structs.replace(checked, error="model.safetensors is missing"))
    assert world.ended is not None
    assert world.ended.exit_code == 4
    assert "model.safetensors is missing" in world.ended.reason
    # No engine was asked for it.
    assert set(served.values()) == {0}
    assert {process.version for process in world.processes.values()} == {0}


def test_the_run_ends_only_when_the_last_version_is_committed():
    rng = Random(16)
    world = started(total_steps=2)
    run_until(world, rng, lambda w: w.publishing == 2)
    world.is_held = is_reload_answer
    run_until_stuck(world, rng)
    assert world.ended is None
    assert 2 in world.checkpoints
    assert world.control.cycle.phase is Phase.SETTLING
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert set(world.routes.values()) == {2}


def test_a_gang_lost_while_engines_load_publishes_its_checkpoint_anew():
    rng = Random(17)
    world = started(total_steps=4, save_interval=1)
    run_until(world, rng, lambda w: w.publishing == 2)
    world.is_held = is_reload_answer
    run_until_stuck(world, rng)
    world.lose_gang()
    assert world.routes == {}
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert next(v for attempt, v in world.published if attempt == 2) == 2
    assert any(said.event == "ack_refused" for said in world.said)


def test_a_reload_on_demand_is_refused_while_a_version_is_being_checked():
    rng = Random(18)
    world = started(total_steps=3)
    run_until(world, rng, lambda w: w.publishing == 1)
    world.is_held = lambda event: isinstance(event, events.ExportChecked)
    run_until_stuck(world, rng)
    num_reloads = len(world.reloads)
    world.post(events.ReloadRequested())
    assert world.said[-1].event == "reload_refused"
    world.is_held = lambda event: False
    world.run(rng)
    assert not any(w.record.is_catch_up for w in world.reloads[num_reloads:])


@pytest.mark.case("R-B87")
def test_only_what_is_not_newer_is_forced_upon_a_server():
    rng = Random(23)
    asked = []
    world = started(total_steps=4, save_interval=2)
    send = world._reload
    world._reload = lambda i, n, request: (asked.append(request), send(i, n, request))
    run_until(world, rng, lambda w: w.publishing == 3)
    run_until(world, rng, lambda w: w.control.publication.committed == 3)
    forced = {r.policy_version: r.force for r in asked}
    # Of the first one nobody knows what servers of an earlier supervisor hold.
    assert forced == {0: True, 1: False, 2: False, 3: False}
    world.lose_gang()
    asked.clear()
    world.run(rng)
    assert {r.policy_version: r.force for r in asked} == {2: True, 3: True, 4: False}


def test_a_late_engine_is_judged_by_the_probe_of_the_version_it_was_asked_for():
    """The next version may be written while an engine still catches up with the one before."""
    rng = Random(25)
    world = started(total_steps=9)
    run_until(world, rng, lambda w: w.control.publication.committed == 1)
    world.kill_process(A)
    world.is_held = lambda event: is_reload_answer(event) or is_export(event)
    run_until_stuck(world, rng)
    world.is_held = lambda event: is_reload_answer(event) or isinstance(event, events.ExportChecked)
    run_until_stuck(world, rng)
    (late,) = (event for event in world.pending if is_reload_answer(event))
    assert world.publishing == 2
    world.pending.remove(late)
    world.post(late)
    assert world.ended is None
    assert world.routes[A] == 1
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended is not None
    assert world.ended.exit_code == 0


def test_why_nothing_can_be_reloaded_now_is_told():
    rng = Random(29)
    world = started(total_steps=3)
    publication = world.control.publication
    assert publication.why_not_refresh(None) == "no published version is served"
    run_until(world, rng, lambda w: w.control.publication.committed == 0)
    assert publication.why_not_refresh(None) == ""
    world.is_held = lambda event: isinstance(event, events.ExportChecked)
    run_until_stuck(world, rng)
    assert publication.why_not_refresh(None) == "v1 is on its way"
    world.is_held = is_reload_answer
    run_until_stuck(world, rng)
    assert publication.why_not_refresh(None) == "a reload is on its way"


@pytest.mark.case("R-B82")
def test_the_version_of_a_server_that_is_leaving_is_kept_with_the_committed_one():
    rng = Random(30)
    world = started(total_steps=2)
    run_until(world, rng, lambda w: w.control.publication.committed == 0)
    world.control.pool.on_replace_requested(A, now=world.now)
    run_until(world, rng, lambda w: w.control.publication.committed == 1)
    assert world.pinned[-1] == {0, 1}


def test_after_a_lost_gang_no_version_is_committed_for_a_new_process_to_start_from():
    rng = Random(31)
    world = started(total_steps=3)
    run_until(world, rng, lambda w: w.control.publication.committed == 1)
    world.lose_gang()
    assert world.control.publication.committed is None
    world.run(rng)
    assert world.ended.exit_code == 0


@pytest.mark.case("R-B82")
def test_who_comes_up_gets_no_version_that_has_not_been_checked():
    rng = Random(32)
    world = started(total_steps=5)
    run_until(world, rng, lambda w: w.publishing == 2)
    world.is_held = lambda event: isinstance(event, events.ExportChecked)
    run_until_stuck(world, rng)
    world.kill_process(A)
    run_until_stuck(world, rng)
    assert world.control.publication.committed == 1
    assert not any(is_reload_answer(event) for event in world.pending)
    assert all(process.version < 2 for process in world.processes.values())
    world.is_held = lambda event: False
    world.run(rng)
    assert world.ended.exit_code == 0
