import pytest

from libra.errors import InvariantError
from libra.ids import Incarnation, InstanceId, PolicyVersion
from libra.pools.member import MemberState, moved
from libra.pools.pool import RolloutPool

A = InstanceId("vllm-0")
FIRST, SECOND = Incarnation("first"), Incarnation("second")
V7 = PolicyVersion(7)


def serving_pool() -> RolloutPool:
    pool = RolloutPool([(A, 2)], now=0.0)
    pool.on_started(A, FIRST, now=1.0)
    pool.on_answering(A, now=2.0)
    assert pool.on_version_confirmed(A, FIRST, V7, committed=V7, now=3.0)
    return pool


@pytest.mark.case("T-B67")
@pytest.mark.case("R-B86")
def test_a_restarted_instance_is_not_routable_until_it_proves_the_committed_version():
    pool = serving_pool()
    pool.on_exited(A, "killed", now=4.0)
    pool.on_started(A, SECOND, now=5.0)
    pool.on_answering(A, now=6.0)
    assert pool.ids_in(MemberState.SERVING) == ()
    assert not pool.on_version_confirmed(A, SECOND, PolicyVersion(0), committed=V7, now=7.0)
    assert pool[A].state is MemberState.STALE
    assert pool.on_version_confirmed(A, SECOND, V7, committed=V7, now=8.0)
    assert pool[A].num_restarts == 1


def test_one_that_is_warming_counts_once_those_are_gone_whose_devices_it_gets():
    pool = serving_pool()
    heir = InstanceId("vllm-1")
    pool.add(heir, 2, now=4.0, is_warming=True, waits_for=frozenset({A}))
    assert pool.num_possible_gpus == 2
    pool.on_gave_up(A, "dies", now=5.0)
    assert pool.num_possible_gpus == 2
    pool.on_gave_up(heir, "dies too", now=6.0)
    assert pool.num_possible_gpus == 0


@pytest.mark.case("R-B24")
def test_a_late_answer_of_the_old_incarnation_changes_nothing():
    pool = serving_pool()
    pool.on_exited(A, "killed", now=4.0)
    pool.on_started(A, SECOND, now=5.0)
    pool.on_answering(A, now=6.0)
    assert not pool.on_version_confirmed(A, FIRST, V7, committed=V7, now=7.0)
    assert pool[A].state is MemberState.STALE


@pytest.mark.case("R-B89")
def test_a_failed_reload_quarantines_with_an_unknown_version():
    pool = serving_pool()
    pool.on_reload_begun(A, now=4.0)
    pool.on_reload_failed(A, "tensor missing", now=5.0)
    assert pool[A].state is MemberState.QUARANTINED
    assert pool[A].version is None
    assert not pool.on_version_confirmed(A, FIRST, V7, committed=V7, now=6.0)


def test_a_drained_instance_comes_back_from_a_reload_still_drained():
    pool = serving_pool()
    pool.on_drain_requested(A, now=4.0)
    pool.on_reload_begun(A, now=5.0)
    assert not pool.on_version_confirmed(A, FIRST, V7, committed=V7, now=6.0)
    assert pool[A].state is MemberState.DRAINING
    pool.on_undrain_requested(A, now=7.0)
    assert pool[A].state is MemberState.SERVING


def test_a_move_outside_the_table_is_a_bug():
    pool = RolloutPool([(A, 1)], now=0.0)
    with pytest.raises(InvariantError, match="from starting to serving"):
        moved(pool[A], MemberState.SERVING, now=1.0)


def test_one_that_lost_a_transfer_by_anothers_fault_answers_still_and_serves_nobody():
    pool = serving_pool()
    pool.on_reload_begun(A, now=4.0)
    for now in (5.0, 6.0):
        pool.on_reload_aborted(A, "vllm-9 died", now=now)
        assert pool[A].state is MemberState.STALE
        assert (pool[A].version, pool[A].last_error) == (None, "vllm-9 died")
    assert A in pool.answering_ids
    pool.on_exited(A, "killed", now=7.0)
    pool.on_reload_aborted(A, "too late", now=8.0)
    assert pool[A].state is MemberState.RESTARTING


@pytest.mark.case("R-B41")
def test_a_process_that_hangs_serves_no_more_from_the_moment_that_it_is_suspected():
    pool = serving_pool()
    pool.on_suspected(A, "no progress for 120 s", now=4.0)
    assert pool[A].state is MemberState.QUARANTINED
    assert (pool[A].version, pool[A].last_error) == (None, "no progress for 120 s")
    assert not pool.on_version_confirmed(A, FIRST, V7, committed=V7, now=5.0)
    pool.on_exited(A, "killed", now=6.0)
    assert pool[A].state is MemberState.RESTARTING


def test_one_that_is_suspected_before_it_answers_goes_on_starting():
    pool = RolloutPool([(A, 2)], now=0.0)
    pool.on_started(A, FIRST, now=1.0)
    pool.on_suspected(A, "not ready within 900 s", now=901.0)
    assert pool[A].state is MemberState.STARTING


def test_an_instance_that_is_to_be_replaced_serves_again_only_with_its_next_process():
    pool = serving_pool()
    pool.on_replace_requested(A, now=4.0)
    assert pool[A].state is MemberState.DRAINING
    pool.on_undrain_requested(A, now=5.0)
    assert pool[A].state is MemberState.DRAINING
    pool.on_reload_begun(A, now=5.0)
    assert not pool.on_version_confirmed(A, FIRST, V7, committed=V7, now=6.0)
    pool.on_exited(A, "", now=7.0)
    pool.on_started(A, SECOND, now=8.0)
    pool.on_answering(A, now=9.0)
    assert pool.on_version_confirmed(A, SECOND, V7, committed=V7, now=10.0)
    assert pool[A].last_error == "", "an end that was asked for is no error"
