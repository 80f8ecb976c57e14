"""What snapshots change, and what their absence does."""

import math

import pytest

from fleets import fleet_of, place, request, scheduling, snapshot, spec
from libra.ids import InstanceId
from libra.scheduling.load import EngineLoad, observed_load
from libra.scheduling.notice import FeedbackLost, FeedbackRestored, KvCapacityDiffers
from libra.scheduling.request import Wait
from libra.scheduling.scheduler import Scheduler
from libra.scheduling.slow_start import DURATION_S

I0, I1 = InstanceId("i0"), InstanceId("i1")


def closed_loop(num_instances, **options):
    scheduler = fleet_of(num_instances, enable_metrics_feedback=True, **options)
    scheduler.on_tick(DURATION_S)
    scheduler.take_notices()  # that nobody told anything so far
    return scheduler, DURATION_S


def test_observed_load_by_metric():
    seen = snapshot(0.0, num_running=4, num_waiting=2, kv_use_fraction=0.5)
    known = {"kv_capacity_tokens": 1000, "tokens_per_request": 50.0}
    assert observed_load("requests", seen, **known) == 6
    assert observed_load("tokens", seen, **known) == 600
    assert observed_load("kv_tokens", seen, **known) == 0.6


@pytest.mark.case("R-B18")
@pytest.mark.parametrize("metric", ["requests", "tokens", "kv_tokens"])
@pytest.mark.parametrize("missing", ["num_running", "num_waiting", "kv_use_fraction"])
def test_a_missing_signal_makes_the_load_unknown_and_not_zero(metric, missing):
    signals = {"num_running": 4.0, "num_waiting": 2.0, "kv_use_fraction": 0.5} | {missing: None}
    is_needed = missing == "num_waiting" or (missing == "num_running") == (metric == "requests")
    observed = observed_load(
        metric, snapshot(0.0, **signals), kv_capacity_tokens=1000, tokens_per_request=50.0
    )
    assert (observed is None) == is_needed


def test_an_unknown_capacity_makes_a_token_load_unknown():
    seen = snapshot(0.0, num_running=4, num_waiting=2, kv_use_fraction=0.5)
    for capacity in (None, 0):
        assert (
            observed_load("tokens", seen, kv_capacity_tokens=capacity, tokens_per_request=50.0)
            is None
        )


@pytest.mark.case("R-B18")
@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf, -1.0])
def test_impossible_numbers_are_unknown_each_by_itself(nonsense):
    scheduler, now = closed_loop(2)
    scheduler.on_snapshot(
        I0,
        snapshot(now, num_running=nonsense, num_waiting=0, kv_use_fraction=0.99),
        now,
    )
    view, _ = scheduler.instances(now)
    assert (view.removed_by, view.bias) == ("occupancy", 0.0)
    later = now + 1
    scheduler.on_snapshot(
        I0, snapshot(later, num_running=5, num_waiting=0, kv_use_fraction=nonsense), later
    )
    view, _ = scheduler.instances(later)
    assert (view.removed_by, view.bias) == ("occupancy", 1.5)


def test_a_cache_that_is_more_than_full_is_not_believed():
    scheduler, now = closed_loop(1)
    scheduler.on_snapshot(I0, snapshot(now, kv_use_fraction=87.0), now)
    assert scheduler.instances(now)[0].removed_by is None


def test_load_that_others_cause_moves_requests_away():
    scheduler, now = closed_loop(2)
    scheduler.on_snapshot(I0, snapshot(now, num_running=30, num_waiting=0), now)
    scheduler.on_snapshot(I1, snapshot(now, num_running=0, num_waiting=0), now)
    assert [place(scheduler, now).instance_id for _ in range(9)] == ["i1"] * 9
    assert place(scheduler, now).instance_id == "i0"  # its bias of 9 is reached


def test_occupancy_blocks_above_enter_and_unblocks_below_exit():
    scheduler, now = closed_loop(2)
    states = []
    for k, use in enumerate((0.90, 0.91, 0.80, 0.75, 0.74, 0.89)):
        at = now + k
        scheduler.on_snapshot(I0, snapshot(at, kv_use_fraction=use), at)
        states.append(scheduler.instances(at)[0].removed_by)
    assert states == [None, "occupancy", "occupancy", "occupancy", None, None]


def test_when_all_are_full_requests_wait_and_go_on_with_the_first_that_has_room():
    scheduler, now = closed_loop(2)
    for name in (I0, I1):
        scheduler.on_snapshot(name, snapshot(now, kv_use_fraction=0.99), now)
    waiting = scheduler.route(request(), now)
    assert isinstance(waiting, Wait)
    assert waiting.reason == "occupancy"
    scheduler.on_snapshot(I1, snapshot(now + 1, kv_use_fraction=0.5), now + 1)
    assert waiting.ticket.outcome.instance == I1


@pytest.mark.case("R-B23")
def test_old_snapshots_neither_block_nor_bias_and_that_is_said_once():
    scheduler, now = closed_loop(1)
    frozen = snapshot(now, num_running=50, num_waiting=10, kv_use_fraction=0.99)
    scheduler.on_snapshot(I0, frozen, now)
    waiting = scheduler.route(request(), now)
    assert waiting.reason == "occupancy"
    assert scheduler.take_notices() == (FeedbackRestored(I0),)
    scheduler.on_tick(now + 10.0)
    assert waiting.ticket.outcome.instance == I0
    (view,) = scheduler.instances(now + 10.0)
    assert (view.bias, view.load, view.removed_by) == (0.0, 1.0, None)
    assert view.signal_ages_s == {"bias": 10.0, "occupancy": 10.0}
    for k in range(11, 70):
        scheduler.on_snapshot(I0, frozen, now + k)
        scheduler.on_tick(now + k)
    assert scheduler.take_notices() == (FeedbackLost(I0),)


def test_metrics_that_never_come_are_said_once_and_their_first_coming_is_no_news_without_it():
    scheduler = fleet_of(2, enable_metrics_feedback=True, metrics_staleness_ttl_s=10.0)
    for at in range(0, 40, 3):
        scheduler.on_snapshot(I1, snapshot(at, num_running=1.0), at)
        scheduler.on_tick(at)
    assert scheduler.take_notices() == (FeedbackLost(I0),)
    scheduler.on_snapshot(I0, snapshot(40.0, num_running=1.0), 40.0)
    assert scheduler.take_notices() == (FeedbackRestored(I0),)


def test_nobody_misses_feedback_that_is_off():
    scheduler = fleet_of(1)
    scheduler.on_tick(1000.0)
    assert scheduler.take_notices() == ()


def test_after_an_outage_the_first_fresh_value_decides():
    scheduler, now = closed_loop(1)
    scheduler.on_snapshot(I0, snapshot(now, kv_use_fraction=0.99), now)
    later = now + 60
    scheduler.on_tick(later)
    assert scheduler.instances(later)[0].removed_by is None
    scheduler.on_snapshot(I0, snapshot(later, kv_use_fraction=0.8), later)
    assert scheduler.instances(later)[0].removed_by == "occupancy"


def test_a_preemption_puts_an_instance_last_for_the_window_and_no_longer():
    scheduler, now = closed_loop(2)
    for at, counter in ((now, 5), (now + 1, 6)):
        scheduler.on_snapshot(I0, snapshot(at, num_preemptions=counter), at)
    assert {place(scheduler, now + 2).instance_id for _ in range(20)} == {"i1"}
    after = now + 62
    assert {place(scheduler, after).instance_id for _ in range(20)} == {"i0"}


def test_an_instance_with_preemptions_is_used_when_nobody_else_is_left():
    scheduler, now = closed_loop(2)
    for at, counter in ((now, 5), (now + 1, 6)):
        scheduler.on_snapshot(I0, snapshot(at, num_preemptions=counter), at)
    scheduler.set_ready(I1, False, now + 2)
    assert place(scheduler, now + 2).instance_id == "i0"


def test_requests_pushed_back_to_waiting_count_as_a_preemption_before_the_counter_moves():
    scheduler, now = closed_loop(2)
    for at, running, waiting in ((now, 8, 0), (now + 1, 2, 6)):
        scheduler.on_snapshot(
            I0,
            snapshot(
                at,
                num_running=running,
                num_waiting=waiting,
                num_waiting_for_capacity=waiting,
                num_preemptions=0,
            ),
            at,
        )
    assert scheduler.instances(now + 1)[0].is_penalized


def test_the_preemptions_of_a_reloads_pause_are_not_held_against_the_instance():
    scheduler, now = closed_loop(2)
    seen = {"num_running": 4, "num_waiting": 0, "num_waiting_for_capacity": 0}
    scheduler.on_snapshot(I0, snapshot(now, num_preemptions=5, **seen), now)
    during = now + 1
    scheduler.on_snapshot(I0, snapshot(during, num_preemptions=9, **seen), during)
    assert scheduler.instances(during)[0].is_penalized
    scheduler.set_version(I0, 1, during)
    after = now + 2
    back = {"num_running": 1, "num_waiting": 3, "num_waiting_for_capacity": 3}
    scheduler.on_snapshot(I0, snapshot(after, num_preemptions=13, **back), after)
    assert not scheduler.instances(after)[0].is_penalized
    later = now + 3
    scheduler.on_snapshot(I0, snapshot(later, num_preemptions=14, **seen), later)
    assert scheduler.instances(later)[0].is_penalized


def test_the_same_version_told_again_forgives_nothing():
    scheduler, now = closed_loop(1)
    for at, counter in ((now, 5), (now + 1, 6)):
        scheduler.on_snapshot(I0, snapshot(at, num_preemptions=counter), at)
    scheduler.set_version(I0, 0, now + 1)
    assert scheduler.instances(now + 1)[0].is_penalized


def test_an_engine_that_runs_empty_is_not_thrashing():
    scheduler, now = closed_loop(1)
    for at, running in ((now, 8), (now + 1, 2)):
        scheduler.on_snapshot(
            I0, snapshot(at, num_running=running, num_waiting=0, num_waiting_for_capacity=0), at
        )
    assert not scheduler.instances(now + 1)[0].is_penalized


@pytest.mark.case("R-B19")
def test_the_engines_of_a_data_parallel_server_are_shown_each_by_itself():
    engines = tuple(
        EngineLoad(engine=str(k), num_running=1.0, num_waiting=500.0 * k, kv_use_fraction=None)
        for k in range(2)
    )
    scheduler = fleet_of(2)
    scheduler.on_snapshot(I0, snapshot(1.0, num_waiting=500, engines=engines), 1.0)
    first, second = scheduler.instances(3.0)
    assert (first.num_queued, first.engines, second.engines) == (500, engines, ())
    explained = {view.instance_id: view for view in scheduler.explain(request(), 3.0).instances}
    assert explained[I0].engines == engines


@pytest.mark.case("R-B18", "R-B23")
def test_snapshots_change_nothing_while_feedback_is_off_but_are_shown_with_their_age():
    scheduler = fleet_of(2)
    seen = snapshot(1.0, num_running=99, num_waiting=9, kv_use_fraction=1.0, num_preemptions=5)
    scheduler.on_snapshot(I0, seen, 1.0)
    scheduler.on_snapshot(I0, snapshot(0.5, num_waiting=2), 1.0)  # late news is no news
    first, second = scheduler.instances(3.0)
    assert (first.kv_use_fraction, first.num_queued, first.snapshot_age_s) == (1.0, 9, 2.0)
    assert (second.kv_use_fraction, second.num_queued, second.snapshot_age_s) == (None,) * 3
    scheduler.on_snapshot(I0, snapshot(4.0, num_running=3), 4.0)
    first, _ = scheduler.instances(5.0)
    assert (first.kv_use_fraction, first.num_queued, first.snapshot_age_s) == (None, None, 1.0)
    assert {place(scheduler, 1.0).instance_id for _ in range(2)} == {"i0", "i1"}


def test_a_measured_capacity_replaces_the_estimate():
    scheduler = Scheduler(scheduling(load_metric="kv_tokens"), kv_capacity_by_tp={1: 1000})
    scheduler.observe_instance(spec("i0"), 0.0)
    assert scheduler.instances(0.0)[0].kv_capacity_tokens == 1000
    scheduler.on_snapshot(I0, snapshot(1.0, kv_capacity_tokens=1536), 1.0)
    assert scheduler.instances(1.0)[0].kv_capacity_tokens == 1536
    assert scheduler.take_notices() == ()


def test_a_configured_capacity_wins_and_a_large_difference_is_said_once():
    scheduler = Scheduler(
        scheduling(load_metric="kv_tokens", kv_capacity_tokens_by_tp={1: 1000}),
        kv_capacity_by_tp={1: 7},
    )
    scheduler.observe_instance(spec("i0"), 0.0)
    for tokens in (950, 1536, 1600):
        scheduler.on_kv_capacity_measured(I0, tokens, 1.0)
    assert scheduler.instances(1.0)[0].kv_capacity_tokens == 1000
    assert scheduler.take_notices() == (KvCapacityDiffers(I0, 1, 1000, 1536),)


@pytest.mark.case("T-B75")
def test_an_instance_without_capacity_comes_in_when_it_is_measured():
    scheduler = Scheduler(scheduling(load_metric="kv_tokens"), kv_capacity_by_tp={1: 0})
    scheduler.observe_instance(spec("i0"), 0.0)
    waiting = scheduler.route(request(), 0.0)
    assert waiting.reason == "kv_capacity_unknown"
    scheduler.on_kv_capacity_measured(I0, 1536, 1.0)
    assert waiting.ticket.outcome.instance == I0


def test_every_penalty_and_freshness_end_is_announced():
    scheduler, now = closed_loop(1)
    for at, counter in ((now, 5), (now + 1, 6)):
        scheduler.on_snapshot(I0, snapshot(at, num_preemptions=counter), at)
    dues = []
    while (due := scheduler.next_due_at()) < now + 1000:
        dues.append(due - now)
        scheduler.on_tick(due)
    assert dues == [10.0, 11.0, 61.0]


def test_a_degree_without_a_configured_capacity_is_left_out_although_it_was_measured():
    scheduler = fleet_of(0, load_metric="kv_tokens", kv_capacity_tokens_by_tp={1: 1000})
    for tp in (1, 4):
        scheduler.observe_instance(spec(f"tp{tp}", tp=tp), 0.0)
        scheduler.on_kv_capacity_measured(InstanceId(f"tp{tp}"), 4000, 0.0)
    assert {place(scheduler).instance_id for _ in range(4)} == {"tp1"}
    assert [v.removed_by for v in scheduler.instances(0.0)] == [None, "kv_capacity_unknown"]


def test_the_penalty_lasts_as_long_as_configured():
    scheduler, now = closed_loop(2, metrics_preemption_penalty_ttl_s=5.0)
    scheduler.on_snapshot(I0, snapshot(now, num_preemptions=1.0), now)
    scheduler.on_snapshot(I0, snapshot(now + 1, num_preemptions=2.0), now + 1)
    assert {place(scheduler, now + 5.9).instance_id for _ in range(4)} == {"i1"}
    assert place(scheduler, now + 6.1).instance_id == "i0"


@pytest.mark.case("R-B21")
def test_a_counter_that_begins_anew_within_one_process_counts_from_zero():
    scheduler, now = closed_loop(2)
    for k, count in enumerate((900.0, 3.0)):
        seen = snapshot(now + k, num_preemptions=count, process_started_at_s=100.0)
        scheduler.on_snapshot(I0, seen, now + k)
    views = {v.instance_id: v.is_penalized for v in scheduler.instances(now + 1)}
    assert views == {"i0": True, "i1": False}


def test_a_scrape_that_a_newer_one_overtook_is_no_restart():
    scheduler, now = closed_loop(1)
    for at, count in ((1.0, 10.0), (3.0, 30.0), (2.0, 20.0)):
        scheduler.on_snapshot(I0, snapshot(now + at, num_preemptions=count), now + 3)
    (view,) = scheduler.instances(now + 3)
    assert (view.incarnation, view.removed_by, view.snapshot_age_s) == ("first", None, 0.0)
