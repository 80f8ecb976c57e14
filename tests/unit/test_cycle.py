import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import InvariantError
from libra.ids import PolicyVersion
from libra_supervisor.loop.cycle import Collect, Cycle, Finish, Limits, Phase, Publish, Save


def limits(**changes):
    return Limits(**{"total_steps": 3, "sync_interval": 1, "save_interval": 2, **changes})


def walk(cycle: Cycle, commands, *, now=0.0):
    """Answer every command at once until the run finishes; returns what was commanded, in order."""
    seen = []
    queue = list(commands)
    while queue:
        command = queue.pop(0)
        seen.append(command)
        match command:
            case Publish(version):
                queue += cycle.on_exported(version, now=now)
                queue += cycle.on_settled(version, now=now)
            case Collect(step):
                queue += cycle.on_batch_taken(step)
                queue += cycle.on_trained(step, now=now)
            case Save(step):
                queue += cycle.on_saved(step, now=now)
            case Finish():
                assert not queue
    return seen


def test_a_new_run_publishes_the_base_version_before_it_collects():
    cycle = Cycle(limits())
    assert cycle.on_parts_ready(restored_step=0, now=0.0) == (Publish(PolicyVersion(0)),)
    assert cycle.committed is None
    assert cycle.on_exported(PolicyVersion(0), now=0.0) == (Collect(1),)
    assert (cycle.committed, cycle.publishing) == (None, 0)
    assert cycle.on_settled(PolicyVersion(0), now=0.0) == ()
    assert (cycle.committed, cycle.publishing) == (0, None)


@pytest.mark.case("T-B51")
def test_a_resumed_run_publishes_its_own_version_before_it_opens_admission():
    cycle = Cycle(limits(total_steps=9))
    assert cycle.on_parts_ready(restored_step=7, now=0.0) == (Publish(PolicyVersion(7)),)
    assert cycle.phase is Phase.EXPORTING


def test_the_last_step_is_saved_even_between_intervals():
    cycle = Cycle(limits())
    seen = walk(cycle, cycle.on_parts_ready(restored_step=0, now=0.0))
    assert [c.step for c in seen if isinstance(c, Save)] == [2, 3]
    assert seen[-1] == Finish("total_steps 3 reached")


def test_a_run_resumed_at_its_end_finishes_without_training_or_saving_again():
    cycle = Cycle(limits())
    seen = walk(cycle, cycle.on_parts_ready(restored_step=3, now=0.0))
    assert seen == [
        Publish(PolicyVersion(3)),
        Finish("total_steps 3 reached"),
    ]


@pytest.mark.case("T-B80")
def test_a_stop_while_training_lets_the_step_end_and_saves_it():
    cycle = Cycle(limits(save_interval=0))
    cycle.on_parts_ready(restored_step=0, now=0.0)
    cycle.on_exported(PolicyVersion(0), now=0.0)
    cycle.on_settled(PolicyVersion(0), now=0.0)
    cycle.on_batch_taken(1)
    assert cycle.on_stop_requested("SIGTERM", now=1.0) == ()
    assert walk(cycle, cycle.on_trained(1, now=2.0)) == [
        Publish(PolicyVersion(1)),
        Save(1),
        Finish("SIGTERM"),
    ]


def test_a_stop_while_collecting_saves_what_was_trained_at_once():
    cycle = Cycle(limits(total_steps=9, save_interval=0))
    walk_to_collecting(cycle, steps=2)
    assert cycle.on_stop_requested("SIGTERM", now=1.0) == (Save(2),)


def test_a_stop_before_anything_was_trained_saves_nothing():
    cycle = Cycle(limits())
    walk_to_collecting(cycle, steps=0)
    assert cycle.on_stop_requested("SIGINT", now=1.0) == (Finish("SIGINT"),)


def test_a_stop_during_start_up_finishes_at_once():
    assert Cycle(limits()).on_stop_requested("SIGINT", now=0.0) == (Finish("SIGINT"),)


def test_the_deadline_ends_a_wait_for_rollouts():
    cycle = Cycle(limits(total_steps=None, deadline=10.0))
    walk_to_collecting(cycle, steps=1)
    assert cycle.on_tick(now=9.9) == ()
    assert cycle.on_tick(now=10.0) == (Save(1),)


def test_a_checkpoint_between_two_steps_is_not_waited_for():
    cycle = Cycle(limits(total_steps=9))
    walk_to_collecting(cycle, steps=1)
    cycle.on_batch_taken(2)
    cycle.on_trained(2, now=0.0)
    assert cycle.on_exported(PolicyVersion(2), now=0.0) == (Save(2), Collect(3))
    assert (cycle.saving_step, cycle.publishing) == (2, 2)
    cycle.on_batch_taken(3)
    assert cycle.on_saved(2, now=0.0) == ()
    assert cycle.phase is Phase.TRAINING


def test_a_stop_waits_for_the_checkpoint_that_is_being_written():
    cycle = Cycle(limits(total_steps=9))
    walk_to_collecting(cycle, steps=2)
    assert cycle.saving_step == 2
    assert cycle.on_stop_requested("SIGTERM", now=1.0) == ()
    assert cycle.phase is Phase.SAVING
    assert cycle.on_saved(2, now=2.0) == (Finish("SIGTERM"),)


def test_a_checkpoint_that_nobody_asked_for_is_a_bug():
    cycle = Cycle(limits())
    walk_to_collecting(cycle, steps=1)
    with pytest.raises(InvariantError, match="step 1 was saved"):
        cycle.on_saved(1, now=0.0)


def test_a_lost_gang_rewinds_to_the_step_of_the_next_one():
    cycle = Cycle(limits(total_steps=9))
    walk_to_collecting(cycle, steps=5)
    cycle.on_batch_taken(6)
    assert cycle.on_gang_lost() == ()
    assert cycle.on_parts_ready(restored_step=4, now=0.0) == (Publish(PolicyVersion(4)),)


def test_the_next_export_and_the_end_wait_until_the_publication_before_is_settled():
    cycle = Cycle(limits(total_steps=2, save_interval=0))
    cycle.on_parts_ready(restored_step=0, now=0.0)
    assert cycle.on_exported(PolicyVersion(0), now=0.0) == (Collect(1),)
    cycle.on_batch_taken(1)
    assert cycle.on_trained(1, now=1.0) == ()
    assert cycle.phase is Phase.SETTLING
    assert cycle.on_settled(PolicyVersion(0), now=2.0) == (Publish(PolicyVersion(1)),)
    assert cycle.on_exported(PolicyVersion(1), now=3.0) == (Collect(2),)
    assert cycle.on_settled(PolicyVersion(1), now=4.0) == ()
    cycle.on_batch_taken(2)
    assert cycle.on_trained(2, now=5.0) == (Publish(PolicyVersion(2)),)
    assert cycle.on_exported(PolicyVersion(2), now=6.0) == (Save(2),)
    assert cycle.on_saved(2, now=7.0) == ()
    assert cycle.phase is Phase.SETTLING
    assert cycle.on_settled(PolicyVersion(2), now=8.0) == (Finish("total_steps 2 reached"),)


def test_a_version_that_is_not_being_published_cannot_be_settled():
    cycle = Cycle(limits())
    cycle.on_parts_ready(restored_step=0, now=0.0)
    with pytest.raises(InvariantError, match="still written"):
        cycle.on_settled(PolicyVersion(0), now=0.0)
    cycle.on_exported(PolicyVersion(0), now=0.0)
    with pytest.raises(InvariantError, match="v1 came up while v0 is published"):
        cycle.on_settled(PolicyVersion(1), now=0.0)


def test_an_answer_for_another_step_is_a_bug():
    cycle = Cycle(limits())
    walk_to_collecting(cycle, steps=0)
    with pytest.raises(InvariantError, match="batch of step 2"):
        cycle.on_batch_taken(2)


@given(
    total=st.integers(1, 12),
    sync=st.integers(0, 4),
    save=st.integers(0, 4),
    start=st.integers(0, 12),
)
def test_every_run_trains_each_step_once_and_saves_its_last(total, sync, save, start):
    start = min(start, total)
    cycle = Cycle(limits(total_steps=total, sync_interval=sync, save_interval=save))
    seen = walk(cycle, cycle.on_parts_ready(restored_step=start, now=0.0))
    assert [c.step for c in seen if isinstance(c, Collect)] == list(range(start + 1, total + 1))
    saved = [c.step for c in seen if isinstance(c, Save)]
    assert saved == sorted(set(saved))
    assert start == total or saved[-1] == total
    versions = [c.version for c in seen if isinstance(c, Publish)]
    assert all(v == start or v % sync == 0 for v in versions)
    assert isinstance(seen[-1], Finish)


def walk_to_collecting(cycle: Cycle, *, steps: int) -> None:
    """Drive the cycle to the wait for the batch after `steps`."""
    queue = list(cycle.on_parts_ready(restored_step=0, now=0.0))
    while cycle.phase is not Phase.COLLECTING or cycle.step < steps:
        match queue.pop(0):
            case Publish(version):
                queue += cycle.on_exported(version, now=0.0)
                queue += cycle.on_settled(version, now=0.0)
            case Collect(step):
                cycle.on_batch_taken(step)
                queue += cycle.on_trained(step, now=0.0)
            case Save(step):
                queue += cycle.on_saved(step, now=0.0)
