"""Faults, saturation and bad requests, told apart."""

import pytest

from fleets import fleet_of, place, request
from libra.ids import InstanceId
from libra.scheduling.breaker import FAULTS_TO_OPEN, OPEN_INITIAL_S, TRIAL_LEASE_S
from libra.scheduling.notice import BreakerClosed, BreakerOpened
from libra.scheduling.request import Routed, Wait

I0 = InstanceId("i0")


def broken(num_instances=1, now=0.0):
    """A fleet whose i0 just had its breaker opened."""
    scheduler = fleet_of(num_instances)
    for k in range(1, num_instances):
        scheduler.set_ready(InstanceId(f"i{k}"), False, now)
    held = [place(scheduler, now) for _ in range(3)]
    for reservation in held:
        scheduler.fail(reservation, "fault", now)
    for k in range(1, num_instances):
        scheduler.set_ready(InstanceId(f"i{k}"), True, now)
    assert scheduler.take_notices() == (BreakerOpened(I0),)
    return scheduler


def next_served(scheduler, now):
    """When the next request is placed, and its reservation."""
    while isinstance(decision := scheduler.route(request(), now), Wait):
        scheduler.abandon(decision.ticket, now)
        now = scheduler.next_due_at()
    return now, decision.reservation


@pytest.mark.case("R-B08")
def test_fifty_bad_requests_in_a_row_change_nothing():
    scheduler = fleet_of(2)
    for _ in range(50):
        scheduler.fail(place(scheduler), "client_error", 0.0)
    assert scheduler.take_notices() == ()
    assert {place(scheduler).instance_id for _ in range(2)} == {"i0", "i1"}


def test_faults_in_a_row_open_the_breaker_and_others_take_over():
    scheduler = broken(2)
    assert {place(scheduler).instance_id for _ in range(10)} == {"i1"}


def test_a_success_between_faults_starts_the_count_again():
    scheduler = fleet_of(1)
    for _ in range(4):
        for _ in range(2):
            scheduler.fail(place(scheduler), "fault", 0.0)
        scheduler.complete(place(scheduler), 5, 0.0)
    assert scheduler.take_notices() == ()


def test_half_open_lets_one_request_try_and_its_success_closes():
    scheduler = broken()
    waiting = [scheduler.route(request(), 0.0) for _ in range(3)]
    assert {w.reason for w in waiting} == {"breaker_open"}
    scheduler.on_tick(1.0)
    assert [isinstance(w.ticket.outcome, Routed) for w in waiting] == [True, False, False]
    assert scheduler.route(request(), 1.0).reason == "breaker_trial"
    scheduler.complete(waiting[0].ticket.outcome.reservation, 5, 2.0)
    assert scheduler.take_notices() == (BreakerClosed(I0),)
    assert all(isinstance(w.ticket.outcome, Routed) for w in waiting)


@pytest.mark.case("R-B10")
def test_a_cancelled_trial_gives_its_place_to_the_next():
    scheduler = broken()
    trial = place(scheduler, 1.0)
    assert isinstance(scheduler.route(request(), 1.0), Wait)
    scheduler.cancel(trial, 1.5)
    assert scheduler.num_in_flight(I0) == 1  # the waiting one became the trial
    assert scheduler.route(request(), 1.6).reason == "breaker_trial"


@pytest.mark.case("R-B10")
def test_a_trial_without_an_outcome_does_not_hold_the_place_for_ever():
    scheduler = broken()
    place(scheduler, 1.0)
    waiting = scheduler.route(request(), 1.0)
    assert waiting.reason == "breaker_trial"
    scheduler.on_tick(1.0 + TRIAL_LEASE_S)
    assert isinstance(waiting.ticket.outcome, Routed)


def test_a_failed_trial_doubles_the_pause_up_to_a_limit():
    scheduler = broken()
    now, pauses = 0.0, []
    for _ in range(8):
        opened_at = now
        now, reservation = next_served(scheduler, now)
        pauses.append(now - opened_at)
        scheduler.fail(reservation, "fault", now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_failures_of_requests_from_before_do_not_judge_the_trial():
    scheduler = fleet_of(1)
    held = [place(scheduler) for _ in range(5)]
    for reservation in held[:3]:
        scheduler.fail(reservation, "fault", 0.0)
    trial = place(scheduler, 1.0)
    scheduler.fail(held[3], "fault", 1.1)
    scheduler.complete(trial, 5, 1.2)
    assert isinstance(scheduler.route(request(), 1.2), Routed)


@pytest.mark.case("R-B09")
def test_saturation_pauses_an_instance_for_as_long_as_it_asks_and_opens_nothing():
    scheduler = fleet_of(2)
    held = [place(scheduler) for _ in range(8)]
    for reservation in held:
        if reservation.instance_id == I0:
            scheduler.fail(reservation, "saturated", 0.0, retry_after_s=3.0)
    assert {place(scheduler, 2.9).instance_id for _ in range(10)} == {"i1"}
    assert place(scheduler, 3.0).instance_id == "i0"
    assert scheduler.take_notices() == ()


def test_repeated_saturation_backs_off_longer_and_one_success_ends_it():
    scheduler = fleet_of(1)
    now, pauses = 0.0, []
    for _ in range(5):
        refused_at = now
        now, reservation = next_served(scheduler, now)
        pauses.append(now - refused_at)
        scheduler.fail(reservation, "saturated", now)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0]
    now, reservation = next_served(scheduler, now)
    scheduler.complete(reservation, 5, now)
    scheduler.fail(place(scheduler, now), "saturated", now)
    assert next_served(scheduler, now)[0] == now + 0.5


def test_a_hundred_refusals_at_once_are_one_reason_to_pause():
    scheduler = fleet_of(1)
    for reservation in [place(scheduler) for _ in range(100)]:
        scheduler.fail(reservation, "saturated", 0.0)
    assert isinstance(scheduler.route(request(), 0.5), Routed)


def test_retry_after_zero_still_leaves_the_instance_a_moment():
    scheduler = fleet_of(1)
    scheduler.fail(place(scheduler), "saturated", 0.0, retry_after_s=0.0)
    assert scheduler.route(request(), 0.0).reason == "saturated"


@pytest.mark.case("R-B08")
@pytest.mark.parametrize("kind", ["client_error", "saturated"])
def test_a_trial_that_the_instance_turned_down_closes_the_breaker(kind):
    scheduler = fleet_of(1)
    for _ in range(FAULTS_TO_OPEN):
        scheduler.fail(place(scheduler), "fault", 0.0)
    scheduler.fail(place(scheduler, OPEN_INITIAL_S), kind, OPEN_INITIAL_S)
    assert scheduler.instances(OPEN_INITIAL_S)[0].breaker == "closed"


@pytest.mark.case("R-B08")
def test_a_bad_request_between_faults_starts_the_count_again():
    scheduler = fleet_of(1)
    for kind in ("fault", "fault", "client_error", "fault", "fault"):
        scheduler.fail(place(scheduler), kind, 0.0)
    assert scheduler.instances(0.0)[0].breaker == "closed"
