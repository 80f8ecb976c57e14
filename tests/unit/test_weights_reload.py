import pytest

from libra.weights.judge import judge_acks
from libra.weights.reload import (
    CommitVersion,
    FailBatch,
    JudgeBatch,
    Quarantine,
    RefuseAck,
    ReloadBatch,
    SendReload,
)
from reload_messages import member, reload_ack, reload_request

REQUEST = reload_request()


def batch_of(*members, min_rollout_gpus=1, **how):
    how = {"method": "inplace", "strategy": "parallel", "ack_timeout_s": 5.0} | how
    return ReloadBatch(REQUEST, members, min_rollout_gpus=min_rollout_gpus, **how)


def verdict_on(*acks, **refused):
    verdict = judge_acks(
        REQUEST,
        [ack for ack in acks if ack.instance_id not in refused],
        trainer_probe_logprobs=(-1.0, -1.0),
        probe_tolerance=1e-3,
    )
    verdict.refused.update(refused)
    return verdict


def asked(commands):
    return [c.member.instance_id for c in commands if isinstance(c, SendReload)]


def test_everybody_is_asked_at_once_and_committed_after_the_verdict():
    batch = batch_of(member("a"), member("b"))
    assert asked(batch.start(now=0.0)) == ["a", "b"]
    ack_a, ack_b = reload_ack(REQUEST, "a"), reload_ack(REQUEST, "b")
    assert batch.on_ack(ack_b, now=1.0) == ()
    assert batch.on_ack(ack_a, now=2.0) == (JudgeBatch(REQUEST, (ack_a, ack_b)),)
    assert batch.state == "judging"
    assert batch.on_judged(verdict_on(ack_a, ack_b)) == (
        CommitVersion(7, {"a": "a#1", "b": "b#1"}),
    )
    assert batch.is_settled


def test_serial_asks_one_instance_at_a_time_on_each_node():
    batch = batch_of(
        member("a"), member("b"), member("c", node=1), member("d", node=1), strategy="serial"
    )
    assert asked(batch.start(now=0.0)) == ["a", "c"]
    ack_c = reload_ack(REQUEST, "c", strategy="serial")
    assert asked(batch.on_ack(ack_c, now=1.0)) == ["d"]
    assert asked(batch.on_lost("a", "a#1", now=1.0)) == ["b"]
    assert batch.in_flight == {"b", "d"}


def test_the_deadline_counts_from_being_asked():
    batch = batch_of(member("a"), member("b"), strategy="serial")
    batch.start(now=0.0)
    batch.on_ack(reload_ack(REQUEST, "a", strategy="serial"), now=4.0)
    assert batch.next_deadline() == 9.0
    assert batch.on_tick(now=8.9) == ()
    quarantine, judge = batch.on_tick(now=9.0)
    assert quarantine == Quarantine("b", "no ACK within 5 s")
    assert isinstance(judge, JudgeBatch)


@pytest.mark.case("R-B90")
def test_a_missing_ack_quarantines_that_instance_and_the_rest_is_committed():
    batch = batch_of(member("a"), member("b"))
    batch.start(now=0.0)
    ack = reload_ack(REQUEST, "a")
    batch.on_ack(ack, now=1.0)
    batch.on_tick(now=5.0)
    assert batch.on_judged(verdict_on(ack)) == (CommitVersion(7, {"a": "a#1"}),)
    assert batch.state_of == {"a": "acked", "b": "quarantined"}


def test_too_few_gpus_left_fail_the_batch():
    batch = batch_of(member("a"), member("b", num_gpus=4), min_rollout_gpus=3)
    batch.start(now=0.0)
    ack = reload_ack(REQUEST, "a")
    batch.on_ack(ack, now=1.0)
    batch.on_tick(now=5.0)
    (failed,) = batch.on_judged(verdict_on(ack))
    assert isinstance(failed, FailBatch)
    assert "1 rollout GPUs; 3 are needed" in failed.reason


def test_a_batch_without_a_single_ack_fails_without_asking_rank_0():
    batch = batch_of(member("a"))
    batch.start(now=0.0)
    quarantine, failed = batch.on_tick(now=5.0)
    assert quarantine.instance_id == "a"
    assert isinstance(failed, FailBatch)


def test_a_batch_that_began_below_the_minimum_is_not_failed_for_that():
    batch = batch_of(member("a"), min_rollout_gpus=4)
    batch.start(now=0.0)
    ack = reload_ack(REQUEST, "a")
    batch.on_ack(ack, now=1.0)
    assert batch.on_judged(verdict_on(ack)) == (CommitVersion(7, {"a": "a#1"}),)


def test_without_members_the_version_is_committed_for_those_who_join():
    assert batch_of().start(now=0.0) == (CommitVersion(7, {}),)


def test_a_planned_leave_is_neither_a_failure_nor_a_member():
    batch = batch_of(member("a"), member("b"), min_rollout_gpus=2)
    batch.start(now=0.0)
    ack = reload_ack(REQUEST, "a")
    batch.on_ack(ack, now=1.0)
    assert batch.on_left("b", now=2.0) == (JudgeBatch(REQUEST, (ack,)),)
    assert batch.on_judged(verdict_on(ack)) == (CommitVersion(7, {"a": "a#1"}),)
    assert batch.on_left("a", now=3.0) == ()


@pytest.mark.parametrize("method", ["inplace", "restart"])
def test_a_request_that_did_not_get_through_is_not_waited_for(method):
    batch = batch_of(member("a"), member("b"), method=method)
    batch.start(now=0.0)
    assert batch.on_undelivered("a", "connection reset", now=1.0) == (
        Quarantine("a", "connection reset"),
    )
    assert batch.in_flight == {"b"}
    assert batch.on_undelivered("a", "connection reset", now=2.0) == ()
    assert batch.on_undelivered("c", "connection reset", now=2.0) == ()


def test_an_instance_that_leaves_after_its_ack_is_not_committed():
    batch = batch_of(member("a"), member("b"), min_rollout_gpus=2)
    batch.start(now=0.0)
    acks = [reload_ack(REQUEST, i) for i in "ab"]
    for ack in acks:
        batch.on_ack(ack, now=1.0)
    assert batch.on_left("b", now=2.0) == ()
    assert batch.on_judged(verdict_on(*acks)) == (CommitVersion(7, {"a": "a#1"}),)


def test_an_instance_lost_after_its_ack_is_not_committed():
    batch = batch_of(member("a"), member("b"))
    batch.start(now=0.0)
    acks = [reload_ack(REQUEST, "a"), reload_ack(REQUEST, "b")]
    for ack in acks:
        batch.on_ack(ack, now=1.0)
    assert batch.on_lost("b", "b#1", now=2.0) == (Quarantine("b", "its process was lost"),)
    assert batch.on_judged(verdict_on(*acks)) == (CommitVersion(7, {"a": "a#1"}),)


def test_news_of_another_incarnation_changes_nothing():
    batch = batch_of(member("a"))
    batch.start(now=0.0)
    assert batch.on_lost("a", "a#0", now=1.0) == ()
    batch.on_ack(reload_ack(REQUEST, "a"), now=1.0)
    assert batch.on_lost("a", "a#0", now=1.0) == ()
    assert batch.state_of == {"a": "acked"}


def test_whom_rank_0_refuses_is_quarantined_with_its_reason():
    batch = batch_of(member("a"), member("b"), member("c"))
    batch.start(now=0.0)
    acks = [reload_ack(REQUEST, i) for i in "abc"]
    for ack in acks:
        batch.on_ack(ack, now=1.0)
    silent = verdict_on(acks[0], b="the probe is far off")
    assert batch.on_judged(silent) == (
        Quarantine("b", "the probe is far off"),
        Quarantine("c", "rank 0 did not accept its ACK"),
        CommitVersion(7, {"a": "a#1"}),
    )


@pytest.mark.case("R-B89")
def test_an_ack_that_reports_failure_or_proves_nothing_quarantines():
    for changes, reason in (
        ({"error": "out of memory"}, "the reload failed: out of memory"),
        ({"manifest_hash": "other"}, "manifest hash"),
        ({"policy_version": 6}, "policy version"),
    ):
        batch = batch_of(member("a"), member("b"))
        batch.start(now=0.0)
        (quarantine,) = batch.on_ack(reload_ack(REQUEST, "a", **changes), now=1.0)
        assert quarantine.instance_id == "a"
        assert reason in quarantine.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nonce": "nonce-0"}, "earlier try"),
        ({"run_id": "run-0"}, "another run"),
        ({"instance_id": "z"}, "not in the batch"),
        ({"instance_id": "b"}, "not asked yet"),
        ({"incarnation": "a#0"}, "incarnation a#0"),
        ({"method": "restart"}, "restart/serial"),
        ({"strategy": "parallel"}, "inplace/parallel"),
    ],
)
def test_a_foreign_ack_is_refused_and_changes_nothing(changes, reason):
    batch = batch_of(member("a"), member("b"), strategy="serial")
    batch.start(now=0.0)
    ack = reload_ack(REQUEST, "a", **{"strategy": "serial"} | changes)
    (refusal,) = batch.on_ack(ack, now=1.0)
    assert isinstance(refusal, RefuseAck)
    assert reason in refusal.reason
    assert batch.state_of == {"a": "asked", "b": "waiting"}


def test_duplicate_late_and_departed_acks_are_refused():
    batch = batch_of(member("a"), member("b"), member("c"), member("d"))
    batch.start(now=0.0)
    batch.on_ack(reload_ack(REQUEST, "a"), now=1.0)
    batch.on_left("c", now=1.0)
    batch.on_lost("b", "b#1", now=1.0)
    for instance, reason in (("a", "already"), ("b", "too late"), ("c", "has left")):
        (refusal,) = batch.on_ack(reload_ack(REQUEST, instance), now=2.0)
        assert reason in refusal.reason
    batch.cancel()
    (refusal,) = batch.on_ack(reload_ack(REQUEST, "d"), now=2.0)
    assert "cancelled" in refusal.reason


def test_a_restart_is_proved_by_a_new_incarnation():
    batch = batch_of(member("a"), member("b"), method="restart")
    batch.start(now=0.0)
    # The first process ends on purpose.
    assert batch.on_lost("a", "a#1", now=1.0) == ()
    old, new = (reload_ack(REQUEST, "a", method="restart", incarnation=f"a#{k}") for k in (1, 2))
    assert isinstance(batch.on_ack(old, now=2.0)[0], RefuseAck)
    assert batch.on_ack(new, now=3.0) == ()
    (quarantine, _) = batch.on_lost("b", "b#2", now=4.0)
    assert quarantine.instance_id == "b"
    assert batch.on_judged(verdict_on(new)) == (CommitVersion(7, {"a": "a#2"}),)


def test_a_cancelled_batch_answers_nothing_any_more():
    batch = batch_of(member("a"))
    batch.start(now=0.0)
    batch.cancel()
    assert batch.next_deadline() is None
    assert batch.on_tick(now=99.0) == ()
    assert batch.on_lost("a", "a#1", now=99.0) == ()
    assert batch.state == "cancelled"


def test_a_verdict_on_another_batch_is_ignored():
    batch = batch_of(member("a"))
    batch.start(now=0.0)
    ack = reload_ack(REQUEST, "a")
    assert batch.on_judged(verdict_on(ack)) == ()
    batch.on_ack(ack, now=1.0)
    earlier_try = reload_request(nonce="nonce-0")
    other = judge_acks(earlier_try, [], trainer_probe_logprobs=(), probe_tolerance=1.0)
    assert batch.on_judged(other) == ()
    assert batch.state == "judging"


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="twice"):
        batch_of(member("a"), member("a"))
    batch = batch_of(member("a"))
    batch.start(now=0.0)
    with pytest.raises(ValueError, match="started already"):
        batch.start(now=0.0)
