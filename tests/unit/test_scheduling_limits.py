"""Bounds of what the scheduler remembers, and the corners of its small parts."""

import math

import pytest

from fleets import fleet_of, place, request, scheduling, spec
from libra.errors import InvariantError
from libra.ids import InstanceId, PolicyVersion, RequestId
from libra.scheduling.affinity import PrefixAffinity
from libra.scheduling.breaker import FAULTS_TO_OPEN, OPEN_INITIAL_S, Breaker
from libra.scheduling.expected_output import MAX_CATEGORIES
from libra.scheduling.order import SLACK_ENTRIES, LoadOrder
from libra.scheduling.queue import WaitingQueue
from libra.scheduling.request import Refused, RouteRequest, Ticket
from libra.scheduling.scheduler import Scheduler
from libra.scheduling.slot import slot_for
from libra.scheduling.slow_start import DURATION_S, NUM_STEPS, cold_fraction, next_step_at


def test_categories_are_bounded_and_the_least_recently_learned_goes():
    scheduler = fleet_of(1)
    for k in range(MAX_CATEGORIES):
        scheduler.complete(place(scheduler, category=f"c{k}"), 5, 0.0)
    scheduler.complete(place(scheduler, category="c0"), 5, 0.0)
    scheduler.complete(place(scheduler, category="one more"), 5, 0.0)
    known = scheduler.expected_output_tokens()
    assert len(known) == MAX_CATEGORIES
    assert "c0" in known
    assert "c1" not in known


def test_an_answer_whose_tokens_nobody_counted_teaches_nothing():
    scheduler = fleet_of(1)
    assert scheduler.complete(place(scheduler), None, 0.0)
    assert scheduler.expected_output_tokens() == {}
    assert scheduler.num_in_flight() == 0


def test_characters_stand_in_for_a_prompt_of_unknown_length():
    ask = RouteRequest(request_id=RequestId("r"), max_new_tokens=10, num_prompt_chars=401)
    assert ask.prompt_tokens() == 101
    assert request(num_prompt_tokens=7).prompt_tokens() == 7
    decision = fleet_of(1).route(ask, 0.0)
    assert decision.reservation.num_tokens == 111


def test_the_order_keeps_no_more_void_entries_than_live_ones_and_some_slack():
    order = LoadOrder()
    slots = [slot_for(spec(f"i{k}"), index=k, prefix_key=k, config=scheduling()) for k in range(10)]
    for slot in slots:
        order.enter(slot)
    for k in range(10_000):
        slot = slots[k * 7 % 10]
        slot.num_requests = k % 13
        order.file(slot)
        assert len(order._heap) <= 2 * len(slots) + SLACK_ENTRIES + 1
    assert order.first() is min(slots, key=lambda s: s.rank())


def test_an_abandoned_queue_keeps_no_deadlines():
    queue = WaitingQueue(capacity=10)
    for k in range(1000):
        ticket = Ticket(k, request(), 0.0, 100.0 + k)
        queue.push(ticket)
        queue.remove(ticket)
        assert len(queue._deadlines) <= 2 * 10 + 64
    assert len(queue) == 0
    assert queue.pop_expired(2000.0) is None
    assert queue.next_deadline == math.inf
    assert queue.pop_any() is None


def test_a_ticket_is_removed_once():
    queue = WaitingQueue(capacity=2)
    ticket = Ticket(1, request(), 0.0, 9.0)
    queue.push(ticket)
    assert queue.remove(ticket)
    assert not queue.remove(ticket)


def test_prompts_are_bounded():
    affinity = PrefixAffinity(3)
    home = slot_for(spec("i0"), index=1, prefix_key=1, config=scheduling())
    affinity.attach(home)
    for k in range(10):
        affinity.choose(f"p{k}", home, num_tokens=1, min_version=None)
    assert len(affinity) == 3


def test_a_request_routed_past_a_trial_is_a_bug_and_says_so():
    breaker = Breaker()
    for serial in range(FAULTS_TO_OPEN):
        breaker.on_fault(serial, 0.0)
    breaker.on_routed(10, OPEN_INITIAL_S)
    with pytest.raises(InvariantError, match="request 11 was routed past the trial"):
        breaker.on_routed(11, OPEN_INITIAL_S)


def test_the_ramp_has_its_steps_and_ends():
    assert cold_fraction(None, 5.0) == 0.0
    assert cold_fraction(5.0, 5.0) == 1.0
    assert cold_fraction(5.0, 5.0 + DURATION_S) == 0.0
    assert next_step_at(5.0, 5.0 + DURATION_S) == math.inf
    now, num_steps = 0.1, 0
    while (due := next_step_at(0.1, now)) < math.inf:
        assert due > now
        now, num_steps = due, num_steps + 1
    assert num_steps in (NUM_STEPS, NUM_STEPS + 1)


def test_the_floor_is_told():
    scheduler = fleet_of(1)
    scheduler.set_version_floor(PolicyVersion(3), 0.0)
    assert scheduler.version_floor == 3


def test_weights_by_name_go_before_weights_by_degree():
    weights = {"tp4": 2.0, "special": 5.0}
    config = scheduling(load_balance_strategy="weighted", load_balance_weights=weights)
    scheduler = Scheduler(config)
    for name, tp in (("special", 4), ("large", 4), ("small", 1)):
        scheduler.observe_instance(spec(name, tp=tp), 0.0)
    assert [view.weight for view in scheduler.instances(0.0)] == [5.0, 2.0, 1.0]


def test_a_fleet_that_went_through_many_versions_keeps_one_order():
    scheduler = fleet_of(2)
    for version in range(1, 50):
        for k in range(2):
            scheduler.set_version(InstanceId(f"i{k}"), PolicyVersion(version), float(version))
    assert len(scheduler._standing.order._order_of) == 1
    assert {place(scheduler, 99.0).instance_id for _ in range(2)} == {"i0", "i1"}


def test_a_second_release_changes_nothing_and_is_counted():
    scheduler = fleet_of(1)
    reservation = place(scheduler)
    assert scheduler.is_open(reservation)
    assert scheduler.cancel(reservation, 0.0)
    assert not scheduler.is_open(reservation)
    assert not scheduler.complete(reservation, 5, 0.0)
    assert not scheduler.fail(reservation, "fault", 0.0)
    assert not scheduler.cancel(reservation, 0.0)
    assert scheduler.num_repeated_releases == 3
    assert scheduler.expected_output_tokens() == {}
    assert scheduler.num_in_flight() == 0


def test_a_request_whose_deadline_has_passed_is_refused_and_takes_no_place():
    scheduler = fleet_of(1)
    assert scheduler.route(request(deadline_at=5.0), 5.0) == Refused("deadline", None)
    assert place(scheduler, 5.0, deadline_at=5.1).instance_id == "i0"


def test_a_success_closes_a_disturbed_breaker_on_a_slot_that_others_use():
    scheduler = fleet_of(1)
    first, second, third = (place(scheduler) for _ in range(3))
    scheduler.fail(first, "fault", 0.0)
    scheduler.complete(second, 5, 0.0)
    assert scheduler.num_in_flight() == 1
    assert scheduler.cancel(third, 0.0)
