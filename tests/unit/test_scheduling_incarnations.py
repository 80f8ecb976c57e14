"""Identity is (instance, incarnation): what ends with a process and what outlives it."""

import random
from collections import Counter

import pytest

from fleets import FIRST, SECOND, fleet_of, place, request, snapshot, spec
from libra.ids import InstanceId, PolicyVersion
from libra.scheduling.load import RemoteLoad
from libra.scheduling.notice import RestartSeen
from libra.scheduling.request import Routed, Wait
from libra.scheduling.slow_start import DURATION_S

I0, I1 = InstanceId("i0"), InstanceId("i1")


@pytest.mark.case("R-B24")
def test_late_releases_of_an_earlier_incarnation_touch_nothing_new():
    scheduler = fleet_of(1)
    old = [place(scheduler) for _ in range(20)]
    scheduler.restart_instance(spec("i0", incarnation=SECOND), 1.0, is_planned=False)
    new = [place(scheduler, 1.0) for _ in range(3)]
    assert {r.incarnation for r in new} == {SECOND}
    for reservation in old:
        assert scheduler.complete(reservation, 5, 2.0)
        assert scheduler.num_in_flight(I0) == 3
    assert scheduler.num_in_flight() == 3


@pytest.mark.case("R-B01")
@pytest.mark.case("R-B07")
def test_discovery_every_second_never_resets_what_is_in_flight():
    scheduler = fleet_of(4)
    for _ in range(40):
        place(scheduler)
    for second in range(1, 6):
        for k in range(4):
            scheduler.observe_instance(spec(f"i{k}"), float(second))
            scheduler.set_ready(InstanceId(f"i{k}"), True, float(second))
    assert [scheduler.num_in_flight(InstanceId(f"i{k}")) for k in range(4)] == [10] * 4
    assert len({place(scheduler, 6.0).instance_id for _ in range(4)}) == 4


@pytest.mark.case("R-B12")
def test_another_start_time_is_a_restart_even_when_nobody_announced_it():
    scheduler = fleet_of(2, enable_metrics_feedback=True, prefix_affinity=True)
    held = place(scheduler, prompt="p")
    other = {"i0": I1, "i1": I0}[held.instance_id]
    scheduler.on_snapshot(held.instance_id, snapshot(1.0, process_started_at_s=1000.0), 1.0)
    scheduler.set_ready(other, False, 1.0)
    scheduler.on_snapshot(held.instance_id, snapshot(2.0, process_started_at_s=1500.0), 2.0)
    assert RestartSeen(held.instance_id, held.incarnation) in scheduler.take_notices()
    assert scheduler.num_in_flight(held.instance_id) == 0
    waiting = scheduler.route(request(prompt="p"), 2.0)
    assert isinstance(waiting, Wait)
    assert waiting.reason == "stale_version"
    scheduler.set_version(held.instance_id, PolicyVersion(0), 3.0)
    placed = waiting.ticket.outcome.reservation
    assert placed.incarnation != held.incarnation
    assert scheduler.affinity_counts.num_broken == 1


@pytest.mark.case("R-B12")
@pytest.mark.case("R-B21")
def test_a_counter_that_fell_is_a_restart_when_the_start_time_is_not_told():
    scheduler = fleet_of(1, enable_metrics_feedback=True)
    scheduler.on_snapshot(I0, snapshot(1.0, num_preemptions=900), 1.0)
    scheduler.on_snapshot(I0, snapshot(2.0, num_preemptions=3), 2.0)
    assert RestartSeen(I0, "first") in scheduler.take_notices()
    (view,) = scheduler.instances(2.0)
    assert view.is_penalized  # the 3 happened since its start


def test_two_restarts_that_nobody_announced_are_told_apart():
    scheduler = fleet_of(1)
    seen = set()
    for k, started_at in enumerate((10.0, 500.0, 900.0)):
        scheduler.on_snapshot(I0, snapshot(float(k), process_started_at_s=started_at), float(k))
        scheduler.set_version(I0, PolicyVersion(0), float(k))
        seen.add(place(scheduler, float(k)).incarnation)
    assert len(seen) == 3


def test_a_start_time_rounded_differently_is_the_same_process():
    scheduler = fleet_of(1)
    held = place(scheduler)
    for at, started_at in ((1.0, 1000.0), (2.0, 1000.6)):
        scheduler.on_snapshot(I0, snapshot(at, process_started_at_s=started_at), at)
    assert scheduler.num_in_flight(I0) == 1
    assert scheduler.complete(held, 5, 3.0)


def test_a_snapshot_of_an_earlier_incarnation_is_ignored():
    scheduler = fleet_of(1, enable_metrics_feedback=True)
    scheduler.restart_instance(spec("i0", incarnation=SECOND), 1.0, is_planned=True)
    scheduler.on_snapshot(I0, snapshot(2.0, kv_use_fraction=1.0), 2.0)
    assert scheduler.instances(2.0)[0].removed_by is None


@pytest.mark.case("R-B27")
def test_a_new_scheduler_has_its_whole_fleet_after_one_round_of_discovery():
    scheduler = fleet_of(0)
    waiting = [scheduler.route(request(), 0.0).ticket for _ in range(8)]
    for k in range(4):
        scheduler.observe_instance(spec(f"i{k}", version=7), 1.0)
    assert all(ticket.outcome is not None for ticket in waiting)
    seen = [place(scheduler, 1.0 + DURATION_S).instance_id for _ in range(40)]
    assert set(seen) == {"i0", "i1", "i2", "i3"}


def test_news_of_an_instance_that_is_gone_is_no_error():
    scheduler = fleet_of(1)
    held = place(scheduler)
    scheduler.remove_instance(I0)
    scheduler.set_ready(I0, True, 1.0)
    scheduler.set_version(I0, PolicyVersion(3), 1.0)
    scheduler.drain_instance(I0, True, 1.0)
    scheduler.on_kv_capacity_measured(I0, 100, 1.0)
    scheduler.on_snapshot(I0, snapshot(1.0), 1.0)
    scheduler.remove_instance(I0)
    assert scheduler.fail(held, "fault", 2.0)
    assert scheduler.num_in_flight(I0) == scheduler.num_in_flight() == 0
    assert scheduler.take_notices() == ()


@pytest.mark.case("R-B90")
def test_each_instance_has_its_own_version_and_the_reservation_carries_it():
    scheduler = fleet_of(2)
    scheduler.set_version(I1, PolicyVersion(1), 0.0)
    seen = {(r.instance_id, r.policy_version) for r in (place(scheduler) for _ in range(4))}
    assert seen == {("i0", 0), ("i1", 1)}
    assert {place(scheduler, min_version=1).instance_id for _ in range(4)} == {"i1"}


@pytest.mark.case("R-B88")
def test_a_change_of_version_touches_nothing_in_flight():
    scheduler = fleet_of(1)
    held = [place(scheduler) for _ in range(16)]
    scheduler.set_version(I0, PolicyVersion(1), 1.0)
    assert scheduler.num_in_flight(I0) == 16
    assert all(scheduler.complete(r, 5, 2.0) for r in held)


def test_a_cold_instance_beside_a_busy_fleet_eases_in():
    scheduler = fleet_of(3)
    scheduler.on_tick(DURATION_S)
    for _ in range(300):
        place(scheduler, DURATION_S)
    cold, began = InstanceId("cold"), DURATION_S
    scheduler.observe_instance(spec("cold"), began)
    taken = [place(scheduler, began).instance_id for _ in range(40)].count("cold")
    assert 25 <= taken <= 40  # it counts as if it carried the mean of 75
    assert scheduler.num_in_flight(cold) < 50
    later = began + DURATION_S
    for _ in range(120):
        place(scheduler, later)
    counts = [v.own_requests for v in scheduler.instances(later)]
    assert max(counts) - min(counts) <= 1


def test_the_ramp_of_a_cold_instance_falls_in_steps_by_time_alone():
    scheduler = fleet_of(1)
    scheduler.on_tick(DURATION_S)
    for _ in range(100):
        place(scheduler, DURATION_S)
    scheduler.observe_instance(spec("cold"), DURATION_S)
    loads = []
    now = DURATION_S
    while (due := scheduler.next_due_at()) <= 2 * DURATION_S:
        assert due > now
        now = due
        scheduler.on_tick(now)
        loads.append(scheduler.instances(now)[1].load)
    assert loads == sorted(loads, reverse=True)
    assert len(loads) == 10
    assert loads[-1] == 0.0


@pytest.mark.case("R-B15")
def test_the_table_is_empty_after_a_hundred_thousand_mixed_ends():
    rng = random.Random(5)
    scheduler = fleet_of(8, max_in_flight_per_instance=20, queue_deadline_s=3.0, queue_capacity=50)
    held, waiting, now = [], [], 0.0
    for _ in range(100_000):
        now += 0.01
        decision = scheduler.route(request(num_prompt_tokens=rng.randrange(1000)), now)
        held += [decision.reservation] if isinstance(decision, Routed) else []
        waiting += [decision.ticket] if isinstance(decision, Wait) else []
        for _ in range(min(len(held), rng.randrange(3))):
            end_one(scheduler, held.pop(rng.randrange(len(held))), rng.random(), now)
    for ticket in waiting:
        scheduler.abandon(ticket, now)
    for reservation in held:
        scheduler.cancel(reservation, now)
    assert scheduler.num_in_flight() == scheduler.num_waiting == 0
    assert {(v.own_requests, v.own_tokens) for v in scheduler.instances(now)} == {(0, 0)}


def end_one(scheduler, reservation, dice, now):
    if dice < 0.6:
        scheduler.complete(reservation, 10, now)
    elif dice < 0.8:
        scheduler.cancel(reservation, now)
    else:
        kind = ("client_error", "saturated", "fault")[int(dice * 100) % 3]
        scheduler.fail(reservation, kind, now)


@pytest.mark.case("R-B43")
def test_instances_that_became_cold_a_moment_apart_stay_level_while_the_fleet_fills():
    scheduler = fleet_of(1)
    scheduler.observe_instance(spec("i1"), 0.4)
    for k in range(400):
        place(scheduler, 0.5 + k * 0.08)  # over the whole ramp
        counts = [view.own_requests for view in scheduler.instances(0.5 + k * 0.08)]
        assert max(counts) - min(counts) <= 1


def test_each_newcomer_begins_with_the_load_of_the_fleet_as_it_is_then():
    scheduler = fleet_of(1)
    scheduler.on_tick(DURATION_S)
    loads = []
    for name in ("a", "b"):
        for _ in range(12):
            place(scheduler, DURATION_S)
        scheduler.observe_instance(spec(name), DURATION_S)
        loads.append({v.instance_id: v.load for v in scheduler.instances(DURATION_S)}[name])
    assert loads == [12 / 2, 24 / 3]


def test_every_cold_instance_carries_the_load_that_all_ranks_together_have():
    scheduler = fleet_of(2)
    remote = {(InstanceId(f"i{k}"), FIRST): RemoteLoad(4, 400) for k in range(2)}
    scheduler.on_remote_load(remote, 1.0)
    loads = [view.load for view in scheduler.instances(1.0)]
    assert loads[0] == loads[1]


@pytest.mark.parametrize("strategy", ["round_robin", "least_connections"])
def test_who_comes_late_gets_a_turn_and_not_all_those_it_missed(strategy):
    scheduler = fleet_of(2, load_balance_strategy=strategy)
    for _ in range(100):
        scheduler.complete(place(scheduler, 0.0), 5, 0.0)
    scheduler.observe_instance(spec("late"), 0.0)
    scheduler.observe_instance(spec("newer", version=1), 0.0)
    seen = Counter()
    for _ in range(40):
        reservation = place(scheduler, 0.0)
        seen[reservation.instance_id] += 1
        scheduler.complete(reservation, 5, 0.0)
    assert set(seen.values()) == {10}


@pytest.mark.case("R-B24")
def test_what_others_have_on_a_process_that_is_gone_counts_for_nobody_until_they_know():
    scheduler = fleet_of(2)
    for at, started in ((1.0, 100.0), (2.0, 200.0)):
        scheduler.on_snapshot(I0, snapshot(at, process_started_at_s=started), at)
    scheduler.set_version(I0, PolicyVersion(0), 2.0)
    scheduler.on_remote_load({(I0, FIRST): RemoteLoad(9, 900)}, 3.0)
    assert [view.remote_requests for view in scheduler.instances(3.0)] == [0, 0]


def test_a_drain_survives_a_restart_that_nobody_announced():
    scheduler = fleet_of(1)
    scheduler.drain_instance(I0, True, 0.0)
    for at, started in ((1.0, 100.0), (2.0, 200.0)):
        scheduler.on_snapshot(I0, snapshot(at, process_started_at_s=started), at)
    scheduler.set_version(I0, PolicyVersion(0), 3.0)
    assert scheduler.instances(3.0)[0].removed_by == "draining"
