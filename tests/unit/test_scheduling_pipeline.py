from collections import Counter

import pytest

from fleets import SECOND, fleet_of, place, request, scheduling, snapshot, spec
from libra.ids import InstanceId, PolicyVersion
from libra.scheduling.request import Refused, Routed, Wait
from libra.scheduling.scheduler import Scheduler

I0, I1 = InstanceId("i0"), InstanceId("i1")


def test_least_connections_goes_where_fewest_requests_run():
    scheduler = fleet_of(3)
    held = [place(scheduler) for _ in range(6)]
    assert Counter(r.instance_id for r in held) == {"i0": 2, "i1": 2, "i2": 2}
    scheduler.complete(held[1], 10, 1.0)
    assert place(scheduler, 1.0).instance_id == held[1].instance_id


@pytest.mark.case("R-B43")
@pytest.mark.parametrize("strategy", ["least_connections", "round_robin", "weighted"])
def test_an_idle_fleet_shares_sequential_requests_evenly(strategy):
    scheduler = fleet_of(4, load_balance_strategy=strategy)
    seen = Counter()
    for _ in range(200):
        reservation = place(scheduler)
        seen[reservation.instance_id] += 1
        scheduler.complete(reservation, 5, 0.0)
    assert set(seen.values()) == {50}


def test_weights_share_sequential_requests_in_their_proportion():
    weights = {"i0": 3.0, "tp1": 1.0}
    scheduler = fleet_of(2, load_balance_strategy="weighted", load_balance_weights=weights)
    seen = Counter()
    for _ in range(40):
        reservation = place(scheduler)
        seen[reservation.instance_id] += 1
        scheduler.complete(reservation, 5, 0.0)
    assert seen == {"i0": 30, "i1": 10}


def test_weights_share_requests_in_flight_in_their_proportion():
    scheduler = fleet_of(2, load_balance_strategy="weighted", load_balance_weights={"i0": 3.0})
    for _ in range(40):
        place(scheduler)
    assert (scheduler.num_in_flight(I0), scheduler.num_in_flight(I1)) == (30, 10)


def test_tokens_weigh_long_prompts_more_than_their_number():
    scheduler = fleet_of(2, load_metric="tokens")
    long = place(scheduler, num_prompt_tokens=1000, max_new_tokens=10)
    others = [place(scheduler, num_prompt_tokens=90, max_new_tokens=10) for _ in range(5)]
    assert {r.instance_id for r in others} == {"i0", "i1"} - {long.instance_id}


def test_kv_tokens_fill_each_degree_in_proportion_to_its_capacity():
    scheduler = Scheduler(
        scheduling(load_metric="kv_tokens", kv_capacity_tokens_by_tp={1: 1000, 4: 3000})
    )
    scheduler.observe_instance(spec("small", tp=1), 0.0)
    scheduler.observe_instance(spec("large", tp=4), 0.0)
    seen = Counter(place(scheduler).instance_id for _ in range(20))
    assert seen == {"small": 5, "large": 15}


def test_an_instance_without_kv_capacity_is_left_out_with_one_warning():
    scheduler = Scheduler(scheduling(load_metric="kv_tokens", kv_capacity_tokens_by_tp={1: 1000}))
    for name, tp in [("known", 1), ("a", 2), ("b", 2)]:
        scheduler.observe_instance(spec(name, tp=tp), 0.0)
    assert {place(scheduler).instance_id for _ in range(5)} == {"known"}
    assert len(scheduler.take_notices()) == 1
    assert scheduler.take_notices() == ()


def test_an_instance_that_is_not_ready_never_gets_a_request():
    scheduler = fleet_of(2)
    scheduler.set_ready(I0, False, 0.0)
    assert {place(scheduler).instance_id for _ in range(4)} == {"i1"}


@pytest.mark.case("R-B86")
def test_a_restarted_instance_is_not_routable_until_it_has_the_wanted_version():
    scheduler = fleet_of(2)
    for name in (I0, I1):
        scheduler.set_version(name, PolicyVersion(7), 1.0)
    scheduler.set_version_floor(PolicyVersion(7), 1.0)
    scheduler.restart_instance(spec("i0", incarnation=SECOND, version=0), 2.0, is_planned=False)
    assert {place(scheduler, 2.0).instance_id for _ in range(6)} == {"i1"}
    scheduler.set_version(I0, PolicyVersion(7), 3.0)
    assert "i0" in {place(scheduler, 90.0).instance_id for _ in range(20)}


def test_a_request_for_a_newer_version_waits_for_it_while_others_are_served():
    scheduler = fleet_of(1)
    newer = scheduler.route(request(min_version=1), 0.0)
    assert isinstance(newer, Wait)
    assert newer.reason == "stale_version"
    assert place(scheduler, min_version=0).instance_id == "i0"
    scheduler.set_version(I0, PolicyVersion(1), 1.0)
    assert isinstance(newer.ticket.outcome, Routed)
    assert newer.ticket.outcome.reservation.policy_version == 1


def test_an_unknown_version_is_not_routable():
    scheduler = fleet_of(1)
    scheduler.set_version(I0, None, 0.0)
    decision = scheduler.route(request(), 0.0)
    assert isinstance(decision, Wait)
    assert decision.reason == "stale_version"


def test_the_queue_cap_holds_back_what_does_not_fit_and_lets_it_go_in_order():
    scheduler = fleet_of(2, max_in_flight_per_instance=1)
    held = [place(scheduler), place(scheduler)]
    waits = [scheduler.route(request(), 0.0) for _ in range(3)]
    assert [w.reason for w in waits] == ["queue_cap"] * 3
    scheduler.complete(held[1], 5, 1.0)
    assert [w.ticket.outcome is None for w in waits] == [False, True, True]
    scheduler.cancel(held[0], 1.0)
    assert [w.ticket.outcome is None for w in waits] == [False, False, True]


def test_a_full_queue_refuses_and_says_for_what_it_would_have_waited():
    scheduler = fleet_of(0, queue_capacity=2)
    for _ in range(2):
        assert isinstance(scheduler.route(request(), 0.0), Wait)
    assert scheduler.route(request(), 0.0) == Refused("queue_full", "no_instances")


@pytest.mark.case("R-B26")
def test_requests_queued_at_zero_instances_go_to_the_first_one_that_comes():
    scheduler = fleet_of(0)
    waits = [scheduler.route(request(), 0.0) for _ in range(10)]
    woken = []
    for wait in waits:
        wait.ticket.wake = lambda: woken.append(1)
    scheduler.observe_instance(spec("late"), 5.0)
    assert {w.ticket.outcome.instance for w in waits} == {"late"}
    assert len(woken) == 10
    assert scheduler.num_waiting == 0


@pytest.mark.case("R-B26")
def test_a_deadline_in_the_queue_ends_in_a_refusal_at_its_time():
    scheduler = fleet_of(0, queue_deadline_s=30.0)
    first = scheduler.route(request(), 0.0).ticket
    second = scheduler.route(request(deadline_at=5.0), 0.0).ticket
    assert scheduler.next_due_at() == 5.0
    scheduler.on_tick(5.0)
    assert first.outcome is None
    assert second.outcome == Refused("deadline", "no_instances")
    scheduler.on_tick(30.0)
    assert first.outcome == Refused("deadline", "no_instances")


def test_an_abandoned_ticket_takes_no_place():
    scheduler = fleet_of(1, max_in_flight_per_instance=1)
    held = place(scheduler)
    gone = scheduler.route(request(), 0.0).ticket
    stays = scheduler.route(request(), 0.0).ticket
    scheduler.abandon(gone, 1.0)
    scheduler.complete(held, 5, 1.0)
    assert gone.outcome is None
    assert isinstance(stays.outcome, Routed)


def test_abandoning_a_ticket_that_was_just_placed_gives_the_place_back():
    scheduler = fleet_of(0)
    ticket = scheduler.route(request(), 0.0).ticket
    scheduler.observe_instance(spec("late"), 1.0)
    scheduler.abandon(ticket, 1.0)
    assert scheduler.num_in_flight() == 0


def test_a_stopping_run_refuses_what_waits_and_what_comes():
    scheduler = fleet_of(1, max_in_flight_per_instance=1)
    held = place(scheduler)
    waiting = scheduler.route(request(), 0.0).ticket
    scheduler.stop_admitting()
    assert waiting.outcome.reason == "draining"
    assert scheduler.route(request(), 0.0) == Refused("draining", None)
    assert scheduler.complete(held, 5, 1.0)


@pytest.mark.case("R-B29")
def test_a_draining_instance_keeps_its_streams_and_gets_no_new_ones():
    scheduler = fleet_of(2)
    held = [place(scheduler) for _ in range(20)]
    scheduler.drain_instance(I0, True, 1.0)
    assert {place(scheduler, 1.0).instance_id for _ in range(20)} == {"i1"}
    assert scheduler.num_in_flight(I0) == 10
    for reservation in held:
        scheduler.complete(reservation, 5, 2.0)
    assert scheduler.num_in_flight(I0) == 0
    scheduler.drain_instance(I0, False, 3.0)
    assert place(scheduler, 3.0).instance_id == "i0"


def test_expected_output_is_learned_per_category_and_clamped_by_the_request():
    scheduler = fleet_of(1)
    assert place(scheduler, category="short").num_tokens == 150
    scheduler.complete(place(scheduler, category="short"), 8, 0.0)
    assert place(scheduler, category="short").num_tokens == 108
    assert place(scheduler, category="other").num_tokens == 150
    assert place(scheduler, category="short", max_new_tokens=3).num_tokens == 103


def test_expected_output_survives_a_weight_sync_that_replaces_every_process():
    scheduler = fleet_of(1)
    scheduler.complete(place(scheduler), 8, 0.0)
    scheduler.restart_instance(spec("i0", incarnation=SECOND, version=1), 1.0, is_planned=True)
    assert place(scheduler, 1.0).num_tokens == 108


@pytest.mark.case("R-B03")
def test_requests_within_one_scrape_window_spread_over_the_fleet():
    scheduler = fleet_of(4, enable_metrics_feedback=True)
    for k in range(4):
        scheduler.on_snapshot(InstanceId(f"i{k}"), snapshot(0.0, num_running=0, num_waiting=0), 0.0)
    seen = Counter(place(scheduler, 0.1).instance_id for _ in range(200))
    assert max(seen.values()) / min(seen.values()) <= 1.3


def test_every_decision_is_explained_as_it_is_taken_also_that_of_a_request_that_waited():
    told = []
    config = scheduling(max_in_flight_per_instance=1)
    scheduler = Scheduler(config, explained=lambda ask, why: told.append((ask, why)))
    scheduler.observe_instance(spec("i0"), 0.0)
    first, second = request(), request()
    routed = scheduler.route(first, 0.0)
    assert isinstance(scheduler.route(second, 1.0), Wait)
    scheduler.complete(routed.reservation, 5, 2.0)
    assert [ask for ask, _ in told] == [first, second, second]
    assert [why.choice for _, why in told] == ["i0", None, "i0"]
    assert [why.instances[0].removed_by for _, why in told] == [None, "queue_cap", None]
    assert told[1][1].reason == "waits: queue_cap"


def test_a_decision_is_explained_with_what_time_alone_has_ended():
    told = []
    scheduler = Scheduler(scheduling(), explained=lambda _, why: told.append(why))
    scheduler.observe_instance(spec("i0"), 0.0)
    scheduler.fail(place(scheduler), "saturated", 0.0, retry_after_s=2.0)
    place(scheduler, 2.0)
    assert [why.choice for why in told] == ["i0", "i0"]


def test_the_oldest_request_goes_first_also_among_those_that_want_different_versions():
    scheduler = fleet_of(1, max_in_flight_per_instance=1)
    scheduler.set_version(I0, PolicyVersion(2), 0.0)
    held = place(scheduler)
    waits = [scheduler.route(request(min_version=v), 0.0) for v in (2, None, 1, None, 2)]
    order = []
    for _ in waits:
        scheduler.complete(held, 5, 0.0)
        (placed,) = [k for k, w in enumerate(waits) if w.ticket.outcome and k not in order]
        order.append(placed)
        held = waits[placed].ticket.outcome.reservation
    assert order == [0, 1, 2, 3, 4]


def test_an_explanation_says_who_is_too_old_for_the_request():
    scheduler = fleet_of(1)
    scheduler.observe_instance(spec("new", version=3), 0.0)
    found = scheduler.explain(request(min_version=3), 0.0)
    assert found.choice == "new"
    assert {v.instance_id: v.removed_by for v in found.instances} == {
        "new": None,
        "i0": "stale_version",
    }
    assert {v.removed_by for v in scheduler.explain(request(), 0.0).instances} == {None}
