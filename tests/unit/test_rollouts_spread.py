"""Which node makes a group, and what becomes of it when the node is gone."""

import pytest

from libra.errors import InvariantError
from libra.rollouts.trajectory import SampleFailed
from libra.wire.node_rollouts import Servers
from libra_supervisor.events import (
    SampleFinished,
    SampleGaveUp,
    SampleProgressed,
    SampleStarted,
)
from libra_supervisor.rollouts.roster import Roster
from libra_supervisor.rollouts.spread import Again, Drop, Make, Spread
from trajectories import admitted, trajectory

GROUP = admitted(3, n_samples=2)
NAME = GROUP.group_id


def spread(*able):
    made = Spread(0, first_job=100)
    for node in able:
        made.on_able(node)
    return made


def nodes_of(made, *sizes):
    return [made.start(admitted(row, n_samples=size)).node for row, size in enumerate(sizes)]


def test_a_group_goes_to_the_able_node_with_the_fewest_unfinished_samples():
    assert nodes_of(spread(), 2, 2) == [0, 0]
    assert nodes_of(spread(2, 1), 2, 2, 2, 2) == [0, 1, 2, 0]
    assert nodes_of(spread(1), 8, 2, 2, 2, 2, 2) == [0, 1, 1, 1, 1, 0]


def test_what_has_ended_makes_room_for_more():
    made = spread(1)
    first = made.start(GROUP)
    assert made.start(admitted(4, n_samples=1)).node == 1
    made.on_finished(0, first.job, trajectory(GROUP, 0))
    made.on_failed(0, first.job, 1, SampleFailed("engine", "broken"))
    assert [made.num_unfinished(node) for node in (0, 1)] == [0, 1]
    assert made.start(admitted(5)).node == 0
    assert made.number_of(NAME) is None


def test_a_node_that_is_silent_gets_nothing_new_and_may_still_finish():
    made = spread(1)
    made.start(admitted(1, n_samples=4))
    there = made.start(GROUP)
    assert there == Make(1, 101, GROUP, (0, 1))
    made.on_silent(1)
    assert nodes_of(made, 1) == [0]
    assert made.on_finished(1, 101, trajectory(GROUP, 0)) == SampleFinished(trajectory(GROUP, 0))
    made.on_heard(1)
    assert made.start(admitted(9)).node == 1


def test_what_a_node_has_not_finished_when_it_is_gone_is_made_elsewhere_under_the_same_name():
    made = spread(1)
    made.start(admitted(1))
    made.start(GROUP)
    assert made.on_begun(1, 101, 0) == SampleStarted(NAME, 0)
    assert made.on_begun(1, 101, 1) == SampleStarted(NAME, 1)
    made.on_finished(1, 101, trajectory(GROUP, 0))
    assert made.on_gone(1) == (Make(0, 102, GROUP, (1,)),)
    # What is still heard of the first job does not count.
    assert made.on_finished(1, 101, trajectory(GROUP, 1)) is None
    assert made.on_alive(1, 101, 1) is None
    assert not made.is_open(1, 101, 1)
    # It began before: that it begins again is a sign of life.
    assert made.on_begun(0, 102, 1) == SampleProgressed(NAME, 1)
    assert made.on_alive(0, 102, 1) == SampleProgressed(NAME, 1)
    assert made.on_finished(0, 102, trajectory(GROUP, 1)) == SampleFinished(trajectory(GROUP, 1))
    assert made.on_gone(1) == ()


def test_a_job_is_taken_from_the_node_that_has_it_alone():
    made = spread(1)
    job = made.start(GROUP).job
    assert made.on_finished(1, job, trajectory(GROUP, 0)) is None
    assert made.on_finished(0, job, trajectory(admitted(4), 0)) is None
    assert made.on_finished(0, job, trajectory(GROUP, 0)) is not None
    assert made.on_finished(0, job, trajectory(GROUP, 0)) is None
    assert made.on_failed(0, job, 0, SampleFailed("engine", "late")) is None


def test_a_cancelled_group_is_heard_of_no_more_and_may_begin_again():
    made = spread()
    first = made.start(GROUP).job
    made.on_begun(0, first, 0)
    assert made.cancel(NAME) == (Drop(0, first, NAME),)
    assert made.cancel(NAME) == ()
    again = made.start(GROUP).job
    assert made.on_begun(0, first, 1) is None
    assert made.on_begun(0, again, 0) == SampleStarted(NAME, 0)
    assert made.cancel_all() == (Drop(0, again, NAME),)
    assert made.num_unfinished(0) == 0


def test_samples_are_asked_for_again_where_they_are_made():
    made = spread(1)
    made.start(admitted(1))
    job = made.start(GROUP).job
    made.on_finished(1, job, trajectory(GROUP, 0))
    assert made.ask_again(NAME, (0, 1)) == (Again(1, job, (1,), NAME),)
    assert made.ask_again(NAME, (0,)) == ()
    assert made.ask_again("no such group", (0,)) == ()


def test_a_sample_that_fails_is_told_once():
    made = spread()
    job, failure = made.start(GROUP).job, SampleFailed("reward", "no")
    assert made.on_failed(0, job, 1, failure) == SampleGaveUp(NAME, 1, failure)
    assert made.on_failed(0, job, 1, failure) is None


def test_what_must_not_be_is_a_bug():
    made = spread()
    made.start(GROUP)
    with pytest.raises(InvariantError, match="started twice"):
        made.start(GROUP)
    with pytest.raises(InvariantError, match="does not leave"):
        made.on_gone(0)


# The roster


def known(roster, name, incarnation="a", *, kv=None):
    roster.know(
        name, incarnation, url=f"http://{name}", tp=1, kv_capacity_tokens=kv, is_planned=False
    )


def states(servers):
    return {it.instance_id: (it.version, it.is_ready, it.is_draining) for it in servers.changed}


def test_changes_are_told_once_and_whole_to_who_comes_late():
    roster = Roster()
    known(roster, "vllm-0", kv=100)
    known(roster, "vllm-1")
    roster.serve("vllm-0", 3)
    first = roster.take_changes()
    assert states(first) == {"vllm-0": (3, True, False), "vllm-1": (None, False, False)}
    assert (first.revision, first.wanted, first.gone) == (1, 3, ())
    assert roster.take_changes() is None
    roster.forget("vllm-1")
    second = roster.take_changes()
    assert second == Servers(revision=2, wanted=3, changed=(), gone=("vllm-1",))
    assert roster.whole() == Servers(revision=2, wanted=3, changed=first.changed[:1])


def test_a_process_that_follows_another_serves_nothing_until_it_is_said():
    roster = Roster()
    known(roster, "vllm-0")
    roster.serve("vllm-0", 3)
    known(roster, "vllm-0", kv=7)
    assert states(roster.take_changes()) == {"vllm-0": (3, True, False)}
    known(roster, "vllm-0", "b")
    assert states(roster.take_changes()) == {"vllm-0": (None, False, False)}


def test_who_has_not_read_that_a_server_was_withdrawn_may_still_use_it():
    roster = Roster()
    known(roster, "vllm-0")
    roster.serve("vllm-0", 3)
    roster.take_changes()
    assert not roster.may_still_get_requests("vllm-0", read=0)
    roster.withdraw("vllm-0", is_draining=True)
    assert roster.may_still_get_requests("vllm-0", read=1)
    assert states(roster.take_changes()) == {"vllm-0": (3, True, True)}
    roster.withdraw("vllm-0", is_draining=False)
    assert roster.may_still_get_requests("vllm-0", read=1)
    assert not roster.may_still_get_requests("vllm-0", read=2)
    assert states(roster.take_changes()) == {"vllm-0": (3, False, True)}
    roster.serve("vllm-0", 4)
    assert not roster.may_still_get_requests("vllm-0", read=1)


def test_of_servers_that_nobody_knows_nothing_is_told():
    roster = Roster()
    roster.serve("vllm-9", 3)
    roster.withdraw("vllm-9", is_draining=True)
    roster.forget("vllm-9")
    assert roster.take_changes() is None
